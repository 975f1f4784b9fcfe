"""One caller that tries again and again: told with a count, looked into at a pace, hiding nothing.

The kernel's own program counts and reports, in mode enforce and in dry-run.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, waiting
from tests.testbed.agent import Agent
from tests.volumes.guard import hammer
from volumes.guard import pace, reports
from volumes.probe.examine import Kind

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

SIZE = 320 * blockdev.MiB
FLOOD_SECONDS = int(os.environ.get("FLOOD_SECONDS", "12"))
RULES = {"enforce": "format-denied", "dry-run": "format-would-be-denied"}
OUTCOMES = {"enforce": "denied", "dry-run": "would_deny"}


class Node:
    """A cell with an agent, and a faulty disk that holds ext4."""

    def __init__(
        self, mode: str, where: cell.Cell, agent: Agent, disk: blockdev.FaultyDisk
    ) -> None:
        self.mode, self.where, self.agent, self.disk = mode, where, agent, disk

    def finding(self, subject: str) -> dict[str, Any]:
        for each in self.agent.findings():
            if each["rule"] == RULES[self.mode] and each["subject"].endswith(subject):
                return each
        return {}

    def verdict(self) -> dict[str, Any]:
        return dict(self.agent.guarded(self.disk.device).get("verdict") or {})

    def metric(self, name: str) -> int:
        found = re.search(
            rf"^nodeagent_volumes_{re.escape(name)} (\S+)$", self.agent.get("/metrics"), re.M
        )
        assert found, name
        return int(float(found[1]))

    def lines(self) -> list[dict[str, Any]]:
        """What the log says of denials of the disk."""
        said = [json.loads(line) for line in self.agent.said().splitlines() if line.startswith("{")]
        return [
            each
            for each in said
            if str(each.get("event")).startswith("write open") and each["device"] == self.disk.name
        ]


@contextlib.contextmanager
def _node(folder: Path, mode: str) -> Iterator[Node]:
    folder.mkdir()
    backing = blockdev.blank(folder / "backing", SIZE)
    blockdev.run("mkfs.ext4", "-q", str(backing))
    with (
        cell.cell(folder) as where,
        cell.agent(folder / "agent", where, mode=mode) as agent,
        blockdev.faulty_disk(folder / "disk", backing=backing) as disk,
    ):
        made = Node(mode, where, agent, disk)
        waiting.until(lambda: made.verdict().get("type") == "ext4", 20, "the first look")
        yield made


def _most_looks(seconds: float) -> int:
    """As many as the pace allows, when each ends at once and sees the same."""
    now, looks, kept = 0.0, 0, pace.Pace()
    while now < seconds:
        looks += 1
        kept = kept.after((Kind.HAS_FS, True, 0), now)
        now += kept.wait(now)
    return looks


@pytest.mark.parametrize("mode", OUTCOMES)
def test_one_caller_is_told_with_a_count_and_hides_nothing(tmp_path: Path, mode: str) -> None:
    with _node(tmp_path / "node", mode) as node:
        began = time.monotonic()
        looks = node.metric('probes_total{verdict="has_fs"}')
        with hammer.hammer(node.where, node.disk.device, "mkfs.ext4") as stop:
            waiting.until(
                lambda: any("times" in each for each in node.lines()), 30, "the end of a window"
            )
            looks = node.metric('probes_total{verdict="has_fs"}') - looks
            lines = len(node.lines())
            seconds = time.monotonic() - began  # in which all of them were
            assert 2 <= looks <= _most_looks(seconds) + 1, (looks, seconds)
            assert lines <= 2 + seconds / reports.WINDOW_SECONDS
            assert node.finding("/disk")

            # It begins to hang: looks of a moment ago say nothing about that.
            cell.answers_within(node.agent, 1.0)
            node.disk.fault({"offset": 0, "length": SIZE, "hang": True})
            waiting.until(lambda: node.verdict().get("verdict") == "timeout", 90, "the stall")
            cell.answers_within(node.agent, cell.ANSWER_SECONDS)
            node.disk.clear()
            waiting.until(lambda: node.verdict().get("type") == "ext4", 30, "its content again")

            # Another caller, another device.
            other = blockdev.blank(tmp_path / "other", SIZE)
            blockdev.run("mkfs.ext4", "-q", str(other))
            with blockdev.loop(other) as device:
                waiting.until(lambda: node.agent.guarded(device).get("verdict"), 20, "a look")
                node.where.run("tune2fs", "-L", "x", device)
                waiting.until(lambda: node.finding("/other"), 20, "the other finding")
            opened, refused = stop()
        assert max(opened, refused) > 1000 and min(opened, refused) == 0

        def counted() -> bool:
            found = [node.finding(subject)["evidence"]["times"] for subject in ("/disk", "/other")]
            kernels = node.metric(f'guard_checks_total{{outcome="{OUTCOMES[mode]}"}}')
            return sum(map(int, found)) == kernels

        waiting.until(counted, 30, "every denial to be counted", detail=node.lines)
        assert node.metric("guard_events_lost_total") == 0


def test_flood_under_changing_names_hides_no_other_device(tmp_path: Path) -> None:
    """Each attempt is another caller's, so no limit of a caller holds it."""
    with _node(tmp_path / "node", "enforce") as node, contextlib.ExitStack() as stack:
        others = []
        for number in range(3):
            image = blockdev.blank(tmp_path / f"other{number}", SIZE)
            blockdev.run("mkfs.ext4", "-q", str(image))
            others.append(stack.enter_context(blockdev.loop(image)))
        waiting.until(
            lambda: all(node.agent.guarded(device).get("verdict") for device in others), 20, "looks"
        )
        slowest = 0.0
        with (
            hammer.hammer(node.where, node.disk.device, "n*") as names,
            hammer.hammer(node.where, node.disk.device, "mkfs.ext4") as same,
        ):
            end = time.monotonic() + FLOOD_SECONDS
            attempts = 0
            while time.monotonic() < end:
                for device in others:
                    done = node.where.run("tune2fs", "-L", "x", device)
                    assert done.returncode != 0
                attempts += 1
                began = time.monotonic()
                assert node.agent.get("/healthz")["alive"]
                slowest = max(slowest, time.monotonic() - began)
                time.sleep(1)
            tried = sum(sum(stop()) for stop in (names, same))
        assert tried > 5000 * FLOOD_SECONDS

        def seen(subject: str) -> int:
            return int(node.finding(subject).get("evidence", {}).get("times", 0))

        waiting.until(
            lambda: min(seen(f"/other{number}") for number in range(3)) >= attempts,
            20, "each denial to be seen",
        )  # fmt: skip

        def told() -> list[int]:
            found = [
                int(each["evidence"]["times"])
                for each in node.agent.findings()
                if each["rule"] == "format-denied"
            ]
            return [sum(found), node.metric('guard_checks_total{outcome="denied"}')]

        waiting.until(lambda: len(set(told())) == 1, 40, "all to be told", detail=told)
        assert node.metric("guard_events_lost_total") == 0
        print(f"{tried} attempts in {FLOOD_SECONDS} s; slowest answer {slowest:.3f} s")


def test_another_medium_on_the_same_number_is_looked_at_at_once(tmp_path: Path) -> None:
    """Its DISKSEQ is new, so neither the pace nor the window of the one before counts."""
    images = [blockdev.blank(tmp_path / name, SIZE) for name in ("first", "second")]
    for image in images:
        blockdev.run("mkfs.ext4", "-q", str(image))
    with (
        cell.cell(tmp_path) as where,
        cell.agent(tmp_path / "agent", where) as agent,
        blockdev.loop(images[0]) as device,
        hammer.hammer(where, device, "mkfs.ext4") as stop,
    ):

        def seen() -> Any:
            return (agent.guarded(device).get("verdict") or {}).get("uuid")

        first = waiting.until(seen, 20, "the first content")
        blockdev.run("losetup", "-d", device)
        blockdev.run("losetup", device, str(images[1]))
        waiting.until(lambda: seen() not in (None, first), 20, "the other content")

        def told() -> bool:
            return {str(image) for image in images} <= {f["subject"] for f in agent.findings()}

        waiting.until(told, 20, "a finding about each")
        opened, refused = stop()
        assert (opened, refused > 100) == (0, True)
