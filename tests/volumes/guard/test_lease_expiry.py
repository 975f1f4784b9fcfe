"""Leases from grant to end, on real devices.

A module of its own: two agents on one cell would share the ring buffer of the guard, and an event
goes to only one of them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, formatters, waiting
from tests.testbed.agent import Agent

pytestmark = pytest.mark.real

SIZE = 320 * blockdev.MiB


@pytest.fixture(scope="module")
def short(where: cell.Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent whose leases are short, but long enough for a formatter to start."""
    lease = f"{waiting.limit(1.5):g}s"
    with cell.agent(tmp_path_factory.mktemp("short"), where, lease=lease) as made:
        yield made


def _granted(agent: Agent) -> float:
    """Leases until now, those that are over included."""
    found = re.search(r"^nodeagent_volumes_guard_leases_total (\S+)$", agent.get("/metrics"), re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_blank_volume_is_formatted_by_kubelets_retries(
    where: cell.Cell, short: Agent, fstype: str, tmp_path: Path
) -> None:
    target = tmp_path / "mnt"
    target.mkdir()
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        outcomes: list[formatters.Outcome] = []

        def mounted() -> bool:
            outcomes.append(
                formatters.kubelet(where.run, device, fstype, str(target), lambda: None)
            )
            return outcomes[-1].mounted

        # kubelet: at once, then after 0.5 s, 1 s, ...
        waiting.until(mounted, 15, "the mount", pause=0.5, detail=lambda: outcomes)
        where.run("umount", str(target))
        waiting.until(
            lambda: (short.guarded(device).get("verdict") or {}).get("type") == fstype,
            10,
            "its content to be in the ledger",
        )
        entries = short.cli_json("volume", "ledger")["volumes"]
        mine = [e for e in entries if e["volume"] == f"loop:{tmp_path}/image"]
        assert mine[0]["type"] == fstype and mine[0]["permitted"] == 0
        assert not [f for f in short.findings()
                    if device.endswith(f["evidence"].get("device", "?"))
                    or str(tmp_path) in f["subject"]]  # fmt: skip
        assert where.run("wipefs", "-a", "-f", device).returncode != 0, "the lease is over"


def test_unused_lease_closes_permission_and_is_granted_again(
    where: cell.Cell, short: Agent, tmp_path: Path
) -> None:
    volume = f"loop:{tmp_path}/image"

    def permitted() -> Any:
        found = [e for e in short.cli_json("volume", "ledger")["volumes"] if e["volume"] == volume]
        return found and found[0]["permitted"]

    before = _granted(short)
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        waiting.until(lambda: _granted(short) > before, 10, "a lease")
        waiting.until(lambda: not short.guarded(device)["may_be_formatted"], 10, "its end")
        waiting.until(lambda: permitted() == 0, 5, "the permission to be closed")
        assert where.run("mkfs.ext4", "-q", device).returncode != 0
        waiting.until(
            lambda: where.run("mkfs.ext4", "-q", device).returncode == 0, 5, "the lease again"
        )


def test_used_lease_is_not_granted_again_without_cluster(
    where: cell.Cell, short: Agent, tmp_path: Path
) -> None:
    """A backend that swallows writes: formatted, and reads still zeros. Only its cluster could
    tell; without one the answer is no."""
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        disk.fault({"offset": 0, "length": SIZE, "zero": True})
        mkfs = ("mkfs.ext4", "-q", "-F", disk.device)
        # On a busy machine a lease may be over before mkfs opens the disk; the next one follows.
        waiting.until(lambda: where.run(*mkfs).returncode == 0, 20, "a format")

        # A probe may have read what was written from the page cache, before it was swallowed.
        expected = ("permitted before", "the ledger says that it holds data")

        def refused() -> bool:
            denied = where.run(*mkfs).returncode != 0  # it may be the first one after the lease
            reasons = short.guarded(disk.device)["reasons"]
            return denied and any(text in reason for reason in reasons for text in expected)

        waiting.until(refused, 20, "the refusal", detail=lambda: short.guarded(disk.device))
        assert where.run(*mkfs).returncode != 0
