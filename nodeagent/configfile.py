"""The settings file: YAML into the frozen models with the line of each mistake.

PyYAML's plain loader forgets where a value stood, and silently keeps the last of two equal keys. So
the file is composed into nodes first: duplicates are refused there, and the place of a value that
pydantic refuses is looked up there afterwards.
"""

import asyncio
import os
import re
import typing
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import kit.errors
import kit.files
import kit.redact
import kit.slips

if TYPE_CHECKING:  # a client of the API looks for the socket alone (``glean``): it loads no model
    import pydantic
    import pydantic_core

    from nodeagent.settings import Settings

DEFAULT_PATH = Path("/etc/nodeagent/nodeagent.yaml")
ENVIRONMENT = "NODEAGENT_CONFIG"
MOST_MISTAKES = 20  # that an error names
LONGEST_MISTAKE = 1000  # characters of it
LOOK_SECONDS = 1.0  # how often the file is read while the agent runs
SETTLE_SECONDS = 0.2  # editors write several times
_POSITION = re.compile(r"\[\d+\]")
# Lines of a file that is no YAML any more.
_SOCKET = re.compile(
    r"""^admin:[^\n]*?(?:\n[ \t#][^\n]*?)*?\bsocket: *(["']?)(?P<path>/[^"'#,}\s]+)""", re.MULTILINE
)
_STATE_DIR = re.compile(r"""^state_dir: *(["']?)(?P<path>/[^"'#\n]*?)\1 *(#.*)?$""", re.MULTILINE)


def locate(given: Path | None) -> Path:
    """``--config``, else $NODEAGENT_CONFIG, else /etc/nodeagent/nodeagent.yaml."""
    return given or Path(os.environ.get(ENVIRONMENT) or DEFAULT_PATH)


def load(path: Path, data: bytes | None = None) -> "Settings":
    """The settings in ``path``, or in ``data``, which ``look`` gave of it. SettingsError names the
    file, the line, the cause and a remedy."""
    try:
        text = (kit.files.read_small(path) if data is None else data).decode("utf-8")
    except FileNotFoundError as error:
        raise kit.errors.SettingsError(
            str(path),
            "there is no such settings file",
            f"name one with --config FILE or ${ENVIRONMENT}, or put one at {DEFAULT_PATH}",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise kit.errors.SettingsError(
            f"{path}:{line}", f"is not UTF-8 (byte 0x{error.object[error.start]:02x})",
            "save the file as UTF-8",
        ) from error  # fmt: skip
    except OSError as error:
        why = error.strerror or error
        raise kit.errors.SettingsError(
            str(path), f"cannot be read ({why})", "make it a file that this user may read"
        ) from error
    return parse(text, str(path))


async def changes(path: Path, last: bytes | None) -> AsyncIterator[bytes | None]:
    """The bytes of ``path`` whenever they differ from those at the last item; None: it is gone.
    ``last``: those that were loaded.

    The file is small, so it is read again and again: kubelet swaps a link beside it, an editor
    replaces it, a network file system tells nobody.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = await asyncio.to_thread(look, path)
        if now != last:
            await asyncio.sleep(SETTLE_SECONDS)
            if await asyncio.to_thread(look, path) == now:
                last = now
                yield now


def look(path: Path) -> bytes | None:
    """None: there is no such file, or none that can be read."""
    try:
        return kit.files.read_small(path)
    except OSError:
        return None


@dataclass(frozen=True)
class Loaded:
    """``data``: what was in the file. ``problem``: why these settings are not its own, or ""."""

    settings: "Settings"
    data: bytes | None = None
    problem: str = ""


def load_or_last(path: Path, last_good: Path | None) -> Loaded:
    """The settings in ``path``; when they cannot be used, those in ``last_good``. SettingsError
    when neither can be used."""
    data = look(path)  # once: another file may take its place while this one is parsed
    try:
        return Loaded(load(path, data), data)
    except kit.errors.SettingsError as error:
        if last_good is None:
            raise
        try:
            return Loaded(load(last_good), data, str(error))
        except kit.errors.SettingsError:
            raise error from None


def keep(last_good: str, text: str) -> str:
    """Keep the text of settings that were found good. Returns why it could not, or nothing."""
    try:
        kit.files.keep(last_good, text)
    except OSError as error:
        return f"no copy of the settings is kept at {last_good} ({error.strerror})"
    return ""


@dataclass(frozen=True)
class Gleaned:
    """What even a file with mistakes says; None of a path that it does not say.

    ``off``: the rooms that it names as off. An empty value is no word: ``room:`` with nothing
    behind it may be what a slip left.
    """

    state_dir: Path | None = None
    socket: Path | None = None
    off: frozenset[str] = frozenset()


def glean(path: Path) -> Gleaned:
    try:
        text = kit.files.read_small(path).decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError):
        return Gleaned()
    try:
        root = yaml.SafeLoader(text).get_single_node()
    except (ValueError, yaml.YAMLError, RecursionError):
        lines = (each.search(text) for each in (_STATE_DIR, _SOCKET))
        state_dir, socket = (Path(line["path"]) if line else None for line in lines)
        return Gleaned(state_dir, socket)
    plain = _scalars(root)
    off = frozenset(key for key, value in plain.items() if value.lower() in ("null", "~"))
    texts = plain.get("state_dir", ""), _scalars(root, "admin").get("socket", "")
    state_dir, socket = (Path(each) if each.startswith("/") else None for each in texts)
    return Gleaned(state_dir, socket, off)


def _scalars(node: yaml.Node | None, *below: str) -> dict[str, str]:
    """The plain values of a mapping, or of the one below it."""
    pairs = [
        (key.value, value)
        for key, value in (node.value if isinstance(node, yaml.MappingNode) else ())
        if isinstance(key, yaml.ScalarNode)
    ]
    if below:
        return _scalars(dict(pairs).get(below[0]), *below[1:])
    return {key: value.value for key, value in pairs if isinstance(value, yaml.ScalarNode)}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key set twice and an alias that contains itself (SettingsError),
    and whose errors name the line of a malformed date or number."""

    def __init__(self, text: str, origin: str) -> None:
        super().__init__(text)
        self._origin = origin

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # an alias of what is not composed yet
            raise self._refused(node, "an alias contains itself", "write its content out")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise self._refused(key, f"{_short(key.value)!r} is set twice", "keep one of them")
            seen.add(key.value)
        return node

    def _refused(self, node: yaml.Node, cause: str, remedy: str) -> kit.errors.SettingsError:
        line = node.start_mark.line + 1
        return kit.errors.SettingsError(f"{self._origin}:{line}", cause, remedy)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"a value is malformed: {kit.slips.problem(error)}", node.start_mark
            ) from None


def parse(text: str, origin: str) -> "Settings":
    """The settings in ``text``; ``origin`` names it in errors. Raises SettingsError."""
    import pydantic

    from nodeagent.settings import Settings

    try:
        loader = _Loader(text, origin)
        root = loader.get_single_node()
        if root is None:
            return Settings()
        plain = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        number = kit.slips.line(error)
        raise kit.errors.SettingsError(
            f"{origin}:{number}" if number else origin,
            f"is not valid YAML ({kit.slips.problem(error)})",
            "correct the line",
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise kit.errors.SettingsError(
            origin, f"is not valid YAML ({kit.slips.problem(error)})", "correct the file"
        ) from None
    except RecursionError as error:
        raise kit.errors.SettingsError(
            origin, "is nested too deeply", "write it out in fewer levels"
        ) from error
    try:
        return Settings.model_validate(plain)
    except pydantic.ValidationError as error:
        raise _readable(error, root, origin) from error


def _readable(
    error: "pydantic.ValidationError", root: yaml.Node, origin: str
) -> kit.errors.SettingsError:
    from nodeagent.settings import GONE

    index: Index = {}
    found: dict[Place, tuple[int, pydantic_core.ErrorDetails, str | None]] = {}
    below: set[Place] = set()  # what has a mistake inside it
    for problem in error.errors(include_url=False):
        place = (*problem["loc"], *problem.get("ctx", {}).get("place", ()))
        line, path, node = _find(root, place, index, problem["type"] == "missing")
        below.update(path[:end] for end in range(len(path)))
        if path in found and not found[path][1]["type"].endswith("_type"):
            continue  # of a value that may be this or that, what fits it best is said
        written = node.value if isinstance(node, yaml.ScalarNode) else None
        found[path] = line, problem, written
    lines = sorted((at[0], _dotted(path), path) for path, at in found.items() if path not in below)
    # The search for similar keys is slow, and the error has the first mistakes only.
    meant = _meant((path, found[path][1]) for _, _, path in lines[: 2 * MOST_MISTAKES])
    lines = [at for at in lines if at[2] not in meant or found[at[2]][1]["type"] != "missing"]
    told = []
    for line, name, path in lines[:MOST_MISTAKES]:
        _, problem, written = found[path]
        instead = GONE.get(_POSITION.sub("", name))
        said = (
            f"this setting is gone; {instead}"
            if instead
            else kit.slips.cause(problem, written, _known(problem))
        )
        told.append(f"{origin}:{line}: {_short(name or 'the file')}: {_short(said)}")
    if len(lines) > MOST_MISTAKES:
        told.append(f"and {len(lines) - MOST_MISTAKES} more mistakes")
    thing = f"{origin}:{lines[0][0]}"
    all_of_them = "; ".join(told).removeprefix(f"{thing}: ")
    remedy = f"correct it and run 'nodeagent config check {origin}'"
    made = kit.errors.SettingsError(thing, all_of_them, remedy)
    made.lines = [*map(kit.redact.text, told), remedy] if len(told) > 1 else ()
    return made


def _meant(found: "Iterable[tuple[Place, pydantic_core.ErrorDetails]]") -> "set[Place]":
    """What the unknown keys among mistakes stand for, where that is one key."""
    meant: set[Place] = set()
    for path, problem in found:
        if problem["type"] == "extra_forbidden":
            known = _known(problem)
            near = kit.slips.close(str(path[-1]), known) or known
            meant |= {(*path[:-1], *near)} if len(near) == 1 else set()
    return meant


def _known(problem: "pydantic_core.ErrorDetails") -> list[str]:
    """The keys that a section may have where the problem is, those that it must have first."""
    from nodeagent.settings import Settings

    location = problem["loc"]
    if problem["type"] == "extra_forbidden":
        location = location[:-1]
    elif problem["type"] not in ("model_type", "model_attributes_type"):
        return []
    found: list[type[pydantic.BaseModel]] = [Settings]
    for part in location:
        fields = [
            field
            for model in found
            for name, field in model.model_fields.items()
            if part in (field.alias or name, model.__name__)
        ]
        kinds = [m for m in found if _kind(m) == part or m.__name__ == part]
        if fields or kinds:
            found = kinds or [m for field in fields for m in _models(field.annotation)]
    known = {f.alias or n: f.is_required() for m in found for n, f in m.model_fields.items()}
    return sorted(known, key=lambda name: not known[name])


def _kind(model: "type[pydantic.BaseModel]") -> str | None:
    kind = model.model_fields.get("kind")
    return None if kind is None else str(typing.get_args(kind.annotation)[0])


def _models(annotation: Any) -> "list[type[pydantic.BaseModel]]":
    import pydantic

    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _short(text: str) -> str:
    """A key or a value may be as long as the file."""
    return text if len(text) <= LONGEST_MISTAKE else f"{text[:LONGEST_MISTAKE]}…"


Place = tuple[int | str, ...]  # the keys and numbers that lead to a value
# The keys of mappings that were looked through, with their lines and values.
Index = dict[yaml.Node, dict[str, tuple[int, yaml.Node]]]


def _keys(node: yaml.MappingNode, index: Index) -> dict[str, tuple[int, yaml.Node]]:
    if node not in index:
        index[node] = {
            key.value: (key.start_mark.line + 1, value)
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        }
    return index[node]


def _find(
    root: yaml.Node, location: Place, index: Index, missing: bool
) -> tuple[int, Place, yaml.Node]:
    """Line, way and value of the deepest part of ``location`` that the file has.

    Skips parts that are not keys of the file: pydantic also names the members of unions.
    ``missing``: the last part is what the file does not have.
    """
    path: Place = ()
    node, line = root, root.start_mark.line + 1
    for position, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            if str(part) in (keys := _keys(node, index)):
                line, node = keys[str(part)]
                path = (*path, str(part))
            elif missing and position == len(location) - 1:
                path = (*path, str(part))
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            node = node.value[part]
            line, path = node.start_mark.line + 1, (*path, part)
    return line, path, node


def _dotted(path: Place) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def dump(settings: "Settings") -> str:
    """The effective settings, defaults included, as YAML in ASCII that reads back to the same."""
    plain: dict[str, Any] = settings.model_dump(mode="json", exclude_none=True)
    return str(yaml.safe_dump(plain, sort_keys=False))
