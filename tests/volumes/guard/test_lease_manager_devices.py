"""The life of volumes under an enforcing agent: new ones, hanging ones, changed ones."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, grave, waiting
from tests.testbed.agent import Agent

pytestmark = pytest.mark.real

SIZE = 320 * blockdev.MiB


@pytest.fixture
def patient(agent: Agent) -> Iterator[Agent]:
    """The agent, whose patience with devices a test changes."""
    yield agent
    cell.answers_within(agent, cell.ANSWER_SECONDS)


def test_hanging_device_times_out_and_is_probed_once(
    where: cell.Cell, patient: Agent, tmp_path: Path
) -> None:
    agent = patient
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        blockdev.run("mkfs.ext4", "-q", disk.device)
        waiting.until(lambda: agent.guarded(disk.device).get("verdict"), 10, "the first check")
        cell.answers_within(agent, 3.0)
        disk.fault({"offset": 0, "length": SIZE, "hang": True})
        for _ in range(20):  # everyone wants to know at once
            # mkfs would read first, and hang in that
            assert where.run("dd", "if=/dev/zero", f"of={disk.device}", "count=1").returncode == 1
            assert agent.get("/healthz")["alive"]
        # The look that runs may still have the old patience, which is longer than the API's.
        waiting.until(
            lambda: (agent.guarded(disk.device).get("verdict") or {}).get("verdict") == "timeout",
            90,
            "the stall",
        )
        done = agent.cli("volume", "probe", disk.device, "--json")
        assert (done.returncode, json.loads(done.stdout)["verdict"]) == (5, "timeout"), done

        status = agent.get("/v1/volumes/guard")
        # Waiting for a page, a child can be killed; for the device itself, it cannot.
        assert status["probes_hanging"] in ([], [disk.device])
        parent = str(agent.process.pid)  # type: ignore[union-attr]
        probes = blockdev.run("pgrep", "-P", parent, "-f", "volumes.probe.examine", check=False)
        assert len(probes.stdout.split()) <= 2  # the one that hangs, and the spare
        assert "probe-hangs" in {f["rule"] for f in agent.findings()}

        cell.answers_within(agent, cell.ANSWER_SECONDS)
        disk.clear()
        waiting.until(
            lambda: not agent.get("/v1/volumes/guard")["probes_hanging"], 10, "the child to be gone"
        )
        assert agent.cli_json("volume", "probe", disk.device)["type"] == "ext4"


def test_content_changed_is_reported_until_accepted(agent: Agent, tmp_path: Path) -> None:
    image = blockdev.blank(tmp_path / "image", SIZE)

    def seen(device: str) -> Any:
        return (agent.guarded(device).get("verdict") or {}).get("uuid")

    with blockdev.loop(image) as device:
        blockdev.run("mkfs.ext4", "-q", device)
        agent.cli_json("volume", "probe", device)
    with blockdev.loop(image) as device:
        first = waiting.until(lambda: seen(device), 10, "the first content")
    blockdev.run("mkfs.ext4", "-q", "-F", str(image))  # another node
    with blockdev.loop(image) as device:
        waiting.until(lambda: seen(device) not in (None, first), 10, "the other content")
        changed = waiting.until(
            lambda: [f for f in agent.findings() if f["rule"] == "content-changed"],
            5,
            "the finding",
        )
        assert first in changed[0]["message"]
        agent.cli_json("volume", "ledger", "--accept", f"loop:{image}")
        waiting.until(
            lambda: not [f for f in agent.findings() if f["rule"] == "content-changed"],
            5,
            "the finding to clear",
        )


def test_content_missing_is_reported_at_once(agent: Agent, tmp_path: Path) -> None:
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        blockdev.run("mkfs.ext4", "-q", disk.device)
    with blockdev.faulty_disk(tmp_path / "disk", backing=disk.backing) as disk:
        waiting.until(
            lambda: (agent.guarded(disk.device).get("verdict") or {}).get("type"),
            10,
            "it to be known",
        )
    disk.control.write_text("[]")
    with blockdev.faulty_disk(
        tmp_path / "disk", backing=disk.backing,
        faults=[{"offset": 0, "length": SIZE, "zero": True}],
    ) as disk:  # fmt: skip
        found = waiting.until(
            lambda: [f for f in agent.findings() if f["rule"] == "content-missing"],
            10,
            "the finding",
        )
        assert "blank_verified" in found[0]["message"]
        assert not agent.guarded(disk.device)["may_be_formatted"]


def test_allow_format_needs_the_volumes_name(
    where: cell.Cell, agent: Agent, tmp_path: Path
) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        blockdev.run("mkfs.ext4", "-q", device)
        volume = agent.cli_json("volume", "probe", device)["volume"]
        words = ("volume", "allow-format", device, "--reason", "it is scratch", "--volume-id")

        wrong = agent.cli(*words, "loop:/another")
        assert wrong.returncode == 8 and "holds volume" in wrong.stderr
        assert where.run("mkfs.ext4", "-F", device).returncode != 0

        agent.cli_json(*words, volume)
        assert where.run("mkfs.ext4", "-F", device).returncode == 0
        log = agent.cli_json("volume", "guard", "status")["operator_log"]
        assert log[-1]["action"] == "allow-format" and log[-1]["reason"] == "it is scratch"


def test_denial_names_pod_and_process(where: cell.Cell, agent: Agent, tmp_path: Path) -> None:
    uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
    container = "c" * 64
    pod = where.path / f"kubepods/pod{uid}/{container}"
    pod.mkdir(parents=True)
    image = blockdev.blank(tmp_path / "image", SIZE)
    blockdev.run("mkfs.ext4", "-q", str(image))
    with blockdev.loop(image) as device:
        where.run("mkfs.xfs", "-f", device, cgroup=pod)
        found = waiting.until(
            lambda: [f for f in agent.findings() if str(tmp_path) in f["subject"]],
            10,
            "the finding",
        )[0]
    assert found["rule"] == "format-denied" and found["severity"] == "critical"
    evidence = found["evidence"]
    assert evidence["command"] == f"mkfs.xfs -f {device}"
    assert (evidence["pod"], evidence["container"]) == (uid, container)
    assert evidence["pid"].isdigit() and "has_fs ext4" in evidence["verdict"]
    metrics = agent.get("/metrics")
    assert 'nodeagent_volumes_guard_mode{mode="enforce"} 1.0' in metrics


def _leased(agent: Agent, where: cell.Cell, device: str) -> None:
    """By nobody's try: on a busy machine one that was to be refused may come after the lease."""
    waiting.until(lambda: agent.guarded(device).get("may_be_formatted"), 10, "the lease")


def _no_lease(agent: Agent) -> bool:
    return not agent.get("/v1/volumes/guard")["leases"]


def test_the_second_mkfs_is_refused_however_soon(
    where: cell.Cell, agent: Agent, tmp_path: Path
) -> None:
    for number in range(20):
        with blockdev.loop(blockdev.blank(tmp_path / f"{number}", 64 * blockdev.MiB)) as device:
            _leased(agent, where, device)
            assert where.run("mkfs.ext4", "-q", "-F", device).returncode == 0
            with grave.missing_denial():
                assert where.run("mkfs.ext4", "-q", "-F", device).returncode != 0
            waiting.until(functools.partial(_no_lease, agent), 10, "the end of the lease")
            assert where.run("fsck", "-a", device).returncode == 0


def test_a_formatter_that_was_killed_early_leaves_the_lease_to_the_next(
    where: cell.Cell, agent: Agent, tmp_path: Path
) -> None:
    """And while it is at work, nobody else formats; the refusal says why."""
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        _leased(agent, where, device)
        first = where.popen("sh", "-c", f"exec 3<>{device}; echo open; read end")
        assert first.stdout is not None and first.stdout.readline() == "open\n"
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode != 0
        why = f"process {first.pid} formats it now: wait for its end"
        waiting.until(
            lambda: why in agent.guarded(device)["reasons"], 10, "the reason",
            detail=lambda: agent.guarded(device),
        )  # fmt: skip
        agent.kill()
        agent.start()  # it knows the first from the kernel
        waiting.until(
            lambda: why in agent.guarded(device).get("reasons", ()), 20, "the reason again",
            detail=lambda: agent.guarded(device),
        )  # fmt: skip
        first.kill()
        first.communicate()
        waiting.until(
            lambda: where.run("mkfs.ext4", "-q", "-F", device).returncode == 0, 15, "the next try",
            detail=lambda: agent.guarded(device),
        )  # fmt: skip
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode != 0


def test_who_only_asks_whether_it_may_write_leaves_the_lease_to_the_next(
    where: cell.Cell, agent: Agent, tmp_path: Path
) -> None:
    """access(2) is an open to the kernel's hook; the shell that asked lives on."""
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        _leased(agent, where, device)
        first = where.popen("sh", "-c", f"test -w {device} && echo asked; read end")
        assert first.stdout is not None and first.stdout.readline() == "asked\n"
        try:
            waiting.until(
                lambda: where.run("mkfs.ext4", "-q", "-F", device).returncode == 0, 15, "mkfs",
                detail=lambda: agent.guarded(device),
            )  # fmt: skip
        finally:
            first.kill()
            first.communicate()
