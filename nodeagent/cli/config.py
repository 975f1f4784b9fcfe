"""``nodeagent config``."""

import json
from pathlib import Path

import click

from nodeagent import configfile


@click.group("config")
def group() -> None:
    """Settings file."""


@group.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(file: Path, as_json: bool) -> None:
    """Print the effective settings of FILE, or what is wrong with it and in which line."""
    settings = configfile.load(file)
    if as_json:
        click.echo(json.dumps(settings.model_dump(mode="json", exclude_none=True), indent=2))
    else:
        click.echo(configfile.dump(settings), nl=False)
