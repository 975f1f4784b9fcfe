"""Write docs/settings.md from the models: every setting with unit, default and reason."""

import ast
import inspect
import itertools
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import pages
from pydantic import BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

from nodeagent import rooms
from nodeagent.settings import Process

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_FEW = 4  # settings that need no heading of their own
TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

The agent reads one YAML file. It uses the first of these that you set:

1. the FILE of `nodeagent --config FILE run`
2. the file that `$NODEAGENT_CONFIG` names
3. `/etc/nodeagent/nodeagent.yaml`

`nodeagent config check FILE` prints the effective settings, or the mistakes with their lines.
`nodeagent doctor` checks sources, keys and disks on the node.

* The agent refuses unknown keys.
* Write sizes like `500GiB` or `500Gi`, times like `30s`, `5m`, `2h` or `7d`, shares like `10%`.
* The agent reads a changed file again. If a changed setting needs a restart, the log, `/readyz` and
  the status page name this setting.

The parentheses after a name contain the default or "required", then for some settings the allowed
range. A setting without parentheses is not set by default. `[]` means a list. `RULE` is the name of
an [audit rule](audit.md). `source(rbd)` is a source of kind `rbd`.
"""


EXAMPLES = {
    "": """\
admin: {group: storage, group_role: read, metrics: "127.0.0.1:9470"}
kubelet: {config: /var/lib/kubelet/config.yaml}
kubernetes: {}   # in a pod
""",
    "volumes": """\
volumes:
  clusters: [{name: main, monitors: ["10.0.0.1:6789"], secret_file: /etc/nodeagent/volumes.key}]
  guard: {mode: dry-run}
  audit: {rules: {unread-log: {enabled: false}}}
""",
    "cache": """\
cache:
  budget: 2TiB
  reserve: 15%
  datasets:
    - name: coco
      freshness: snapshot
      source: {kind: cephfs, monitors: ["10.0.0.1:6789"], path: /datasets/coco, snapshot: v1,
               secret_file: /etc/nodeagent/coco.key}
""",
    "preheat": """\
preheat:
  pin_budget: 200GiB
  images:
    - {ref: "registry.example/fw/torch:v2", pin: always, priority: 10}
  retain: {for: 72h}
""",
}


def models(annotation: Any) -> list[type[BaseModel]]:
    """The settings models inside an annotation (unions, tuples, Annotated)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        return [m for part in typing.get_args(annotation) for m in models(part)]
    return []


def description(model: type[BaseModel], name: str) -> str:
    """The ``description`` of a field, or the text below it in the source, or the comment beside or
    above it; empty without one."""
    known = model.model_fields[name].description
    if known is not None:
        return known
    owner = next(each for each in model.__mro__ if name in inspect.get_annotations(each))
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    for field, below in itertools.pairwise(body.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=found)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name:
                return " ".join(text.split())
    return pages.comments(owner).get(name, "")


def rows(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each setting of ``model`` and of the models inside it.

    None for a section that is always there or a list without a default, nor for the kind that a
    name has.
    """
    found = []
    for name, field in model.model_fields.items():
        inner = models(field.annotation)
        origin = typing.get_origin(field.annotation)
        path = f"{prefix}{field.alias or name}"
        path += {tuple: "[]", dict: ".RULE"}.get(origin, "") if inner else ""
        listed = bool(inner) and origin in (tuple, dict) and not default(field)
        if not (listed or (inner and isinstance(field.default, BaseModel))):
            notes = ", ".join(filter(None, (default(field), bounds(field))))
            found.append((path, notes, description(model, name)))
        if len(inner) > 1:
            found += of_kinds(inner, path)
        else:
            found += [each for only in inner for each in rows(only, f"{path}.")]
    return found


def of_kinds(inner: list[type[BaseModel]], path: str) -> list[tuple[str, str, str]]:
    """The same for models that ``kind`` tells apart; once what several have in common."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for model in inner:
        (kind,) = typing.get_args(model.model_fields["kind"].annotation)
        for each in rows(model, ""):
            kinds.setdefault(each, []).append(kind)
    return [
        (f"{path}({','.join(which)}).{name}", value, meaning)
        for (name, value, meaning), which in kinds.items()
        if name != "kind"
    ]


def default(field: FieldInfo) -> str:
    """What holds when the file does not say, as the file would say it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, tuple) and all(isinstance(each, BaseModel) for each in value):
        value = tuple(each.name for each in value)
    for mark in field.metadata:
        if isinstance(mark, PlainSerializer):
            written = mark.func(value)
            value = written if field.annotation is int else _short(written)
    if isinstance(value, tuple):
        listed = ", ".join('"*"' if each == "*" else each for each in value)
        return f"`[{listed}]`"
    if value in ("on", "off"):  # YAML would take the bare word for true or false
        value = f'"{value}"'
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def bounds(field: FieldInfo) -> str:
    """Like ``1-64``, for a number that has a least and a greatest value."""
    limits: dict[str, Any] = {}
    for mark in field.metadata:
        for name in ("ge", "gt", "le", "lt"):
            if (value := getattr(mark, name, None)) is not None:
                limits["least" if name[0] == "g" else "most"] = value
    if limits.keys() != {"least", "most"} or limits["most"] >= 10**5 or field.annotation is str:
        return ""
    least, most = limits["least"], limits["most"]
    if field.annotation is float:
        least, most = (_short(f"{each:.0f}s") for each in (least, most))
    return f"{least} to {most}" if limits["least"] else f"up to {most}"


def _short(written: str) -> str:
    """``2419200s`` as ``28d``, ``0.1`` as ``10%``."""
    if not written.endswith("s"):
        return f"{float(written):.0%}"
    seconds = int(written.removesuffix("s"))
    whole = (f"{seconds // each}{unit}" for unit, each in _UNITS if not seconds % each)
    return next(whole) if seconds else "0"


def section(title: str, text: str, model: type[BaseModel], name: str) -> str:
    lines = [f"## {title}", "", *([text, ""] if text else [])]
    lines += ["```yaml", EXAMPLES[name].rstrip(), "```", ""]
    prefix = f"{name}." if name else ""
    parts: dict[str, list[str]] = {}
    for path, notes, meaning in rows(model, prefix):
        part = re.split(r"\W", path.removeprefix(prefix))[0]
        parts.setdefault(part, []).append(pages.item(path, notes, meaning))
    lines += [each for items in parts.values() if len(items) < _FEW for each in items]
    for part, items in parts.items():
        if len(items) >= _FEW:
            lines += ["", f"### `{prefix}{part}`", "", *items]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole page."""
    parts = [HEAD, section("The process", "", Process, "")]
    parts += [
        section(f"`{room.name}`", room.summary, room.settings, room.name) for room in rooms.ROOMS
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    import crds  # its schemas are made of the same models

    TARGET.write_text(document())
    crds.write()
