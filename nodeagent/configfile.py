"""The settings file: YAML into the frozen models with the line of each mistake.

PyYAML's plain loader forgets where a value stood, and silently keeps the last of two equal keys. So
the file is composed into nodes first: duplicates are refused there, and the place of a value that
pydantic refuses is looked up there afterwards.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pydantic_core
import yaml

import kit.errors
import kit.files
import kit.slips
from nodeagent.settings import Settings

DEFAULT_PATH = Path("/etc/nodeagent/nodeagent.yaml")
ENVIRONMENT = "NODEAGENT_CONFIG"
LARGEST_FILE = 2**20  # bytes; a ConfigMap has no more
MOST_MISTAKES = 20  # that an error names
LONGEST_MISTAKE = 1000  # characters of it
LOOK_SECONDS = 1.0  # how often the file is read while the agent runs
SETTLE_SECONDS = 0.2  # editors write several times
# The line of a file that is no YAML any more.
_STATE_DIR = re.compile(r"""^state_dir: *(["']?)(?P<path>/[^"'#\n]*?)\1 *(#.*)?$""", re.MULTILINE)


def locate(given: Path | None) -> Path:
    """``--config``, else $NODEAGENT_CONFIG, else /etc/nodeagent/nodeagent.yaml."""
    return given or Path(os.environ.get(ENVIRONMENT) or DEFAULT_PATH)


def load(path: Path) -> Settings:
    """The settings in ``path``. SettingsError names the file, the line, the cause and a remedy."""
    try:
        text = read(path).decode("utf-8")
    except FileNotFoundError as error:
        raise kit.errors.SettingsError(
            str(path),
            "there is no such settings file",
            f"name one with --config FILE or ${ENVIRONMENT}, or put one at {DEFAULT_PATH}",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise kit.errors.SettingsError(
            str(path), f"cannot be read ({error})", "make it a readable UTF-8 file"
        ) from error
    return parse(text, str(path))


def read(path: Path) -> bytes:
    """OSError, also when there is more in it than settings can be."""
    return kit.files.read_small(path, LARGEST_FILE)


async def changes(path: Path) -> AsyncIterator[None]:
    """One item whenever the bytes of ``path`` differ from those at the last item, or it is gone.

    The file is small, so it is read again and again: kubelet swaps a link beside it, an editor
    replaces it, a network file system tells nobody.
    """
    last = await asyncio.to_thread(_bytes, path)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = await asyncio.to_thread(_bytes, path)
        if now != last:
            await asyncio.sleep(SETTLE_SECONDS)
            if await asyncio.to_thread(_bytes, path) == now:
                last = now
                yield


def _bytes(path: Path) -> bytes | None:
    """None: there is no such file, or none that can be read."""
    try:
        return read(path)
    except OSError:
        return None


def load_or_last(path: Path, last_good: Path | None) -> tuple[Settings, str]:
    """The settings in ``path`` and an empty text. When they cannot be used: those in ``last_good``,
    and why. SettingsError when neither can be used."""
    try:
        settings = load(path)
    except kit.errors.SettingsError as error:
        if last_good is None:
            raise
        try:
            return load(last_good), str(error)
        except kit.errors.SettingsError:
            raise error from None
    return settings, ""


def keep(path: str, last_good: str) -> str:
    """Copy settings that were found good. Returns why no copy could be made, or nothing."""
    try:
        data, copy = read(Path(path)), Path(last_good)
        if not copy.exists() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            kit.files.save(copy, data)
    except OSError as error:
        return f"no copy of the settings is kept at {last_good} ({error.strerror})"
    return ""


def glean(path: Path, room: str) -> tuple[Path | None, bool]:
    """What even a file with mistakes says: its state_dir, and whether it names ``room`` as off.

    An empty value is no word: ``room:`` with nothing behind it may be what a slip left.
    """
    try:
        text = read(path).decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError):
        return None, False
    try:
        root = yaml.SafeLoader(text).get_single_node()
    except (ValueError, yaml.YAMLError, RecursionError):
        line = _STATE_DIR.search(text)
        return (Path(line["path"]) if line else None), False
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    plain = {
        key.value: value.value
        for key, value in pairs
        if isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)
    }
    state_dir = Path(plain.get("state_dir", ""))
    off = plain.get(room, "").lower() in ("null", "~")
    return (state_dir if state_dir.is_absolute() else None), off


class _Loader(yaml.SafeLoader):
    """SafeLoader whose errors name the line of a malformed date or number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"a value is malformed: {kit.slips.problem(error)}", node.start_mark
            ) from None


def parse(text: str, origin: str) -> Settings:
    """The settings in ``text``; ``origin`` names it in errors. Raises SettingsError."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Settings()
        _refuse_duplicates(root, origin)
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


def _refuse_duplicates(
    node: yaml.Node,
    origin: str,
    above: tuple[yaml.Node, ...] = (),
    well: set[yaml.Node] | None = None,
) -> None:
    """SettingsError for a key set twice, and for an alias that contains itself.

    ``well``: what has been looked at. Aliases of aliases would else multiply the work.
    """
    well = set() if well is None else well
    if node in well:
        return
    if node in above:
        raise kit.errors.SettingsError(
            f"{origin}:{node.start_mark.line + 1}",
            "an alias contains itself",
            "write its content out",
        )
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise kit.errors.SettingsError(
                        f"{origin}:{key.start_mark.line + 1}",
                        f"{_short(key.value)!r} is set twice",
                        "keep one of them",
                    )
                seen.add(key.value)
            _refuse_duplicates(value, origin, above, well)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, origin, above, well)
    well.add(node)


def _readable(
    error: pydantic.ValidationError, root: yaml.Node, origin: str
) -> kit.errors.SettingsError:
    lines = []
    index: Index = {}
    for problem in error.errors(include_url=False):
        line, path = _find(root, problem["loc"], index)
        lines.append((line, f"{path or 'the file'}: {_cause(problem)}"))
    lines.sort()
    first_line, first = lines[0]
    more = "".join(f"\n  {origin}:{line}: {_short(text)}" for line, text in lines[1:MOST_MISTAKES])
    if len(lines) > MOST_MISTAKES:
        more += f"\n  and {len(lines) - MOST_MISTAKES} more mistakes"
    first = _short(first)
    return kit.errors.SettingsError(
        f"{origin}:{first_line}", first + more, "correct it and run 'nodeagent config check' again"
    )


def _cause(problem: pydantic_core.ErrorDetails) -> str:
    """Pydantic's message, except where it speaks of its own model instead of the file."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return "there is no such setting"
        case "missing":
            return "this setting is missing"
        case "model_type":
            return "it is empty, or no section; write {} for its defaults, or leave it out"
        case "literal_error" | "enum" if isinstance(problem.get("input"), bool):
            return f"{problem['msg']}; quote the word: YAML takes it for true or false"
        case "union_tag_not_found":
            return f"{context['discriminator']} is missing: it says what this is"
        case "union_tag_invalid":
            key, value, known = (
                context[each] for each in ("discriminator", "tag", "expected_tags")
            )
            return f"there is no {key} {value!r}; use one of {known}"
    return problem["msg"].removeprefix("Value error, ")


def _short(text: str) -> str:
    """A key or a value may be as long as the file."""
    return text if len(text) <= LONGEST_MISTAKE else f"{text[:LONGEST_MISTAKE]}…"


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


def _find(root: yaml.Node, location: tuple[int | str, ...], index: Index) -> tuple[int, str]:
    """Line and dotted path of the deepest part of ``location`` that the file has.

    Skips parts that are not keys of the file: pydantic also names the members of unions.
    """
    node, line, path = root, root.start_mark.line + 1, ""
    for position, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            if str(part) in (keys := _keys(node, index)):
                line, node = keys[str(part)]
                path = f"{path}.{part}" if path else str(part)
            elif position == len(location) - 1:
                path = f"{path}.{part}" if path else str(part)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line, path = node.start_mark.line + 1, f"{path}[{part}]"
    return line, path


def dump(settings: Settings) -> str:
    """The effective settings, defaults included, as YAML in ASCII that reads back to the same."""
    plain: dict[str, Any] = settings.model_dump(mode="json", exclude_none=True)
    return str(yaml.safe_dump(plain, sort_keys=False))
