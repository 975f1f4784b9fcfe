"""Starts over a state directory and a store in which one file was damaged: no crash, no wrong byte,
and each damage is told once.

STARTS: how many; the suite has a few, ``make test-faults`` 200. FIRST: the case to begin with.

A file in the store is rotten, and suspect since trouble of the SSD: only what is remembered keeps
it from being served. A dataset was removed by an operator, and the settings still have it.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import kit.formats
from cache.store import soundness
from tests.testbed import damage, trees, waiting
from tests.testbed.agent import Agent

FIRST = int(os.environ.get("FIRST", "0"))
STARTS = int(os.environ.get("STARTS", "2"))
SECONDS = 8.0  # for a start and its looks
pytestmark = [pytest.mark.real, pytest.mark.timeout(120 + int(4 * SECONDS) * STARTS)]

# Of the state directory, and of the store. What only an agent with a cluster, images or a guard has
# is in tests/nodeagent/test_state_files.py.
FILES = (
    *("cache-trust.json", "store:a/generation.json", "datasets/gone.json", "datasets/a.json"),
    *("store:nodeagent.json", "cache-disk.json", "dataset-uses.json", "store:b/generation.json"),
    "store:a/index.sqlite",
)
WAYS = ("half", "empty", "zeros", "garbage", "list", "no-field", "nested", "directory", "link",
        "newer")  # fmt: skip
INDEX = "store:a/index.sqlite"  # is made again of what it describes, which the log says


def spoil(path: Path, way: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match way:
        case "directory":
            path.mkdir()
            (path / "x").touch()
        case "link":
            other = path.with_name("elsewhere")
            other.write_bytes(content)
            path.symlink_to(other)
        case "newer":
            made = json.loads(content) if content.startswith(b"{") else {}
            path.write_text(json.dumps({**made, "format": 99}))
        case _:
            made = {
                "empty": b"", "half": content[: len(content) // 2], "zeros": bytes(len(content)),
                "garbage": bytes(range(255, 0, -1)) * 9, "list": b"[7]", "no-field": b"{}",
                "nested": b"[" * 100_000,
            }[way]  # fmt: skip
            path.write_bytes(made)


class Node:
    """An agent over copies of one state directory and one store."""

    def __init__(self, area: Path, node: Agent) -> None:
        self.area, self.node = area, node
        self.truth: dict[str, dict[str, bytes]] = {}
        for name in ("a", "b", "gone"):
            source = area / name
            trees.plain(source, 24, directories=3, mean=3000)
            self.truth[name] = {
                str(path.relative_to(source)): path.read_bytes()
                for path in source.rglob("*") if path.is_file()
            }  # fmt: skip
            node.add_dir(name, source, warm=True)
        node.start()
        for name in self.truth:
            node.wait_state(name, "complete")
        node.remove("gone")
        assert node.stop() == 0
        self.rotten = next(iter(sorted(self.truth["a"])))
        right = damage.flip(node.tree("a") / self.rotten)
        assert right == self.truth["a"][self.rotten]
        path = soundness.file_of(node.state)
        kit.formats.save(str(path), {**json.loads(path.read_bytes()), "troubles": 1}, 1)
        node.end()
        for folder in (node.state, node.store):
            self._copy(folder, area / f"kept-{folder.name}")

    @staticmethod
    def _copy(old: Path, new: Path) -> None:
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["cp", "-a", str(old), str(new)], check=True, timeout=waiting.limit(60))

    def restore(self) -> None:
        self.node.end()
        self.node.log.unlink(missing_ok=True)
        for folder in (self.node.state, self.node.store):
            self._copy(self.area / f"kept-{folder.name}", folder)

    def path(self, name: str) -> Path:
        if not name.startswith("store:"):
            return self.node.state / name
        inside = name.removeprefix("store:")
        dataset, _, file = inside.rpartition("/")
        folder = self.node.generations(dataset)[0] if dataset else self.node.store
        return folder / file

    def wrong(self, names: Sequence[str]) -> list[str]:
        """Files that jobs read otherwise than they are; a view that is not there yet has none."""
        found = []
        for name in names:
            for path, content in self.truth[name].items():
                try:
                    read = (self.node.view(name) / path).read_bytes()
                except FileNotFoundError:
                    continue
                if read != content:
                    found.append(f"{name}/{path}")
        return found


def told(node: Agent) -> list[str]:
    events = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    return [
        each["subject"] for each in events
        if each.get("event") == "finding" and each.get("rule") == "state-file-damaged"
    ]  # fmt: skip


def look(machine: Node, name: str, way: str) -> None:
    """One start over it."""
    node, path, what = machine.node, machine.path(name), f"{name}, {way}"
    spoil(path, way)
    node.start()
    read = ["a", "b", "gone"]

    def shown() -> bool:
        assert machine.wrong(read) == [], what
        found = {each["name"]: each["served_by"] for each in node.get("/v1/datasets")["datasets"]}
        return "none" not in (found["a"], found["b"])

    if way == "newer":  # as before: it is left alone, and what it may speak of, too
        assert machine.wrong(read) == [], what
        assert told(node) == [] and path.exists()
    else:
        waiting.until(shown, 30, f"views ({what})", detail=lambda: node.said()[-3000:])
        if name != INDEX:
            waiting.until(lambda: told(node), 20, f"it is told ({what})")
            where = node.store if name.startswith("store:") else node.state
            (subject,) = told(node)
            assert subject.startswith(str(where)) and subject.endswith(path.name), what
        # What was suspect is verified, or filled anew, and right from the store, too.
        for complete in ("a", "b"):
            node.wait_state(complete, "complete", seconds=40)
        assert machine.wrong(read) == [], what
        gone = node.dataset("gone")
        if name == "datasets/gone.json":
            assert gone["state"] == "paused" and "not known whether it was removed" in gone["why"]
        else:
            assert gone["state"] == "removed", what
        assert "component-degraded" not in {each["rule"] for each in node.findings()}, what
    assert node.generations("gone") == [], f"what was removed comes back ({what})"
    assert node.stop() == 0, what
    assert "Traceback" not in node.said(), node.said()[-5000:]


def test_damaged_files_show_no_wrong_byte_and_are_told_once(area: Path, node: Agent) -> None:
    machine = Node(area, node)
    # The control: whoever forgets the doubt serves the rotten file.
    machine.restore()
    soundness.file_of(node.state).unlink()
    node.start()
    node.wait_state("a", "complete")
    assert machine.wrong(["a"]) == [f"a/{machine.rotten}"], "the rot is seen by nobody"
    assert node.stop() == 0
    cases = [c for c in itertools.product(WAYS, FILES) if c != ("newer", INDEX)]
    for number in range(FIRST, FIRST + STARTS):
        machine.restore()
        way, name = cases[number % len(cases)]
        look(machine, name, way)
