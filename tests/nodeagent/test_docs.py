"""The pages of the docs: complete where they list, current where they are made, links lead on."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import kit.errors
from nodeagent import main
from tests.testbed import promises, scripts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()


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
    rows = re.findall(r"^\* `(.*?)`:", PAGE, re.MULTILINE)
    found = dict(commands(main.cli))
    for name, command in found.items():
        (row,) = [row for row in rows if re.match(rf"{name}( |$)", row)]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in (
                *("as_json", "output"),  # said once for all
            ):
                assert parameter.opts[0] in row, name
            elif isinstance(parameter, click.Argument) and not isinstance(
                parameter.type, click.Choice
            ):
                assert parameter.make_metavar(click.Context(command)) in row, name
    commands_on_the_page = [row for row in rows if row.partition(" ")[0].replace("-", "").isalpha()]
    assert len(commands_on_the_page) == len(found)


def test_docs_are_short() -> None:
    """Who makes them shorter writes the new figure here."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= 27_800
    long_lines = [
        f"{page.name}:{number}"
        for page in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 160
    ]
    assert long_lines == []


def test_page_has_every_exit_code() -> None:
    rows = re.findall(r"^\* (\d+)\b", PAGE, re.MULTILINE)
    codes = {kind.exit_code for kind in kit.errors.AgentError.__subclasses__()}
    assert {str(code) for code in codes} <= set(rows)


@pytest.mark.parametrize("name", ["api", "bench", "crds"])
def test_reference_is_current(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert page == scripts.load(f"{name}_doc").document(), f"run scripts/{name}_doc.py"


def test_served_document_is_current() -> None:
    made = scripts.load("openapi")
    assert made.TARGET.read_text() == made.text(), "run scripts/openapi.py"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_beside_the_site_lead_somewhere(name: str) -> None:
    """``make docs`` checks those below docs/, anchors included."""
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (ROOT / target).exists()] == []


def test_files_and_tests_that_the_pages_name_are_there() -> None:
    named = {
        (page.name, file)
        for page in (ROOT / "docs").glob("*.md")
        for file in re.findall(r"`((?:tests|scripts|deploy|locks)/[\w./-]+\.\w+)", page.read_text())
    }
    assert len(named) > 20
    assert sorted(each for each in named if not (ROOT / each[1]).exists()) == []


def test_each_line_of_what_the_mount_can_do_names_its_test() -> None:
    told = promises.read((ROOT / "docs" / "mount.md").read_text())
    assert len(told) > 10
    wrong = [text for text in promises.complaints(told, []) if "in the other set" not in text]
    assert wrong == []
