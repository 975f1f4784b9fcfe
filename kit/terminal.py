"""How commands ask the agent and print its answer: JSON on request, plain columns for people.

``say`` is the only way to a terminal (ruff refuses click.echo elsewhere). What is said holds text
of others: names of files, of processes, messages of clusters. A job that names its process with
control characters must not move the operator's cursor, so ``say`` escapes them.
"""

import asyncio
import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import kit.errors
import kit.redact
import kit.room


@dataclass(frozen=True)
class Coloured:
    """A part of a line; without a colour it is as the rest."""

    text: str
    colour: str | None


COMPLETION_SECONDS = 1.0
REASON_SECONDS = 60.0
LEAST_LAST = 24  # characters of a last column: a sentence is hard to read in fewer
LEAST_BROKEN = 12  # of a column whose words have to be broken
_TIE = "\xa0"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|[mun]?s|min|h|d|pods?)\b|%)|(?<=B) (?=of \d)")
_FIGURE = re.compile(rf"[\d.,%<>/():-]*(?:{_TIE}[\w%/]+)*|of|to")
Line = str | tuple[str | Coloured, ...]
Lines = Callable[[Any], Iterable[Line]]
# What a command shows: a value, a function that puts it in lines of text, and one for wide lines.
Shown = tuple[Any, Lines] | tuple[Any, Lines, Lines]

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml"]),
    help="Print a table (the default), more columns where there are more, JSON or YAML.",
)
# An option that names a file; it is a Path.
file_option = functools.partial(click.option, type=click.Path(path_type=Path), metavar="FILE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def call(
    ctx: kit.room.CommandContext, method: str, path: str, body: Any = None, **query: Any
) -> Any:
    return asyncio.run(ctx.client().call(method, path, body, **query))


def say(line: Line = "", *, error: bool = False) -> None:
    """Print one line, each control character of it escaped. ``error``: to standard error."""
    parts = (line,) if isinstance(line, str) else line
    # click takes the colours out again where nobody watches.
    try:
        click.echo("".join(map(_part, parts)), err=error)
    except BrokenPipeError:  # click would end with 1
        raise _ReaderGoneError from None


class _ReaderGoneError(Exception):
    """Nobody reads what is said any more."""


def _part(part: str | Coloured) -> str:
    if isinstance(part, str):
        return plain(part)
    if part.colour is None or os.environ.get("NO_COLOR"):
        return plain(part.text)
    return click.style(plain(part.text), part.colour)


def width(line: Line) -> int:
    """How many characters ``say`` prints of the line."""
    parts = (line,) if isinstance(line, str) else line
    return sum(len(plain(part if isinstance(part, str) else part.text)) for part in parts)


def print_json(value: Any) -> None:
    for line in json.dumps(value, indent=2).split("\n"):
        say(_ascii(line))


def print_line(value: Any) -> None:
    """One line of JSON, for a stream that others read."""
    say(_ascii(json.dumps(value)))


def _ascii(text: str) -> str:
    return text.replace("\x7f", "\\u007f")  # the one control character that json leaves


def print_yaml(value: Any) -> None:
    import yaml  # only where it is asked for

    for readable in (True, False):
        text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=readable)
        lines = text.removesuffix("\n").split("\n")
        if lines == [plain(line) for line in lines]:
            break  # else all that is not ASCII is escaped as YAML has it
    for line in lines:
        say(line)


def show(shown: Shown, *, as_json: bool = False, output: str | None = None) -> None:
    value, lines = shown[0], shown[-1] if output == "wide" else shown[1]
    if as_json or output == "json":
        print_json(value)
        return
    if output == "yaml":
        print_yaml(value)
        return
    say_all(lines(value))


def say_all(lines: Iterable[Line]) -> None:
    """On a terminal folded between words, so that it breaks none."""
    columns = columns_of_output()
    for line in lines:
        for each in folded(line, columns) if columns else (line,):
            say(each)


def columns_of_output() -> int | None:
    """How wide the terminal is; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(line: Line, columns: int) -> Iterator[Line]:
    """A line in parts that fit; those below are indented as the first is. What has a colour stays
    in front."""
    parts = (line,) if isinstance(line, str) else line
    *front, last = parts
    if width(line) <= columns or not isinstance(last, str):
        yield line
        return
    text = _tied(plain(last))
    indent = " " * (len(text) - len(text.lstrip())) if not front else "  "
    wrapped = textwrap.wrap(
        "x" * width(tuple(front)) + text, columns, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    wrapped = [each.replace(_TIE, " ") for each in wrapped]
    yield (*front, wrapped[0][width(tuple(front)) :]) if front else wrapped[0]
    yield from wrapped[1:]


def command(group: click.Group, name: str) -> Callable[[Callable[..., Shown]], click.Command]:
    """A command with ``--json`` and ``-o``. Its function gets the context, gives what is shown."""

    def decorate(run: Callable[..., Shown]) -> click.Command:
        def callback(
            ctx: kit.room.CommandContext, /, *, as_json: bool, output: str | None, **given: Any
        ) -> None:
            show(run(ctx, **given), as_json=as_json, output=output)

        wrapped = functools.update_wrapper(callback, run)  # its arguments and help
        return group.command(name)(output_option(json_option(click.pass_obj(wrapped))))

    return decorate


def run(program: click.Command, name: str) -> None:
    """The entry point of a program. Errors of ours end with one line and the exit code of their
    class; ``name`` stands before them."""
    try:
        program(prog_name=name, standalone_mode=False)
    except kit.errors.AgentError as error:
        for line in error.lines or (str(error),):
            say(f"{name}: {line}", error=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        for line in shown.getvalue().splitlines():  # they repeat the words that were given
            say(line.replace("\t", "  "), error=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say(f"{name}: interrupted", error=True)
        sys.exit(130)
    except _ReaderGoneError:
        # Python's own flush at the end must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception:  # Python would print text of others as it is
        for line in kit.redact.text(traceback.format_exc()).splitlines():
            say(line, error=True)
        sys.exit(1)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None = None
) -> Iterator[str]:
    """Columns as wide as their content; plain text, so that it can be cut and grepped. On a
    terminal (``columns``: its width) a column without content is left out, and columns become
    narrower, so that their cells take more lines."""
    columns = columns or columns_of_output()
    shown = [[_tied(plain(cell)) for cell in row] for row in (head, *rows)]
    if columns and rows:
        full = [i for i in range(len(head)) if any(row[i] for row in shown[1:])]
        shown = [[row[i] for i in full] for row in shown]
    widths = _widths(shown, columns)
    for row in shown:
        yield from _lines_of_row(row, widths)
        for cell in row[len(widths) :]:
            if cell not in ("", "-"):
                yield f"    {cell}".replace(_TIE, " ")


def _widths(rows: Sequence[Sequence[str]], columns: int | None) -> list[int]:
    """How wide each column is; what has no room beside the others stands below its row: the last
    one before a word is broken, more where even broken words do not fit."""
    cells = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in cells]
    if columns is None or not widths:
        return widths
    least = [max(len(w) for cell in column for w in cell.split(" ")) for column in cells]
    # Enough for all but the head, which may fold.
    bodies = [max(map(len, (*head.split(" "), *column))) for head, *column in cells]
    texts = [i for i, (_, *body) in enumerate(cells) if not all(map(_has_figures_alone, body))]
    if texts[-1:] == [len(widths) - 1]:
        least[-1] = max(least[-1], min(widths[-1], LEAST_LAST))
    if sum(least) + 2 * len(least) - 2 > columns:
        widths = widths[: max(1, len(widths) - 1)]
    broken = [min(each, LEAST_BROKEN) if i in texts else each for i, each in enumerate(least)]
    while len(widths) > 1 and sum(broken[: len(widths)]) + 2 * len(widths) - 2 > columns:
        widths.pop()
    room, every = columns - 2 * len(widths) + 2, range(len(widths))
    texts = [i for i in texts if i in every]
    # The longest words are broken first.
    steps = [(least, texts), (bodies, every), (least, every)]
    for narrow in (LEAST_LAST, LEAST_BROKEN):
        steps += [([narrow] * len(least), [i]) for i in sorted(texts, key=lambda i: -least[i])]
    for narrowest, among in steps:
        while sum(widths) > room and (can := [i for i in among if widths[i] > narrowest[i]]):
            widths[max(can, key=lambda i: widths[i])] -= 1
    return widths


def _has_figures_alone(cell: str) -> bool:
    return all(map(_FIGURE.fullmatch, cell.split(" ")))


def _lines_of_row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
        for cell, width in zip(row, widths, strict=False)
    ]
    for line in itertools.zip_longest(*cells, fillvalue=""):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        yield "  ".join(padded).rstrip().replace(_TIE, " ")


def _tied(text: str) -> str:
    """``text`` (plain, so that it has no tie) with its units tied to their numbers: a tie is no
    place to fold at."""
    return _UNIT.sub(_TIE, text)


class Reasons:
    """Says what a command waits for: when that changes, once in ``REASON_SECONDS`` at most."""

    def __init__(self) -> None:
        self._said, self._at = "", -math.inf

    def tell(self, why: str) -> None:
        now = time.monotonic()
        if why not in ("", self._said) and now - self._at >= REASON_SECONDS:
            self._said, self._at = why, now
            say(why, error=True)


def asks() -> bool:
    """Whether somebody is there who can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def completing(path: str, key: str, name: str) -> dict[str, Any]:
    """What an argument needs so that a shell completes it: the agent's answer at ``path`` has under
    ``key`` a list of things with a ``name``. Silent when there is no answer soon."""

    def complete(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
        async def ask() -> Any:
            async with asyncio.timeout(COMPLETION_SECONDS):
                return await ctx.find_root().obj.client().call("GET", path)

        try:
            with contextlib.redirect_stderr(io.StringIO()):
                found = asyncio.run(ask())[key]
            return [str(each[name]) for each in found if str(each[name]).startswith(begun)]
        except Exception:  # a line in the middle of what somebody types helps nobody
            return []

    return {"shell_complete": complete}


def on_terminal() -> bool:
    """Whether somebody watches: progress may then be drawn."""
    return sys.stderr.isatty()


def plain(text: str) -> str:
    """``text`` on one line, control characters escaped: a file name may hold any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
