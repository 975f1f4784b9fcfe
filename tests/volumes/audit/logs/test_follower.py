"""The log child as the agent uses it: files across rotation, the kernel's log, floods, restarts."""

import functools
import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import expiry, waiting
from tests.testbed.waiting import until_async
from tests.volumes.audit import flood
from tests.volumes.audit.flood import following, readable, sources
from tests.volumes.audit.stage import Stage, children, settings, watching
from volumes.audit.logs import follower as followers
from volumes.audit.logs.matcher import Hit

pytestmark = pytest.mark.real

CONTAINER_LOG = f"csi-rbdplugin-x7_rook-ceph_csi-rbdplugin-{'0a' * 32}.log"
CHILD = "volumes.audit.logs.sources"


def line(number: int) -> str:
    return f"rbd image rbd/csi-vol-{number} is still being used\n"


def images(found: list[Hit]) -> list[str]:
    return sorted(hit.groups["image"] for hit in found for _ in range(hit.count))


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


async def test_flood_is_accounted_for_to_the_last_line(tmp_path: Path) -> None:
    # A limit that also a slow machine's flood is above.
    result = await flood.flood(tmp_path, lines=300_000, lines_per_second=1000)
    assert result["seen"] + result["dropped"] == result["lines"]
    assert result["dropped"] > 0  # it really was above the limit
    assert result["lost"] == 0


@pytest.mark.parametrize("how", ["rename", "copytruncate", "link"])
async def test_files_are_followed_across_rotation(tmp_path: Path, how: str) -> None:
    """rename: kubelet. copytruncate: logrotate's other way. link: /var/log/containers."""
    real = tmp_path / "pods" / "0.log"
    real.parent.mkdir()
    real.write_text(line(0))  # from before: not read
    path = real
    if how == "link":
        path = tmp_path / "containers" / CONTAINER_LOG
        path.parent.mkdir()
        path.symlink_to(real)
    found: list[Hit] = []
    async with following(sources(path.parent / "*.log"), found) as follower:
        await readable(follower)
        append(real, line(1))
        await until_async(lambda: len(found) == 1)
        if how == "copytruncate":
            shutil.copy(real, tmp_path / "old")
            os.truncate(real, 0)
            # Truncated and written again to the same length within 0.5 s is not noticed.
            await until_async(lambda: follower.counters()["kubelet"].lost == 1)
        else:
            append(real, line(2))  # written immediately before the rename
            old = real.rename(real.with_name("0.log.1"))
            append(old, line(3))  # the writer still has the old one open
            real.touch()
        append(real, line(4))
        wanted = ["rbd/csi-vol-1", "rbd/csi-vol-4"]
        if how != "copytruncate":
            wanted = ["rbd/csi-vol-1", "rbd/csi-vol-2", "rbd/csi-vol-3", "rbd/csi-vol-4"]
        await until_async(lambda: images(found) == wanted, detail=lambda: images(found))


async def test_a_new_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    found: list[Hit] = []
    async with following(sources(tmp_path / "*" / "*.log"), found) as follower:
        await readable(follower)
        (tmp_path / "pod").mkdir()
        append(tmp_path / "pod" / "0.log", line(1))
        await until_async(lambda: images(found) == ["rbd/csi-vol-1"])


async def test_kernel_log_is_followed() -> None:
    mark = uuid.uuid4().int % 10**9
    found: list[Hit] = []
    kernel = sources(Path("/nonexistent/x"), kernel=True, sources=[])
    async with following(kernel, found, user_records=True) as follower:
        await readable(follower, "kernel")
        with open("/dev/kmsg", "w") as log:
            log.write(f"rbd: rbd{mark}: encountered watch error: -107\n")
        await until_async(
            lambda: [hit for hit in found if hit.groups.get("device") == f"rbd{mark}"]
        )


async def test_kernel_lines_between_two_children_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "RESTART_SECONDS", 1.0)
    mark = uuid.uuid4().int % 10**9
    found: list[Hit] = []
    kernel = sources(Path("/nonexistent/x"), kernel=True, sources=[])

    def write(number: int) -> None:
        with open("/dev/kmsg", "w") as log:
            log.write(f"rbd: rbd{number}: encountered watch error: -107\n")

    def devices() -> list[str]:
        names = [hit.groups.get("device", "") for hit in found]
        return [name for name in names if name in (f"rbd{mark}", f"rbd{mark + 1}")]

    async with following(kernel, found, user_records=True) as follower:
        await readable(follower, "kernel")
        write(mark)
        await until_async(devices)
        (child,) = children(CHILD)
        os.kill(child, signal.SIGKILL)
        write(mark + 1)
        await until_async(lambda: len(devices()) == 2)
        assert devices() == [f"rbd{mark}", f"rbd{mark + 1}"]
        assert follower.counters()["kernel"].lost == 0


async def test_a_record_that_children_fail_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "RESTART_SECONDS", 0.2)
    kernel = sources(Path("/nonexistent/x"), kernel=True, sources=[])
    async with following(kernel, []) as follower:
        await readable(follower, "kernel")

        def ended(children_before: int) -> bool:
            return follower.restarts > children_before

        for restarts in (0, 1, 2):  # the first one had reported, two more are killed before they do
            (child,) = await until_async(lambda: children(CHILD))
            os.kill(child, signal.SIGKILL)
            await until_async(functools.partial(ended, restarts))
        assert follower.counters()["kernel"].lost == 1  # nobody knows how many
        await readable(follower, "kernel")


async def test_missing_journalctl_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    unit = sources(tmp_path, sources=[{"name": "kubelet", "unit": "kubelet.service"}])
    async with following(unit, []) as follower:
        await until_async(lambda: "journalctl is missing" in follower.states().get("kubelet", ""))


async def test_a_silent_child_is_replaced_and_counting_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = expiry.Expiry(monkeypatch, 3.125)  # it reports several times in that
    monkeypatch.setattr(followers, "SILENCE_SECONDS", late.seconds)
    monkeypatch.setattr(followers, "RESTART_SECONDS", 0.5)
    path = tmp_path / "x.log"
    path.touch()
    async with following(sources(path), []) as follower:
        await readable(follower)
        append(path, "a\n" * 100)
        await until_async(lambda: flood.accounted(follower) == 100)
        (child,) = children(CHILD)
        before = follower.restarts
        os.kill(child, signal.SIGSTOP)

        def given_up() -> bool:
            late.pass_all()  # its last word may still have been on its way
            return follower.restarts > before

        await until_async(given_up)
        assert f"said nothing for {late.seconds:g}s" in follower.trouble
        await readable(follower)
        assert follower.trouble == ""
        assert set(children(CHILD)) - {child}
        append(path, "b\n" * 10)
        await until_async(lambda: flood.accounted(follower) == 110)


async def test_a_killed_child_counts_as_one_loss_of_each_followed_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "RESTART_SECONDS", 0.5)
    (tmp_path / "x.log").touch()
    both = [
        {"name": "kubelet", "files": str(tmp_path / "x.log")},
        {"name": "away", "files": str(tmp_path / "none" / "*.log")},
    ]
    async with following(sources(tmp_path, sources=both), []) as follower:
        await until_async(lambda: "away" in follower.states())
        (child,) = children(CHILD)
        os.kill(child, signal.SIGKILL)
        states: list[dict[str, str]] = []

        def replaced() -> bool:
            states.append(follower.states())
            return follower.restarts > 0 and "kubelet" in follower._now

        await until_async(replaced)
        lost = {name: counts.lost for name, counts in follower.counters().items()}
        assert lost == {"kubelet": 1, "away": 0}  # what was not followed has lost nothing
        assert all("away" in state for state in states)  # it does not flap meanwhile


async def test_a_busy_unmount_in_the_log_leads_to_its_process(stage: Stage) -> None:
    """The volume is not in kubelet's directory: only the log line says that it is to go."""
    device = stage.loop()
    target = stage.mount(device, stage.folder / "elsewhere")
    pid = stage.holder("cwd", target)
    log = stage.folder / "kubelet.log"
    log.touch()
    logs = {"kernel": False, "sources": [{"name": "kubelet", "files": str(log)}]}
    logs["hold"] = f"{waiting.limit(1.5):g}s"  # longer than all that it leads to
    async with watching(stage, settings(stage, logs=logs)) as watch:
        assert watch.audit.follower is not None
        await readable(watch.audit.follower)
        await watch.audit.round(full=True)
        assert not watch.seen(device, "busy-mount")
        done = subprocess.run(["umount", str(target)], capture_output=True, text=True, check=False)

        def tried_again() -> list[dict[str, Any]]:
            """As kubelet does; a slow machine's look is not sooner than a line is let go."""
            append(log, f"E1121 nestedpendingoperations.go:348] Output: {done.stderr.strip()}\n")
            return watch.found(device, "busy-mount")

        (found, *_) = await watch.until(tried_again, "busy-mount")
        assert found["pid"] == pid
        line_finding = await watch.finding(device, "log-target-busy")
        assert "target is busy" in line_finding["evidence"]["line"]
        # It clears by itself when the line stays away.
        await watch.until(lambda: not watch.found(device, "log-target-busy"), "cleared")


async def test_an_unread_log_is_a_finding_until_it_can_be_read(stage: Stage) -> None:
    path = stage.folder / "logs" / "*.log"
    logs = {"kernel": False, "sources": [{"name": "ceph-csi", "files": str(path)}]}
    patient = settings(stage, logs=logs, rules={"unread-log": {"patience": "0s"}})
    async with watching(stage, patient) as watch:
        found = await watch.finding("", "unread-log")
        assert found["subject"] == "ceph-csi"
        assert f"{path.parent} does not exist" in found["message"]
        path.parent.mkdir()
        await watch.until(lambda: not watch.found("", "unread-log"), "cleared")
