"""Who may enter a view: owner, group and mode of its parent, whatever the umask is. What it shows:
the directory that was looked at, whatever its name leads to a moment later."""

import asyncio
import contextlib
import ctypes
import os
import random
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kit.errors
from cache.dataset.dataset import Dataset
from cache.settings import CacheSettings, DatasetSettings, DirSource
from cache.sources import roots
from cache.views import view
from linux import mountinfo, syscalls
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
    assert view.allow(shown, 0, 0, None, source) == str(passable / "closed")
    assert bits(passable / "views/a")[2] == 0o700
    assert view.allow(shown, 0, 0, "0755", source) == ""  # the operator's word counts
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


# --- what a path leads to


def exchange(one: Path, other: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE: each name is there at any moment."""
    here, swap = -100, 2
    names = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    syscalls.checked(syscalls.libc.renameat2(here, names[0], here, names[1], swap), "renameat2")


class Share:
    """A directory in which others write, with a link to a dataset and another one."""

    def __init__(self, area: Path) -> None:
        self.named, self.other = area / "share/coco", area / "share/other"
        for name in ("share", "good", "state"):
            (area / name).mkdir()
        (area / "good/image.jpg").write_text("x")
        (area / "state/id_rsa").write_text("a key")
        self.named.symlink_to(area / "good")
        self.other.symlink_to(area / "state")
        source = DirSource(kind="dir", path=self.named)
        settings = DatasetSettings(name="coco", freshness="frozen", source=source)
        cache = CacheSettings(store=area / "store", views=area / "views")
        self.dataset = Dataset(settings, cache, area / "state", lambda: None)

    def swap(self) -> None:
        exchange(self.named, self.other)

    async def publish(self) -> None:
        await self.dataset.reach()
        await self.dataset.publish(view.Stage.SOURCE)

    @contextlib.contextmanager
    def swapped_all_the_time(self) -> Iterator[None]:
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(random.uniform(0.0, 0.03)):
                self.swap()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def test_view_does_not_show_what_took_the_place_of_its_source(area: Path) -> None:
    share = Share(area)

    async def publish() -> None:
        await share.dataset.reach()
        share.swap()
        await share.dataset.publish(view.Stage.SOURCE)

    with pytest.raises(OSError, match="not the one that was reached"):
        asyncio.run(publish())
    assert mountinfo.top(share.dataset.view) is None
    share.swap()
    asyncio.run(share.publish())
    assert os.listdir(share.dataset.view) == ["image.jpg"]


def test_view_shows_no_closed_directory_while_names_are_swapped(area: Path) -> None:
    share = Share(area)
    shown, until = 0, time.monotonic() + 60

    async def rounds() -> None:
        nonlocal shown
        for _ in range(200):
            with contextlib.suppress(OSError, kit.errors.SourceError):
                await share.publish()
                assert os.listdir(share.dataset.view) == ["image.jpg"]
                shown += 1
                await asyncio.to_thread(view.take_off, share.dataset.view)
            if shown >= 20 or time.monotonic() > until:
                break

    with share.swapped_all_the_time():
        asyncio.run(rounds())
    assert shown, "nothing was ever shown"


def test_view_is_closed_before_it_shows_what_is_below_a_closed_directory(passable: Path) -> None:
    share = Share(passable)
    (passable / "views/coco").mkdir(parents=True, mode=0o755)
    (passable / "closed").mkdir()
    (passable / "good").rename(passable / "closed/good")
    share.named.unlink()
    share.named.symlink_to(passable / "closed/good")
    (passable / "closed").chmod(0o700)
    asyncio.run(share.publish())
    assert bits(passable / "views/coco")[2] == 0o700


@pytest.mark.parametrize(
    ("target", "whose"),
    [
        ("/root", "root's"),
        ("/boot", "the host's"),
        ("/var/lib/etcd", "the cluster's"),
        ("/home", "its users'"),
        ("", "is a symbolic link"),
    ],
)
def test_no_link_that_an_object_names_is_followed(area: Path, target: str, whose: str) -> None:
    (area / "data/below").mkdir(parents=True)
    link = area / "link"
    link.symlink_to(target or area / "data")
    for path in (link, link / "below"):
        with pytest.raises(kit.errors.SourceError, match="is a symbolic link"):
            roots.look_in_place(str(path), str(area / "state"), True)
    assert roots.look_in_place(str(area / "data"), str(area / "state"), True)["stamp"]
    if target and os.path.isdir(target) and target != "/home":
        with pytest.raises(kit.errors.SourceError, match=whose):
            roots.look_in_place(str(link), str(area / "state"))
