"""Logs through the real child: files across rotation, the kernel's log, the journal, floods."""

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import kmsg
from tests.testbed.waiting import until_async as until
from tests.volumes.audit import flood
from tests.volumes.audit.flood import following, sources
from tests.volumes.audit.stage import Stage, settings, watching
from volumes.audit.logs.matcher import Hit

pytestmark = pytest.mark.real


def line(number: int) -> str:
    return f"rbd image rbd/csi-vol-{number} is still being used\n"


def images(told: list[Hit]) -> list[str]:
    return sorted(hit.groups["image"] for hit in told for _ in range(hit.count))


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


async def test_a_hundred_thousand_lines_a_second_are_all_accounted_for(tmp_path: Path) -> None:
    result = await flood.flood(tmp_path, lines=300_000)
    assert result["seen"] + result["dropped"] == result["lines"]
    assert result["dropped"] > 0  # it really was above the budget
    assert result["lost"] == 0


@pytest.mark.parametrize("how", ["rename", "copytruncate", "link"])
async def test_lines_are_followed_across_rotation(tmp_path: Path, how: str) -> None:
    """rename: kubelet. copytruncate: logrotate's other way. link: /var/log/containers."""
    real = tmp_path / "pods" / "0.log"
    real.parent.mkdir()
    real.write_text(line(0))  # before we came: not ours to tell
    path = real
    if how == "link":
        path = tmp_path / "containers" / "csi-rbdplugin-1.log"
        path.parent.mkdir()
        path.symlink_to(real)
    told: list[Hit] = []
    async with following(sources(path.parent / "*.log"), told) as follower:
        await until(lambda: "kubelet" in follower.counters())
        await asyncio.sleep(0.7)
        append(real, line(1))
        await until(lambda: len(told) == 1)
        if how == "copytruncate":
            shutil.copy(real, tmp_path / "old")
            os.truncate(real, 0)
            # Cut and written again to the same length between two looks could not be noticed.
            await until(lambda: follower.counters()["kubelet"].lost == 1)
        else:
            append(real, line(2))  # written just before the rename: must not be missed
            old = real.rename(real.with_name("0.log.1"))
            append(old, line(3))  # the writer still has the old one open
            real.touch()
        await asyncio.sleep(1.0)
        append(real, line(4))
        wanted = ["rbd/csi-vol-1", "rbd/csi-vol-4"]
        if how != "copytruncate":
            wanted = ["rbd/csi-vol-1", "rbd/csi-vol-2", "rbd/csi-vol-3", "rbd/csi-vol-4"]
        await until(lambda: images(told) == wanted)


async def test_the_unfinished_line_of_one_file_is_not_glued_to_another_ones(tmp_path: Path) -> None:
    """One source, several containers' logs: '*csi-rbdplugin*.log'."""
    one, two = tmp_path / "1.log", tmp_path / "2.log"
    one.touch()
    two.touch()
    told: list[Hit] = []
    async with following(sources(tmp_path / "*.log"), told) as follower:
        await until(lambda: "kubelet" in follower.counters())
        await asyncio.sleep(0.7)
        append(one, line(1)[:-40])
        await asyncio.sleep(1.2)  # read by now, by two looks
        append(two, line(2) + line(3)[:20])
        await until(lambda: images(told) == ["rbd/csi-vol-2"])
        append(one, line(1)[-40:])
        append(two, line(3)[20:])
        await until(lambda: images(told) == [f"rbd/csi-vol-{n}" for n in (1, 2, 3)])
        assert flood.accounted(follower) == 3
        texts = sorted(hit.text + "\n" for hit in told)
        assert texts == [line(1), line(2), line(3)]


async def test_a_log_that_comes_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    told: list[Hit] = []
    async with following(sources(tmp_path / "*" / "*.log"), told) as follower:
        await until(lambda: "kubelet" in follower.counters())
        await asyncio.sleep(0.7)
        (tmp_path / "pod").mkdir()
        append(tmp_path / "pod" / "0.log", line(1))
        await until(lambda: images(told) == ["rbd/csi-vol-1"])


async def test_the_kernel_log_is_read_and_what_processes_wrote_there_is_not_believed() -> None:
    mark = uuid.uuid4().int % 10**9
    text = f"rbd: rbd{mark}: encountered watch error: -107"
    for user, count in ((True, 1), (False, 0)):
        told: list[Hit] = []
        quiet = sources(Path("/nonexistent/x"), kernel=True, sources=[])
        async with following(quiet, told, user_records=user) as follower:
            await until(lambda follower=follower: "kernel" in follower.counters())  # type: ignore[misc]
            await asyncio.sleep(0.7)
            with open("/dev/kmsg", "w") as log:
                log.write(text + "\n")
            await asyncio.sleep(2)
            found = [hit for hit in told if hit.groups.get("device") == f"rbd{mark}"]
            assert len(found) == count


@pytest.fixture
def unlimited() -> Iterator[None]:
    """The kernel takes ten lines in five seconds from a process unless told otherwise."""
    switch = Path("/proc/sys/kernel/printk_devkmsg")
    before = switch.read_text()
    switch.write_text("on\n")
    try:
        yield
    finally:
        switch.write_text(before)


@pytest.mark.usefixtures("unlimited")
def test_records_that_were_overwritten_are_counted_exactly() -> None:
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


async def test_a_missing_journal_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told: list[Hit] = []
    unit = sources(tmp_path, sources=[{"name": "kubelet", "unit": "kubelet.service"}])
    async with following(unit, told) as follower:
        await until(lambda: "journalctl is missing" in follower.states().get("kubelet", ""))


async def test_a_silent_log_child_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from volumes.audit.logs import follower as client

    monkeypatch.setattr(client, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(client, "RESTART_SECONDS", 0.1)
    path = tmp_path / "x.log"
    path.touch()
    told: list[Hit] = []
    async with following(sources(path), told) as follower:
        await until(lambda: "kubelet" in follower.counters())
        append(path, "a\n" * 100)
        await until(lambda: flood.accounted(follower) == 100)
        children = _children("volumes.audit.logs.sources")
        for pid in children:
            os.kill(pid, 19)  # SIGSTOP
        await until(lambda: follower.restarts > 0)
        await until(lambda: bool(set(_children("volumes.audit.logs.sources")) - set(children)))
        await until(lambda: "kubelet" in follower._now)
        await asyncio.sleep(0.7)
        append(path, "b\n" * 10)
        await until(lambda: flood.accounted(follower) == 110)  # the count goes on


def _children(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == os.getpid() and word in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


async def test_a_busy_unmount_in_kubelets_log_leads_to_the_process_that_is_in_the_way(
    stage: Stage,
) -> None:
    """The volume is not in kubelet's directory: only the log line says that it is to go."""
    device = stage.loop()
    target = stage.mount(device, stage.folder / "elsewhere")
    pid = stage.holder("cwd", target)
    log = stage.folder / "kubelet.log"
    log.touch()
    logs = {"kernel": False, "sources": [{"name": "kubelet", "files": str(log)}], "hold": "5s"}
    async with watching(stage, settings(stage, logs=logs)) as watch:
        await until(lambda: bool(watch.audit.follower and watch.audit.follower.counters()))
        await asyncio.sleep(1.0)
        assert not watch.found(device, "busy-mount")
        done = subprocess.run(["umount", str(target)], capture_output=True, text=True, check=False)
        append(log, f"E1121 nestedpendingoperations.go:348] Output: {done.stderr.strip()}\n")
        found = await watch.finding(device, "busy-mount")
        assert found["pid"] == pid
        line_finding = await watch.finding(device, "log-target-busy")
        assert "target is busy" in line_finding["evidence"]["line"]
        # It clears by itself when the line stays away.
        await watch.until(lambda: not watch.found(device, "log-target-busy"), "cleared")
