"""That a room registers once, and that nobody pays for what it brings without using it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kit.room
import nodeagent
from nodeagent import app, groups, rooms
from nodeagent.settings import GONE
from nodeagent.shown import overview, page

PROCESS = Path(nodeagent.__file__).parent
NAMES = {room.name for room in rooms.ROOMS}


def named(tree: ast.AST) -> Iterator[str]:
    """Rooms that code imports, or names in an attribute, a variable or a text of its own."""
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Import):
            words = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            words = [(node.module or "").partition(".")[0], *(a.name for a in node.names)]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [node.value.partition(":")[0].partition(".")[0]]
        yield from NAMES.intersection(words)


def test_only_the_registry_names_a_room() -> None:
    found = {
        str(file.relative_to(PROCESS)): sorted(set(named(ast.parse(file.read_text()))))
        for file in PROCESS.rglob("*.py")
    }
    for registry in ("rooms.py", "groups.py"):
        assert found.pop(registry) == sorted(NAMES)
    # The table of settings that went has their paths.
    assert set(found.pop("settings.py")) <= {path.partition(".")[0] for path in GONE}
    assert len(found) > 10
    assert {file: rooms for file, rooms in found.items() if rooms} == {}


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_agent_imports_no_commands() -> None:
    modules = imported_by(
        "import nodeagent.app; from nodeagent import rooms\nfor r in rooms.ROOMS: r.routes()"
    )
    assert {f"{name}.api" for name in NAMES} <= modules
    assert not {"click", "kit.terminal"} & modules
    assert not {f"{name}.commands" for name in NAMES} & modules


def test_help_imports_no_room() -> None:
    modules = imported_by("from nodeagent import main; main.cli(['--help'], standalone_mode=False)")
    assert not NAMES & modules
    assert not {"aiohttp", "grpc", "structlog", "prometheus_client", "pydantic", "rich"} & modules


@pytest.mark.parametrize(
    "words", ["status", "dataset list", "image list", "volume list", "volume findings"]
)
@pytest.mark.parametrize("text", ["admin: {socket: /none}\n", "cahce: {}\n"])
def test_client_loads_neither_settings_nor_an_http_library(
    words: str, text: str, tmp_path: Path
) -> None:
    """It runs in loops of scripts, beside jobs."""
    (tmp_path / "a.yaml").write_text(text)
    modules = imported_by(
        "import contextlib, kit.errors; from nodeagent import main\n"
        "with contextlib.suppress(kit.errors.UnreachableError):\n"
        f"    main.cli({['--config', f'{tmp_path}/a.yaml', *words.split()]}, standalone_mode=False)"
    )
    assert "nodeagent.commands.client" in modules
    assert not {f"{name}.settings" for name in NAMES} & modules
    assert not {"aiohttp", "pydantic", "rich"} & modules


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_routes_that_change_need_a_role(room: kit.room.Room) -> None:
    for route in room.routes():
        reads = route.method == "GET"
        assert (route.role is kit.room.Role.READ) is reads, route


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_room_is_complete(room: kit.room.Room) -> None:
    assert room.summary
    assert room.routes()
    for command in groups.of(room.name):
        group = command.load()
        assert group.name == command.name
        assert group.commands
        assert all(each.get_short_help_str() for each in group.commands.values())


def test_components_have_the_whole_protocol(whole: app.Agent) -> None:
    needed = [name for name in vars(kit.room.Component) if not name.startswith("_")]
    assert [each.room.name for each in whole.state.running] == [room.name for room in rooms.ROOMS]
    for each in whole.state.running:
        assert each.component.name == each.room.name
        for name in needed:
            assert hasattr(each.component, name)


def test_page_has_each_rooms_sections(whole: app.Agent) -> None:
    html = page.render(overview.of(whole.state, 0.0))
    for each in whole.state.running:
        assert f">{each.room.name} " in html
        assert each.room.page is not None
        for section in each.room.page(each.component):
            assert f"-title>{section.title}</h2>" in html
