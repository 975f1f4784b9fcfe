"""Log sources that cannot be read, and what is read after they can: real files, a real journald."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.findings import Severity
from tests.testbed.waiting import until_async as until
from tests.volumes.audit import journald
from tests.volumes.audit.flood import following, sources
from tests.volumes.audit.stage import Stage, settings, watching
from tests.volumes.audit.test_logs import _children, append, images, line
from tests.volumes.audit.world import judge, only, scene
from volumes.audit.logs import follower as client
from volumes.audit.logs import sources as follow
from volumes.audit.logs.matcher import Hit
from volumes.audit.rules import agent

pytestmark = pytest.mark.real


class Heard:
    """What a follower tells, in its own process."""

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

    def follower(self, pattern: Path) -> follow.Files:
        return follow.Files(str(pattern), self.feed, self.lose, self.states.append)


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(work.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_after_an_error_files_are_read_on_from_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, path, gone = Heard(), tmp_path / "1.log", tmp_path / "2.log"
    path.write_bytes(b"old\n")
    gone.write_bytes(b"old\n")
    follower = heard.follower(tmp_path / "*.log")
    real = os.pread

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async with running(follower) as task:
        await until(lambda: heard.states == [""] * len(heard.states) != [])
        append(path, "one\nbeg")
        await until(lambda: heard.lines == [b"one"])
        monkeypatch.setattr(os, "pread", broken)
        append(path, "un\n")
        with pytest.raises(OSError, match="Input/output"):
            await task
        monkeypatch.setattr(os, "pread", real)
    append(path, "between\n")
    append(tmp_path / "3.log", "new\n")
    gone.unlink()
    async with running(follower):
        await until(lambda: sorted(heard.lines) == [b"begun", b"between", b"new", b"one"])
    assert heard.lost == 1  # of the file that went meanwhile nobody knows


async def test_a_missing_directory_or_file_is_said_and_taken_back(tmp_path: Path) -> None:
    later = tmp_path / "logs"
    for pattern, why in (
        (later / "*.log", f"{later} does not exist"),
        (later / "*" / "*.log", f"{later} does not exist"),
        (later / "x.log", f"{later / 'x.log'} does not exist"),
    ):
        heard = Heard()
        async with running(heard.follower(pattern)):
            await until(lambda heard=heard, why=why: heard.states[-1:] == [why])  # type: ignore[misc]
    heard = Heard()
    async with running(heard.follower(later / "*.log")):
        await until(lambda: bool(heard.states))
        later.mkdir()
        await until(lambda: heard.states[-1] == "")  # files of a pattern may come, that is fine
        (later / "dangling.log").symlink_to(tmp_path / "not-mounted")
        await until(lambda: "dangling.log: No such file" in heard.states[-1])
        (later / "fine.log").touch()
        await until(lambda: heard.states[-1] == "")


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[journald.Journald]:
    with journald.running(tmp_path) as running:
        yield running


async def test_another_machines_journal_is_read_and_a_unit_without_lines_is_said(
    journals: journald.Journald,
) -> None:
    """As in a container, whose machine id is not the host's."""
    told: list[Hit] = []
    units = [{"name": "kubelet", "unit": journald.UNIT}, {"name": "k3s", "unit": "nosuch.service"}]
    configuration = sources(Path("/x"), sources=units)
    async with following(configuration, told, journals=("/x", journals.directory)) as follower:
        await until(lambda: "no line of nosuch.service" in follower.states().get("k3s", ""))
        journals.write(line(1))
        await until(lambda: images(told) == ["rbd/csi-vol-1"])
        assert list(follower.states()) == ["k3s"]


async def test_a_journal_is_read_on_after_journalctl_ended_and_the_trouble_is_taken_back(
    journals: journald.Journald,
) -> None:
    heard = Heard()
    unit = follow.Unit(journald.UNIT, heard.feed, heard.states.append, (journals.directory,))
    async with running(unit) as task:
        journalctl = await _following_process()
        journals.write("one")
        await until(lambda: heard.lines == [b"one"])
        os.kill(journalctl, signal.SIGKILL)
        await task
        assert heard.states[-1] == f"journalctl for {journald.UNIT} ended with -9"
    await asyncio.sleep(follow.OVERLAP_SECONDS + 0.5)
    journals.write("between")
    async with running(unit):
        # A line may come twice (OVERLAP_SECONDS), none may be missing.
        await until(lambda: list(dict.fromkeys(heard.lines)) == [b"one", b"between"])
        assert heard.states[-1] == ""
        journals.write("two")
        await until(lambda: heard.lines[-1] == b"two" and heard.lines.count(b"between") == 1)


async def _following_process() -> int:
    await until(lambda: _children("--follow"))
    (pid,) = _children("--follow")
    return pid


async def test_without_any_journal_that_is_said(tmp_path: Path) -> None:
    heard = Heard()
    await follow.Unit("x.service", heard.feed, heard.states.append, (str(tmp_path),)).run()
    assert heard.states == [f"no journal in {tmp_path}: mount the host's there"]


async def test_what_a_replaced_child_may_have_missed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESTART_SECONDS", 0.5)
    (tmp_path / "x.log").touch()
    both = [
        {"name": "kubelet", "files": str(tmp_path / "x.log")},
        {"name": "away", "files": str(tmp_path / "none" / "*.log")},
    ]
    async with following(sources(tmp_path, sources=both), []) as follower:
        await until(lambda: "away" in follower.states())
        (child,) = _children("volumes.audit.logs.sources")
        os.kill(child, signal.SIGKILL)
        states: list[dict[str, str]] = []

        def replaced() -> bool:
            states.append(follower.states())
            return follower.restarts > 0 and "kubelet" in follower._now

        await until(replaced)
        lost = {name: counts.lost for name, counts in follower.counters().items()}
        assert lost == {"kubelet": 1, "away": 0}  # what was not followed has lost nothing
        assert all("away" in state for state in states)  # it does not flap meanwhile


async def test_an_unread_log_is_a_finding_and_clears(stage: Stage) -> None:
    path = stage.folder / "logs" / "*.log"
    logs = {"kernel": False, "sources": [{"name": "ceph-csi", "files": str(path)}]}
    patient = settings(stage, logs=logs, rules={"unread-log": {"patience": "0s"}})
    async with watching(stage, patient) as watch:
        found = await watch.finding("", "unread-log")
        assert found["subject"] == "ceph-csi"
        assert f"{path.parent} does not exist" in found["message"]
        path.parent.mkdir()
        await watch.until(lambda: not watch.found("", "unread-log"), "cleared")


def test_a_built_in_source_that_is_not_there_is_an_info_one_that_was_set_a_warning() -> None:
    unread = {"kubelet": "/var/log/journal has no line of kubelet.service"}
    assert judge(agent.unread_log, scene()).troubles == ()
    assert only(agent.unread_log, scene(unread_logs=unread)).severity is Severity.INFO
    chosen = {"logs": {"sources": [{"name": "kubelet", "unit": "kubelet.service"}]}}
    at = scene(unread_logs=unread, settings=chosen)
    assert only(agent.unread_log, at).severity is Severity.WARNING
    kernel = scene(unread_logs={"kernel": "/dev/kmsg: Operation not permitted"})
    assert only(agent.unread_log, kernel).severity is Severity.WARNING
