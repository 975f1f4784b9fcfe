"""Log sources in this process: real files, the kernel's log, a real journald."""

import asyncio
import contextlib
import errno
import functools
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import kmsg
from tests.testbed.waiting import until_async
from tests.volumes.audit.flood import following
from tests.volumes.audit.flood import sources as log_settings
from tests.volumes.audit.logs import journald
from tests.volumes.audit.logs.test_follower import append, images, line
from tests.volumes.audit.stage import children
from volumes.audit.logs import follower, matcher, patterns, sources

pytestmark = pytest.mark.real


class Heard:
    """What a source reports."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.states: list[str] = []
        self.lost = 0

    def feed(self, block: bytes, begun: bytes) -> bytes:
        *whole, rest = (begun + block).split(b"\n")
        self.lines += whole
        return rest

    def lose(self, count: int) -> None:
        self.lost += count

    def files(self, pattern: Path) -> sources.LogFiles:
        return sources.LogFiles(str(pattern), self.feed, self.lose, self.states.append)


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(work.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_files_continue_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, path, gone = Heard(), tmp_path / "1.log", tmp_path / "2.log"
    path.write_bytes(b"old\n")
    gone.write_bytes(b"old\n")
    files = heard.files(tmp_path / "*.log")
    real = os.pread

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async with running(files) as task:
        await until_async(lambda: heard.states == [""] * len(heard.states) != [])
        append(path, "one\nbeg")
        await until_async(lambda: heard.lines == [b"one"])
        monkeypatch.setattr(os, "pread", broken)
        append(path, "un\n")
        with pytest.raises(OSError, match="Input/output"):
            await task
        monkeypatch.setattr(os, "pread", real)
    append(path, "between\n")
    append(tmp_path / "3.log", "new\n")
    gone.unlink()
    async with running(files):
        await until_async(lambda: sorted(heard.lines) == [b"begun", b"between", b"new", b"one"])
    assert heard.lost == 1  # nobody knows what was in the file that went meanwhile


async def test_files_keep_unfinished_lines_of_different_files_apart(tmp_path: Path) -> None:
    """One source, several containers' logs: '*csi-rbdplugin*.log'."""
    one, two = tmp_path / "1.log", tmp_path / "2.log"
    one.touch()
    two.touch()
    expressions = patterns.expressions(patterns.built_in())
    matching = matcher.Matcher("x", expressions, follower.device_names(("rbd",)), 1000)
    states: list[str] = []
    files = sources.LogFiles(str(tmp_path / "*.log"), matching.feed, lambda _: None, states.append)

    async def read() -> None:
        await until_async(lambda: {f.offset for f in files.files.values()} == _sizes(one, two))

    async with running(files):
        await until_async(lambda: bool(states))
        append(one, line(1)[:-40])
        await read()
        append(two, line(2) + line(3)[:20])
        await read()
        found = list(matching.flush())
        assert images(found) == ["rbd/csi-vol-2"]
        append(one, line(1)[-40:])
        append(two, line(3)[20:])
        await read()
        found += matching.flush()
    assert images(found) == [f"rbd/csi-vol-{n}" for n in (1, 2, 3)]
    assert sorted(hit.text + "\n" for hit in found) == [line(1), line(2), line(3)]
    assert matching.counters.seen == 3


def _sizes(*paths: Path) -> set[int]:
    return {path.stat().st_size for path in paths}


async def test_files_report_what_is_missing(tmp_path: Path) -> None:
    later = tmp_path / "logs"
    for pattern, why in (
        (later / "*.log", f"{later} does not exist"),
        (later / "*" / "*.log", f"{later} does not exist"),
        (later / "x.log", f"{later / 'x.log'} does not exist"),
    ):
        heard = Heard()
        async with running(heard.files(pattern)):
            await until_async(functools.partial(_ends_with, heard.states, why))
    heard = Heard()
    async with running(heard.files(later / "*.log")):
        await until_async(lambda: bool(heard.states))
        later.mkdir()
        await until_async(lambda: heard.states[-1] == "")  # matching files may come
        (later / "dangling.log").symlink_to(tmp_path / "not-mounted")
        await until_async(lambda: "dangling.log: No such file" in heard.states[-1])
        (later / "fine.log").touch()
        await until_async(lambda: heard.states[-1] == "")


def _ends_with(states: list[str], state: str) -> bool:
    return states[-1:] == [state]


def test_kernel_records_of_processes_are_not_believed() -> None:
    believing, real = (kmsg.Kmsg(from_now=True, user=user) for user in (True, False))
    try:
        mark = uuid.uuid4().hex
        with open("/dev/kmsg", "w") as log:
            log.write(f"{mark}\n")
        assert [r for r in believing.read() if mark in r.text]
        assert not [r for r in real.read() if mark in r.text]
    finally:
        believing.close()
        real.close()


@pytest.fixture
def unlimited() -> Iterator[None]:
    """By default the kernel accepts ten lines in five seconds from a process."""
    switch = Path("/proc/sys/kernel/printk_devkmsg")
    before = switch.read_text()
    switch.write_text("on\n")
    try:
        yield
    finally:
        switch.write_text(before)


@pytest.mark.usefixtures("unlimited")
def test_overwritten_kernel_records_are_counted_exactly() -> None:
    reader = kmsg.Kmsg(from_now=True, user=True)
    try:
        mark = uuid.uuid4().hex

        def write(count: int) -> None:
            with open("/dev/kmsg", "w", buffering=1) as log:
                for number in range(count):
                    log.write(f"{mark} {number} {'x' * 800}\n")

        write(1)
        first = reader.read()
        written = 3000  # more than the buffer holds
        write(written)
        got = []
        while more := reader.read():
            got += more
        sequences = [record.sequence for record in got]
        assert reader.lost > 0
        assert sequences[-1] - first[-1].sequence == len(got) + reader.lost
    finally:
        reader.close()


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[journald.Journald]:
    with journald.running(tmp_path) as running:
        yield running


@pytest.mark.parametrize("pattern", ["", "nodeagent-t*.service"])
async def test_unit_of_another_machines_journal_is_read(
    journals: journald.Journald, pattern: str
) -> None:
    """As in a container, whose machine id is not the host's."""
    found: list[matcher.Hit] = []
    units = [
        {"name": "kubelet", "unit": pattern or journals.unit},
        {"name": "k3s", "unit": "nosuch.service"},
    ]
    settings = log_settings(Path("/x"), sources=units)
    async with following(settings, found, journals=("/x", journals.directory)) as follower:
        await until_async(lambda: "no line of nosuch.service" in follower.states().get("k3s", ""))
        journals.write(line(1))
        await until_async(lambda: images(found) == ["rbd/csi-vol-1"])
        assert list(follower.states()) == ["k3s"]


async def test_unit_continues_after_journalctl_ended(journals: journald.Journald) -> None:
    heard = Heard()
    unit = sources.JournalUnit(
        journals.unit, heard.feed, heard.states.append, (journals.directory,)
    )
    async with running(unit) as task:
        journals.write("one")
        await until_async(lambda: heard.lines == [b"one"])
        # Only now: until it runs, the child passes through programs whose arguments come and go.
        (journalctl,) = children("--follow")
        os.kill(journalctl, signal.SIGKILL)
        await task
        assert heard.states[-1] == f"journalctl for {journals.unit} ended with -9"
    journals.write("between")
    async with running(unit):
        # A line may come twice (OVERLAP_SECONDS), none may be missing.
        await until_async(lambda: list(dict.fromkeys(heard.lines)) == [b"one", b"between"])
        assert heard.states[-1] == ""
        journals.write("two")
        await until_async(lambda: heard.lines[-1] == b"two" and heard.lines.count(b"between") == 1)


async def test_unit_without_any_journal_is_reported(tmp_path: Path) -> None:
    heard = Heard()
    await sources.JournalUnit("x.service", heard.feed, heard.states.append, (str(tmp_path),)).run()
    assert heard.states == [f"no journal in {tmp_path}: mount the host's there"]
