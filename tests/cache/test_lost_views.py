"""Views that others unmount or mount over, and what jobs find after a reboot."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cache.csi import node as csi_node
from cache.csi import records
from cache.dataset import due
from cache.dataset.view_watch import Asked, compare, is_gone
from cache.views import view
from cache.views.view import Mounted
from linux import mountinfo, mounts
from tests.testbed import leftovers, pod, trees, waiting
from tests.testbed.agent import Agent

# --- what is said of a mount table, pure


def table(*lines: str) -> list[mountinfo.Mount]:
    """Each "id parent device target", of a root that is always there."""
    made = []
    for line in ("1 0 8:1 /", *lines):
        number, parent, device, target = line.split()
        text = f"{number} {parent} {device} / {target} rw - ext4 /dev/x rw"
        made.append(mountinfo.parse_line(text.encode()))
    return made


VIEWS, DATA, ONE = "10 1 0:9 /v", "11 10 0:40 /v/a/data", "12 10 8:1 /v/a/by-id/1"


@pytest.mark.parametrize(
    ("now", "lost", "hidden", "lost_ids"),
    [
        ((VIEWS, DATA, ONE), "", "", {}),
        # Another number, and the same there: as after a swap.
        ((VIEWS, "31 10 0:40 /v/a/data", ONE), "", "", {}),
        ((VIEWS, ONE), "unmounted", "", {}),
        ((VIEWS, DATA), "", "", {"1": "unmounted"}),
        ((VIEWS,), "unmounted", "", {"1": "unmounted"}),
        ((VIEWS, DATA, "20 11 0:50 /v/a/data", ONE), "ext4 of '/dev/x' is mounted over", "", {}),
        ((VIEWS, "20 10 0:50 /v/a/data", ONE), "ext4 of '/dev/x' is mounted over", "", {}),
        ((VIEWS, DATA, ONE, "20 12 0:50 /v/a/by-id/1"), "", "", {"1": "is mounted over"}),
        (
            (VIEWS, DATA, ONE, "20 10 0:50 /v/a"),
            "mounted over /v/a and hides it", "umount /v/a;", {"1": "mounted over /v/a"},
        ),
    ],
)  # fmt: skip
def test_what_has_become_of_mounts(
    now: Iterable[str], lost: str, hidden: str, lost_ids: dict[str, str]
) -> None:
    asked = Asked("/v/a/data", 0, True, Mounted(11, (0, 40), "/"), {"1": Mounted(12, (8, 1), "/")})
    seen = compare(asked, None, table(*now))
    assert lost in seen.lost if lost else not seen.lost
    assert seen.back is not bool(lost)
    assert hidden in str(seen.hidden) if hidden else seen.hidden is None
    assert seen.lost_ids.keys() == lost_ids.keys()
    assert all(words in seen.lost_ids[name] for name, words in lost_ids.items())


@pytest.mark.parametrize(
    ("now", "gone"),
    [
        ((VIEWS, DATA), False),
        ((VIEWS, "20 10 0:50 /v"), False),  # covered, and there
        ((DATA,), True),
        (("10 1 0:9 /v/a/data",), True),  # the next view has its id and its device number
        (("10 1 0:50 /v",), True),  # another mount in its place
    ],
)
def test_folder_of_views_is_gone_though_a_view_has_its_id(now: Iterable[str], gone: bool) -> None:
    assert is_gone("/v", Mounted(10, (0, 9), "/"), table(*now)) is gone


@pytest.mark.parametrize(
    ("more", "over"),
    [((), ""), (("20 10 0:50 /v",), "/v"), (("20 1 0:50 /",), "/"), (("20 10 0:50 /v/a",), "")],
)
def test_mount_over_the_folder_of_views_is_named(more: Iterable[str], over: str) -> None:
    hidden = view.hides_all("/v", Mounted(10, (0, 9), "/"), table(VIEWS, DATA, *more))
    assert str(hidden).endswith(f"umount {over}; the views come back by themselves") or not over
    assert (hidden is None) is (over == "")


@pytest.mark.parametrize(
    ("layout", "mounted", "wanted"),
    [
        ("direct", ["10 1 0:9 /pods/1"], True),
        ("direct", [], False),
        ("parent", ["10 1 0:9 /pods/1", "11 10 0:40 /pods/1/data"], True),
        ("parent", ["10 1 0:9 /pods/1"], False),  # it follows a view that is lost
    ],
)
def test_volume_is_mounted_where_its_pod_reads(
    layout: str, mounted: list[str], wanted: bool
) -> None:
    volume = records.DatasetVolume("id", "/pods/1", "a", layout, "")
    assert csi_node.is_mounted(volume, table(*mounted)) is wanted


def test_pauses_grow_while_a_view_is_taken_away_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    known, pauses = due.Due(), []
    for _ in range(12):
        known.lost()
        pauses.append(known.until_mount())
        assert known.mount() is (pauses[-1] == 0)
        clock[0] += known.until_mount()
        assert known.mount()
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    clock[0] += due.QUIET_SECONDS + 1
    known.lost()
    assert known.mount()


# --- real mounts


def complete(area: Path, node: Agent) -> Path:
    source = area / "source"
    trees.plain(source, 50)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    node.wait_for(lambda: ids(node), 30, "the generation by its id")
    return source


def ids(node: Agent) -> list[Path]:
    folder = node.views / "a" / "by-id"
    return [each for each in folder.iterdir() if each.is_mount()] if folder.is_dir() else []


def lost(node: Agent) -> str:
    """What the finding says."""
    rules = {each["rule"]: each["message"] for each in node.findings()}
    return str(rules.get("dataset-view-lost", ""))


def memory(target: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "theirs", target], check=True, timeout=waiting.limit(60)
    )


def unmount(target: Path) -> None:
    mounts.unmount(target)


def unmount_with_ids(target: Path) -> None:
    subprocess.run(["umount", "-R", target.parents[1]], check=True, timeout=waiting.limit(60))


def unmount_folder(target: Path) -> None:
    mounts.detach(target.parents[1])


def unmount_and_cover(target: Path) -> None:
    mounts.unmount(target)
    memory(target)


TAKEN: list[tuple[Callable[[Path], Any], str]] = [
    (unmount, "it was unmounted"),
    (mounts.detach, "it was unmounted"),
    (memory, "tmpfs of 'theirs' is mounted over it"),
    (unmount_and_cover, "tmpfs of 'theirs' is mounted over it"),
    (unmount_with_ids, "it was unmounted"),
    (unmount_folder, "with the folder of all views"),
]
NAMES = ["unmounted", "detached", "covered", "replaced", "with-ids", "with-folder"]


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("take", "what"), TAKEN, ids=NAMES)
def test_view_that_others_take_away_comes_back(
    area: Path, node: Agent, take: Callable[[Path], Any], what: str
) -> None:
    source = complete(area, node)
    take(node.view("a"))
    done = node.cli("dataset", "warm", "a", "--wait")
    assert done.returncode == 0, done.stderr
    trees.assert_equal(source, node.view("a"))
    node.wait_for(lambda: what in lost(node), 30, "the finding")
    node.wait_for(lambda: ids(node), 30, "the generation by its id")
    trees.assert_equal(source, ids(node)[0])
    assert node.get("/readyz")["ready"]
    theirs = [m for m in mountinfo.at(str(node.view("a")), mountinfo.read()) if m.fstype == "tmpfs"]
    assert len(theirs) == (what.startswith("tmpfs")), "what others mounted stays"


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("folder", ["a", "."])
def test_hidden_view_is_told_and_comes_back(area: Path, node: Agent, folder: str) -> None:
    source, over = complete(area, node), node.views / folder
    memory(over)
    node.wait_served("a", "none")
    node.wait_for(lambda: f"mounted over {over}" in str(node.get("/readyz")), 30, "the reason")
    assert node.dataset("a")["state"] != "complete"
    mounts.unmount(over)
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert len(mountinfo.at(str(node.view("a")), mountinfo.read())) == 1


@pytest.mark.real
@pytest.mark.timeout(120)
def test_who_deletes_the_views_of_a_running_node_deletes_nothing(area: Path, node: Agent) -> None:
    source = complete(area, node)
    before = sorted(source.rglob("*"))
    done = subprocess.run(
        ["rm", "-rf", node.views], capture_output=True, text=True, timeout=waiting.limit(60)
    )
    assert done.returncode != 0
    assert sorted(source.rglob("*")) == before
    trees.assert_equal(source, node.view("a"))
    trees.assert_equal(source, ids(node)[0])
    assert node.get("/readyz")["ready"]
    node.tell("a", "verify")
    node.wait_state("a", "complete")


@pytest.mark.real
@pytest.mark.timeout(120)
def test_view_of_a_source_comes_back(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 50)
    node.add_dir("a", source, warm=False)
    node.start()
    node.wait_served("a", "source")
    mounts.unmount(node.view("a"))
    node.wait_for(lambda: "it was unmounted" in lost(node), 30, "the finding")
    node.wait_served("a", "source")
    trees.assert_equal(source, node.view("a"))


@pytest.mark.real
@pytest.mark.timeout(120)
def test_after_a_reboot_no_job_finds_an_empty_dataset(area: Path, node: Agent) -> None:
    """As root, whom no mode keeps out."""
    source = complete(area, node)
    generation = ids(node)[0]
    node.kill()
    leftovers.unmount(node.folder)
    for place in (node.view("a").parent, node.view("a"), generation):
        assert not os.path.lexists(place)
    mounts.bind_shared(node.folder)  # as systemd makes the root
    with pod.pod(area / "pod", node.views) as early:  # the folder of all views is there
        with pytest.raises(subprocess.CalledProcessError):
            early.run("ls", f"{early.volume}/a/data")
        node.start()
        node.wait_state("a", "complete")
        trees.assert_equal(source, node.view("a"))
        names = early.run("ls", f"{early.volume}/a/data").split()
        assert names == sorted(os.listdir(source))


@pytest.mark.real
@pytest.mark.timeout(120)
def test_places_that_were_left_on_the_disk_go_at_the_start(area: Path, node: Agent) -> None:
    for place in ("a/data", "a/by-id/1", "gone/data"):
        (node.views / place).mkdir(parents=True)
    source = complete(area, node)
    node.kill()
    leftovers.unmount(node.folder)
    assert os.listdir(node.views) == []
    (node.views / "a/data").mkdir(parents=True)
    (node.views / "a/data/theirs").touch()
    node.start()
    node.wait_for(lambda: "somebody has put 'theirs'" in str(node.get("/readyz")), 30, "it")
    (node.views / "a/data/theirs").unlink()
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
