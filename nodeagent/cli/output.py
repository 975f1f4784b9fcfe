"""How commands print: JSON on request, tables and bars for people."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; plain text, so that it can be cut and grepped."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def on_terminal() -> bool:
    return sys.stderr.isatty()


def plain(text: str) -> str:
    """On one line and without what a terminal would act on: a name may hold any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
