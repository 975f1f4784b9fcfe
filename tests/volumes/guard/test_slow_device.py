"""A device that stalls is not missing; one that stays away is, after the second look. Real reads.

The agent is this test's own, and only findings about its one device count.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, waiting
from tests.testbed.agent import Agent
from volumes.guard import pace

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

SIZE = 320 * blockdev.MiB
HANGS = {"offset": 0, "length": SIZE, "hang": True}
FAILS = {"offset": 0, "length": SIZE, "errno": 5}
STALLS = 10
TRIES = 3 * STALLS
# A stall lasts until a probe has given up on it. 1 s in place of 3 s only makes the test shorter.
PROBE_TIMEOUT = "1s"


@pytest.fixture
def agent(where: cell.Cell, tmp_path: Path) -> Iterator[Agent]:
    with cell.agent(tmp_path / "agent", where, probe_timeout=PROBE_TIMEOUT) as made:
        yield made


@contextlib.contextmanager
def _load(device: str) -> Iterator[None]:
    """Readers past the page cache, all the time."""
    script = 'while :; do dd if="$1" of=/dev/null bs=64k iflag=direct status=none; done'
    readers = [
        subprocess.Popen(["sh", "-c", script, "sh", device], start_new_session=True)
        for _ in range(2)
    ]
    try:
        yield
    finally:
        for reader in readers:
            blockdev.run("pkill", "-KILL", "-s", str(reader.pid), check=False)
            reader.wait()


class Watch:
    """What the agent says of one device. ``seen``: rules of its critical findings, until now."""

    def __init__(self, where: cell.Cell, agent: Agent, device: str, subject: str) -> None:
        self.where, self.agent, self.device, self.subject = where, agent, device, subject
        self.seen: set[str] = set()

    def look(self) -> str:
        """The verdict after a denied write, which has the device looked at."""
        self.where.run("dd", "if=/dev/zero", f"of={self.device}", "count=1")
        self.note()
        return str((self.agent.guarded(self.device).get("verdict") or {}).get("verdict"))

    def note(self) -> int:
        """Looks in a row without an answer, read after the findings."""
        for found in self.agent.findings():
            own = self.subject in found["subject"] + str(found["evidence"])
            # That the writes of ``look`` were denied is critical, and true.
            if own and found["severity"] == "critical" and found["rule"] != "format-denied":
                self.seen.add(found["rule"])
        return int(self.agent.guarded(self.device).get("looks_without_answer", 0))

    def until(self, verdict: str) -> Any:
        return waiting.until(lambda: self.look() == verdict, 30, f"the verdict {verdict}")


class Short:
    """Whether what happened within it was over before a second look could count."""

    def __enter__(self) -> "Short":
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.enough = time.monotonic() - self._began < pace.DOUBT_SECONDS


def test_ten_stalls_are_no_loss_and_a_device_that_stays_away_is_one_after_two_looks(
    where: cell.Cell, agent: Agent, tmp_path: Path
) -> None:
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        blockdev.run("mkfs.ext4", "-q", disk.device)
        watch = Watch(where, agent, disk.device, str(tmp_path / "disk"))
        watch.until("has_fs")
        stalls = 0
        with _load(disk.device):
            for _ in range(TRIES):
                with Short() as stall:
                    disk.fault(HANGS)
                    watch.until("timeout")
                    disk.clear()
                    watch.until("has_fs")
                # What a slow machine makes longer than that counts as a loss, and rightly.
                assert watch.seen == set() or not stall.enough
                watch.seen.clear()
                stalls += stall.enough
                if stalls == STALLS:
                    break
        assert stalls == STALLS

        for _ in range(TRIES):
            with Short() as first:
                disk.fault(FAILS)
                watch.until("unreadable")
                looks = [watch.note()]
            if first.enough:
                break
            disk.clear()
            watch.until("has_fs")
            watch.seen.clear()
        assert (looks, watch.seen) == ([1], set())

        def lost() -> bool:
            looks.append(watch.note())
            return bool(watch.seen)

        waiting.until(lost, 30, "the finding about content that cannot be read")
        assert watch.seen == {"content-missing"}
        assert looks[-1] == 2, looks
        disk.clear()
        watch.until("has_fs")
