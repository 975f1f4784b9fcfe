"""How commands ask the agent and print its answer: JSON on request, plain columns for people."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

import kit.room

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def call(
    ctx: kit.room.CommandContext, method: str, path: str, body: Any = None, **query: Any
) -> Any:
    """The agent's decoded answer to one request."""
    return asyncio.run(ctx.client().call(method, path, body, **query))


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def show(answer: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    """The answer as JSON, or its ``text`` for people."""
    if as_json:
        print_json(answer)
    else:
        click.echo(text(answer))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; plain text, so that it can be cut and grepped."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def on_terminal() -> bool:
    """Whether somebody watches: progress may then be drawn."""
    return sys.stderr.isatty()


def plain(text: str) -> str:
    """``text`` on one line, control characters escaped: a file name may hold any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
