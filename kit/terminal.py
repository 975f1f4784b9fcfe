"""How commands ask the agent and print its answer: JSON on request, plain columns for people."""

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import kit.room

Lines = Callable[[Any], Iterable[str]]
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
    """The agent's decoded answer to one request."""
    return asyncio.run(ctx.client().call(method, path, body, **query))


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_line(value: Any) -> None:
    """One line of JSON, for a stream that others read."""
    click.echo(json.dumps(value))


def show(shown: Shown, *, as_json: bool = False, output: str | None = None) -> None:
    value, lines = shown[0], shown[-1] if output == "wide" else shown[1]
    if as_json or output == "json":
        print_json(value)
        return
    if output == "yaml":
        import yaml  # only where it is asked for

        click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)
        return
    for line in lines(value):
        click.echo(line)


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their content; plain text, so that it can be cut and grepped."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def on_terminal() -> bool:
    """Whether somebody watches: progress may then be drawn."""
    return sys.stderr.isatty()


def plain(text: str) -> str:
    """``text`` on one line, control characters escaped: a file name may hold any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
