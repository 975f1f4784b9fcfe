"""A directory under whose path something else appears while a dataset is only partly stored."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import held, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

FILES = 200
TIME = 10**18


def make(at: Path, letter: str) -> None:
    """Names, sizes and times of each source are the same; the bytes say which one it is."""
    for number in range(FILES):
        path = at / f"d{number % 4}" / f"f{number:03}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(letter.encode() * 100)
        os.utime(path, ns=(TIME, TIME))
    for path in (*at.glob("d*"), at):
        os.utime(path, ns=(TIME, TIME))


def mount(what: str, at: Path, *options: str) -> None:
    subprocess.run(["mount", *options, what, str(at)], check=True, timeout=waiting.limit(30))


def unmount(at: Path) -> None:
    subprocess.run(["umount", "-l", str(at)], check=True, timeout=waiting.limit(30))


def letters(view: Path) -> str:
    """Of all files, in the order in which they were read."""
    return "".join(path.read_bytes()[:1].decode() for path in sorted(view.rglob("f*")))


def partly(node: Agent, source: Path) -> None:
    """A dataset of which some is stored; its agent is killed in the fill."""
    node.cache["fill"] = {"workers": 1}
    fill = held.Fill(node, 60)
    node.add_dir("a", source)
    node.start()
    node.wait_served("a", "overlay")
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 50, 30, "some files")
    node.kill()
    node.wait_for(lambda: not node.passes(), 30, "the pass to end")
    fill.go_on()


@pytest.fixture
def source(area: Path) -> Iterator[Path]:
    at = area / "source"
    at.mkdir()
    yield at
    subprocess.run(["umount", "-R", "-l", str(at)], check=False, timeout=waiting.limit(30))


def test_two_file_systems_are_never_one_version(area: Path, node: Agent, source: Path) -> None:
    mount("tmpfs", source, "-t", "tmpfs")
    make(source, "A")
    partly(node, source)
    unmount(source)
    mount("tmpfs", source, "-t", "tmpfs")
    make(source, "B")
    node.start()
    seen = [letters(node.view("a"))]
    while node.dataset("a")["state"] != "complete":
        seen.append(letters(node.view("a")))
        assert "BA" not in seen[-1], "a mixture of both"
    assert "BA" not in "".join(seen)
    node.wait_state("a", "complete")
    assert letters(node.view("a")) == "B" * FILES
    (generation,) = node.generations("a")
    assert (
        "its files are other ones"
        in json.loads((generation / "generation.json").read_text())["replaced"]
    )
    trees.assert_equal(source, node.view("a"))


def test_the_same_file_system_mounted_again_costs_nothing(
    area: Path, node: Agent, source: Path
) -> None:
    image = area / "image"
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=waiting.limit(30))
    mount(str(image), source, "-o", "loop")
    make(source, "A")
    partly(node, source)
    (generation,) = node.generations("a")
    stored = {path: path.stat().st_ino for path in (generation / "tree").rglob("f*")}
    assert stored
    view = node.view("a")
    subprocess.run(["umount", str(view)], check=True, timeout=waiting.limit(30))  # as a reboot
    subprocess.run(["umount", str(source)], check=True, timeout=waiting.limit(30))
    mount(str(image), source, "-o", "loop")
    for path in source.rglob("f*"):
        path.chmod(0o640)  # all of them are touched, and their bytes are the same
    node.start()
    node.wait_state("a", "complete")
    assert letters(view) == "A" * FILES
    assert json.loads((generation / "generation.json").read_text())["replaced"] == ""
    assert {path: path.stat().st_ino for path in stored} == stored


def test_what_is_stored_waits_for_a_source_that_is_not_mounted(
    area: Path, node: Agent, source: Path
) -> None:
    (source / "put here by mistake").touch()
    mount("tmpfs", source, "-t", "tmpfs")
    make(source, "A")
    partly(node, source)
    kept = area / "kept"
    kept.mkdir()
    subprocess.run(["mount", "--move", str(source), str(kept)], check=False)
    if not os.path.ismount(kept):  # below a shared mount
        mount(str(source), kept, "--bind")
        unmount(source)
    node.start()
    node.wait_for(lambda: "is not there" in node.dataset("a")["why"], 30, "the reason")
    assert node.dataset("a")["files"]["done"] > 50
    mount(str(kept), source, "--bind")
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    assert letters(node.view("a")) == "A" * FILES
    unmount(kept)
