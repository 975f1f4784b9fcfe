"""The tutorial, as a newcomer walks it: each block of docs/tutorial.md in real shells."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testbed import docpages, leftovers, ports, pulling, registry
from volumes.guard import kernel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = docpages.blocks(PAGE)
STOP = "Ctrl-C in the first shell."
GOES_ON = ("make run", "nodeagent.yaml run")
HOST = "registry.example"  # of the image that the page has where nothing is set
STEP_SECONDS = 60.0  # for waiting.limit

pytestmark = pytest.mark.real


def clone(folder: Path) -> Path:
    """What ``git clone`` makes, with uncommitted changes and without another ``.venv``."""
    folder.mkdir()
    for each in ROOT.iterdir():
        if each.name not in ("build", ".git"):
            (folder / each.name).symlink_to(each)
    return folder


@pytest.fixture
def environment(area: Path) -> Iterator[dict[str, str]]:
    """What differs on this machine, by the variables that the page explains, and a registry."""
    with pulling.pulling(area / "images", "bookworm", HOST) as runtime:
        runtime.images.push("library/busybox", "stable", [registry.layer("busybox", 4_000_000, 7)])
        programs = runtime.daemon.binary.parent  # ctr
        yield {
            **os.environ,
            leftovers.MARK: str(area),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "NODEAGENT_PORT": str(ports.free(1)[0]),
            "CONTAINERD": str(runtime.daemon.socket),
            "HOSTS": str(runtime.daemon.certs),
        }


@pytest.fixture
def shells(area: Path, environment: dict[str, str]) -> Iterator[dict[str, docpages.Shell]]:
    folder = clone(area / "clone")
    names = {block.title for block in BLOCKS if block.is_shell}
    made = {name: docpages.Shell(folder, environment) for name in sorted(names)}
    try:
        yield made
    finally:
        for each in made.values():
            each.end()
        leftovers.clear(folder, keep=True)  # before the containerd goes
        for cgroup in kernel.find_cgroup().glob("nodeagent-tutorial-*"):
            if cgroup.name.endswith(tuple(f"-{each.pid}" for each in made.values())):
                cgroup.rmdir()


@pytest.mark.timeout(240)
def test_each_block_of_the_tutorial_does_what_the_page_says(
    area: Path, shells: dict[str, docpages.Shell], record_property: Callable[[str, object], None]
) -> None:
    """How long the steps took is printed and goes into build/tests.xml."""
    begun = time.monotonic()
    ended: dict[str, float] = {}
    wrong: list[str] = []  # all of it, so that one run tells what to change on the page
    busy: docpages.Shell | None = None  # with a command that goes on until Ctrl-C
    for block, after in itertools.zip_longest(BLOCKS, BLOCKS[1:]):
        if not block.is_shell:
            continue
        shell = shells[block.title]
        if STOP in block.before:
            assert busy is not None, f"line {block.line}: nothing runs that Ctrl-C could end"
            busy.interrupt(STEP_SECONDS)
            busy = None
        expected = after.text if after is not None and after.language == "text" else ""
        shell.begin(block.text)
        if any(command in block.text for command in GOES_ON):
            if expected:
                docpages.wait_begins(shell, expected, STEP_SECONDS)
            busy = shell
        else:
            output = shell.finish(STEP_SECONDS)
            print(f"--- line {block.line}\n{output}")
            if expected and not docpages.as_on_page(output, expected):
                wrong.append(f"line {block.line}: the page has\n{expected}\nbut it is\n{output}")
        ended[block.step] = time.monotonic() - begun
    assert not wrong, "\n".join(wrong)
    for step, seconds in ended.items():
        print(f"{seconds:6.1f} s  {step}")
        record_property(step, round(seconds, 1))
    assert list((area / "clone" / "build").iterdir()) == []
