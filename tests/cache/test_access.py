"""Who may enter a view: owner, group and mode of its parent, whatever the umask is."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from cache import view
from tests.testbed import trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def reads(path: Path, user: int) -> bool:
    command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "cat", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=waiting.limit(30))
    return done.returncode == 0


@pytest.fixture
def passable(area: Path) -> Path:
    """The area, below directories that everybody may pass."""
    closed = [str(p) for p in (area, *area.parents) if not p.stat().st_mode & stat.S_IXOTH]
    assert closed == [], "put the clone where other users may pass"
    return area


def bits(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_umask_has_no_say(passable: Path, mask: int) -> None:
    (passable / "source").mkdir(mode=0o755)
    before = os.umask(mask)
    try:
        view.allow(str(passable / "views/a/data"), 12, 34, None, str(passable / "source"))
    finally:
        os.umask(before)
    assert bits(passable / "views/a") == (12, 34, 0o755)
    view.allow(str(passable / "views/a/data"), 0, 5, "0750", str(passable / "source"))
    assert bits(passable / "views/a") == (0, 5, 0o750)
    assert view.is_allowed(str(passable / "views/a/data"), 0, 5, "0750", "")
    assert not view.is_allowed(str(passable / "views/a/data"), 0, 5, None, "")
    assert not view.is_allowed(str(passable / "views/b/data"), 0, 5, "0750", "")


def test_tree_below_a_closed_directory_stays_closed(passable: Path) -> None:
    (passable / "closed" / "source").mkdir(parents=True, mode=0o755)
    (passable / "closed").chmod(0o700)
    source, shown = str(passable / "closed" / "source"), str(passable / "views/a/data")
    view.allow(shown, 0, 0, None, source)
    assert bits(passable / "views/a")[2] == 0o700
    view.allow(shown, 0, 0, "0755", source)  # the operator's word counts
    assert bits(passable / "views/a")[2] == 0o755


def test_view_is_as_open_as_its_settings_say(passable: Path, node: Agent) -> None:
    closed = passable / "closed"
    trees.plain(closed / "source", 20)
    (closed / "source").chmod(0o755)
    closed.chmod(0o700)
    node.add_dir("a", closed / "source")
    trees.plain(passable / "open", 20)
    node.add_dir("b", passable / "open")
    before = os.umask(0o077)
    try:
        node.start()
    finally:
        os.umask(before)
    for name in ("a", "b"):
        node.wait_state(name, "complete")
    files = {name: next(node.view(name).rglob("f*")) for name in ("a", "b")}
    node.folder.chmod(0o755)
    assert not reads(files["a"], 4711)
    assert reads(files["b"], 4711)
    node.cache["datasets"][0]["access"] = {"group": 4711, "mode": "0750"}
    node.write()
    node.wait_for(lambda: bits(node.views / "a") == (0, 4711, 0o750), 30, "the new mode")
    assert reads(files["a"], 4711)
    assert not reads(files["a"], 4712)
