"""Each command of ours that a text names exists, with these options and arguments.

Alerts, findings, errors, the runbook, the docs and what helm prints: a person on call pastes what
stands there.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from nodeagent import main, rooms
from tests.nodeagent.test_docs_commands import commands_of_ours

ROOT = Path(__file__).parents[2]
PROGRAM = "nodeagent"
# Texts for people that are no Python.
TEXTS = (
    *sorted((ROOT / "deploy/alerts").glob("*.rules.yaml")),
    ROOT / "nodeagent/shown/runbook.yaml",
    ROOT / "deploy/chart/templates/NOTES.txt",
    ROOT / "deploy/chart/values.yaml",
    ROOT / "deploy/chart/templates/check.yaml",
    ROOT / "deploy/chart/templates/daemonset.yaml",
    ROOT / "deploy/nodeagent.service",
)
# In quotes; at the end of a line of a shell; after a word that announces a command.
_QUOTED = re.compile(rf"['`(]{PROGRAM} ((?:[a-z-]|--)[^'`\n()]*)['`)]")
_BARE = re.compile(
    rf"(?:: |-- |exec POD -- |timeout \d+ |=\S*/|lines: ){PROGRAM} ((?:[a-z]|--).*)$", re.M
)
_TEMPLATE = re.compile(r"\{\{.*?\}\}")
_STOP = re.compile(r"(?:[;,.](?:\s|$)|[>|\"<]| \(|\)).*")


@dataclass(frozen=True)
class Named:
    """``where``: the file, of Python with the line. ``words``: what follows the program's name."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {PROGRAM} {' '.join(self.words)}"


def in_text(where: str, text: str) -> Iterator[Named]:
    """Commands in one text. What a template fills in stands as one word."""
    text = _TEMPLATE.sub("X", text)
    for found in _QUOTED.findall(text):
        yield Named(where, tuple(shlex.split(found)))
    for found in _BARE.findall(_QUOTED.sub("", text)):
        yield Named(where, tuple(shlex.split(_STOP.sub("", found))))


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each text of a module; what an f-string fills in stands as one word."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in inside:
            inside |= {id(each) for each in ast.walk(node)}
            yield (
                node.lineno,
                "".join(
                    str(each.value) if isinstance(each, ast.Constant) else "X"
                    for each in node.values
                ),
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.lineno, node.value


def in_python() -> Iterator[Named]:
    for folder in ("kit", "kube", "ceph", "linux", PROGRAM, *(each.name for each in rooms.ROOMS)):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for line, text in texts_of(ast.parse(file.read_text())):
                yield from in_text(f"{file.relative_to(ROOT)}:{line}", text)


def every() -> list[Named]:
    found = [
        each for file in TEXTS for each in in_text(str(file.relative_to(ROOT)), file.read_text())
    ]
    return [*found, *in_python()]


def wrong(words: tuple[str, ...], *, whole: bool = True) -> str:
    """Why the command line does not take these words; empty when it does.

    ``whole``: arguments that the command needs must be there, too.
    """
    command: click.Command = main.cli
    rest = list(words)
    # With the program's own settings: click keeps the help option that it makes first.
    context = click.Context(command, **command.context_settings)
    while True:
        grouped = isinstance(command, click.Group)
        try:
            parser = command.make_parser(context)
            parser.allow_interspersed_args = not grouped
            given, rest, _ = parser.parse_args(rest)
        except click.UsageError as error:
            return error.format_message()
        if given.get("help") or given.get("version"):
            return ""
        if not grouped:
            break
        assert isinstance(command, click.Group)
        if not rest:
            return ""  # the group's own help
        found = command.get_command(context, rest[0])
        if found is None:
            return f"{command.name} has no command {rest[0]}"
        command, rest = found, rest[1:]
        context = click.Context(command, parent=context)
    if rest:
        return f"{command.name} takes no {' '.join(rest)}"
    return next(
        (
            why
            for each in command.params
            if (why := _of_value(each, given.get(each.name or ""), whole=whole))
        ),
        "",
    )


def _of_value(param: click.Parameter, value: object, *, whole: bool) -> str:
    missing = value is None or value == () or repr(value) == "Sentinel.UNSET"
    if missing:
        return f"{param.human_readable_name} is missing" if whole and param.required else ""
    given = value if isinstance(value, (list, tuple)) else (value,)
    if isinstance(param.type, click.Choice):
        choices = [str(each) for each in param.type.choices]
        # A word in capitals stands for one of them.
        return next(
            (
                f"{param.human_readable_name} is none of {', '.join(choices)}: {each}"
                for each in given
                if isinstance(each, str) and each not in choices and not each.isupper()
            ),
            "",
        )
    return ""


def test_commands_of_texts_exist_and_take_what_stands_there() -> None:
    found = every()
    where = {each.where.split(":")[0].split("/")[0] for each in found}
    assert {"cache", "volumes", "preheat", PROGRAM, "deploy"} <= where
    assert len(found) > 100
    assert [f"{each}: {why}" for each in found if (why := wrong(each.words))] == []


def test_commands_of_the_docs_take_what_stands_there() -> None:
    """Sentences may name a command without what it needs; what is given must fit."""
    found = list(commands_of_ours())
    bad = [
        f"{page}: {PROGRAM} {' '.join(words)}: {why}"
        for page, words in found
        if (why := wrong(_plain(words), whole=False))
    ]
    assert bad == []


def _plain(words: list[str]) -> tuple[str, ...]:
    """Without brackets of what may be left out, and without what stands for more."""
    joined = " ".join(words).replace("…", "").replace("...", "")
    return tuple(shlex.split(re.sub(r"[\[\]]", "", joined)))


BROKEN = (
    ("On the node: nodeagent findings", "no command findings"),
    ("On the node: nodeagent findings. In dry-run it was not stopped", "no command findings"),
    ("see 'nodeagent dataset show'", "NAME is missing"),
    ("'nodeagent dataset show NAME OTHER'", "takes no OTHER"),
    ("run `nodeagent dataset show NAME --failure-list`", "No such option"),
    ("'nodeagent volume guard set-mode strict'", "is none of"),
    ("'nodeagent volume allow-format DEVICE'", "is missing"),
    ("exec POD -- nodeagent datasets list", "no command datasets"),
)


@pytest.mark.parametrize(("text", "why"), BROKEN)
def test_a_broken_command_is_found(text: str, why: str) -> None:
    (found,) = in_text("x", text)
    assert why.lower() in wrong(found.words).lower()


FINE = (
    "On the node: nodeagent status",
    "'nodeagent config check' and 'nodeagent config check FILE'",
    "'nodeagent dataset show {{ $labels.dataset }} --failures'",
    "'nodeagent --config FILE run'",
    "'nodeagent volume guard set-mode MODE --reason TEXT'",
)


@pytest.mark.parametrize("text", FINE)
def test_a_right_command_passes(text: str) -> None:
    found = list(in_text("x", text))
    assert found
    assert [wrong(each.words) for each in found] == [""] * len(found)
