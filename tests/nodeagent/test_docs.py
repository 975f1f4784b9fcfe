"""That docs/cli.md names every command, option and exit code."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

import kit.errors
from nodeagent import main

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


def test_page_has_every_command_with_its_options() -> None:
    rows = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
    found = dict(commands(main.cli))
    for name, command in found.items():
        (row,) = [row for row in rows if re.match(rf"{name}( |$)", row)]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name != "as_json":
                assert parameter.opts[0] in row, name
            elif isinstance(parameter, click.Argument) and not isinstance(
                parameter.type, click.Choice
            ):
                assert parameter.make_metavar(click.Context(command)) in row, name
    commands_on_the_page = [row for row in rows if row.partition(" ")[0].isalpha()]
    assert len(commands_on_the_page) == len(found)


def test_page_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+)\b", PAGE, re.MULTILINE)
    codes = {kind.exit_code for kind in kit.errors.AgentError.__subclasses__()}
    assert {str(code) for code in codes} <= set(rows)
