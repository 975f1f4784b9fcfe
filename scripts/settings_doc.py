"""Write docs/settings.md from the models: every setting with unit, default and reason."""

import ast
import inspect
import itertools
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import pages
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from nodeagent import rooms
from nodeagent.settings import Process

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

The agent reads one YAML file: `nodeagent --config FILE run`; without `--config` the file in
`$NODEAGENT_CONFIG`, else `/etc/nodeagent/nodeagent.yaml`. Unknown keys are refused. Write sizes
like `500GiB`, times like `30s`, shares like `10%`. `nodeagent config check FILE` prints the
effective settings, or what is wrong and in which line.

The agent reads the file again when it changes, also when a ConfigMap is updated. Most settings
change while it runs. The log, `/readyz` and the status page name those that need a restart.

`scripts/settings_doc.py` makes this page from the models; a test checks that it is current.
"""


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


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    """A table row for each setting of ``model`` and of the models inside it."""
    found = []
    for name, field in model.model_fields.items():
        inner = models(field.annotation)
        many = typing.get_origin(field.annotation) is tuple
        path = f"{prefix}{name}{'[]' if many and inner else ''}"
        if field.default is PydanticUndefined and field.default_factory is None:
            default = "required"
        elif inner or field.default is None or field.default == ():
            default = ""
        else:
            shown = model.model_construct().model_dump(mode="json", warnings=False).get(name)
            default = f"`{shown}`"
        meaning = description(model, name).replace("<", "&lt;")
        found.append(f"| `{path}` | {default} | {meaning} |")
        for each in inner:
            kind = each.model_fields.get("kind")
            label = f"{path}({typing.get_args(kind.annotation)[0]})" if kind else path
            found += rows(each, f"{label}.")
    return found


def section(title: str, text: str, model: type[BaseModel], prefix: str) -> str:
    lines = [f"## {title}", "", *([text, ""] if text else [])]
    lines += ["| setting | default | meaning |", "| --- | --- | --- |", *rows(model, prefix)]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole page."""
    parts = [HEAD, section("The process", "", Process, "")]
    parts += [
        section(f"`{room.name}`", room.summary, room.settings, f"{room.name}.")
        for room in rooms.ROOMS
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    import crds  # its schemas are made of the same models

    TARGET.write_text(document())
    crds.write()
