"""Stand-ins for device, probe, cluster and kernel, around one LeaseManager."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from ceph.protocol import Extents
from kit import processes
from kube.settings import ThisNode
from linux import blockdev, procfs
from linux.rbd_sysfs import RbdImage
from tests.testbed import constants, waiting
from volumes import settings
from volumes.guard import kernel, lease, lease_manager, steps
from volumes.ledger import mirror, store
from volumes.ledger.witness import Witness
from volumes.node import raw_block
from volumes.probe.examine import Kind, Verdict
from volumes.settings import WitnessSettings

SIZE = 2**30
IMAGE = RbdImage("rbd", "a", "", "", "101d", "f1", 3)
DEVICE = blockdev.BlockDevice("rbd99", (254, 99), "rbd", SIZE, False, diskseq=7, image=IMAGE)
BLANK = Verdict(Kind.BLANK_VERIFIED, "/dev/rbd99", size=SIZE, diskseq=7)
PUBLISHED = (
    b"1 2 0:5 /rbd99 /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc/u"
    b" rw - devtmpfs udev rw"
)
NO_ANSWER = Verdict(Kind.TIMEOUT, "/dev/rbd99", where="no answer")
EXT4 = Verdict(Kind.HAS_FS, "/dev/rbd99", type="ext4", uuid="u1", size=SIZE, diskseq=7)


def witness() -> Witness:
    """Of a node without a cluster."""

    async def find(_: blockdev.BlockDevice) -> None:
        return None

    return Witness(WitnessSettings(enabled=False), ThisNode(name="n"), find)


class Holds:
    """``names``: what is held now."""

    def __init__(self, did: list[str]) -> None:
        self.names: list[str] = []
        self._did = did

    def begin(self, device: blockdev.BlockDevice, seconds: float) -> None:
        if device.name not in self.names:
            self.names.append(device.name)
            self._did.append("hold")

    def end(self, name: str) -> None:
        if name in self.names:
            self.names.remove(name)
            self._did.append("let go")

    async def close(self) -> None:
        self.names.clear()


class World:
    """Everything around one LeaseManager; ``did`` is what it did, in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.device: blockdev.BlockDevice | None = DEVICE
        self.verdict = BLANK
        self.raw = False
        self.too_many_hang = 0
        self.ends_with_disk = True
        self.beats = 0
        self.holds = Holds(self.did)
        self.map: dict[blockdev.Number, kernel.KernelLease] = {}
        self.writes = False  # who has the lease has the device open
        self.ledger = store.LedgerStore(folder)
        self.ledger.load()
        monkeypatch.setattr(blockdev, "identify", self._identify)
        monkeypatch.setattr(
            blockdev, "name_of", lambda number: "rbd99" if number == (254, 99) else ""
        )
        monkeypatch.setattr(raw_block, "host_table", lambda: PUBLISHED if self.raw else b"")
        put = self.ledger.put

        def noted_put(entry: store.Entry) -> None:
            put(entry)
            self.did.append("record permission" if entry.permitted else f"record {entry.type}")

        monkeypatch.setattr(self.ledger, "put", noted_put)
        self.manager = self.new_manager()

    def new_manager(self) -> lease_manager.LeaseManager:
        """As after a restart of the agent."""
        errors = lease.ErrorLog()
        errors.readable = True
        made = lease_manager.LeaseManager(
            constants.made(settings.GuardSettings, settle=0.05),
            steps.Executor(self, self.ledger, self, witness()),  # type: ignore[arg-type]
            errors,
        )
        made.checks.writing = self.writing
        made.checks.prober = self  # type: ignore[assignment]
        made.holds = made.checks._holds = self.holds  # type: ignore[assignment]
        return made

    def _identify(self, name: str) -> blockdev.BlockDevice | None:
        self.did.append("identify")
        return self.device

    # --- the prober, the mirror, the kernel

    async def probe(self, path: str, below: str = "", cluster: str = "") -> Verdict:
        self.did.append("probe")
        if self.too_many_hang:
            self.too_many_hang -= 1
            raise processes.TooManyHangError("the agent", "32 of its child processes hang", "look")
        return self.verdict

    async def ask(
        self, image: RbdImage, extents: Extents | None = None, *, part: str = ""
    ) -> mirror.Answer:
        extent = store.Knowledge.NONE if extents else store.Knowledge.NOT_ASKED
        return mirror.Answer(store.Knowledge.NONE, extent, size=SIZE)

    async def write(self, image: RbdImage, entry: store.Entry, part: str = "") -> bool:
        self.did.append("mirror")
        return True

    async def close(self) -> None:
        pass

    async def writing(self, number: blockdev.Number) -> frozenset[procfs.StartedProcess]:
        held = self.map.get(number)
        return frozenset({held.writer} if self.writes and held and held.writer else ())

    def reserve(self, number: blockdev.Number, diskseq: int | None) -> None:
        self.did.append("reserve")
        held = self.map.setdefault(number, kernel.KernelLease(0.0, 0, diskseq or 0))
        if held.until <= time.monotonic():
            self.map[number] = dataclasses.replace(held, writer=None)

    def free(self, number: blockdev.Number, *, everybodys: bool = False) -> None:
        self.did.append("share" if everybodys else "free")
        if number in self.map:
            writer = procfs.StartedProcess(0, 0) if everybodys else None
            self.map[number] = dataclasses.replace(self.map[number], writer=writer)

    def grant(
        self, number: blockdev.Number, until: float, diskseq: int | None, grace: float = 0.0
    ) -> None:
        self.did.append("grant")
        if number not in self.map:
            raise kit.errors.RefusedError("a lease", "another disk has the number", "try again")
        self.map[number] = kernel.KernelLease(
            until, 0, diskseq or 0, grace, self.map[number].writer
        )

    def beat(self) -> None:
        self.beats += 1

    def revoke(self, number: blockdev.Number) -> kernel.KernelLease | None:
        self.did.append("revoke")
        return self.map.pop(number, None)

    def leases(self) -> dict[blockdev.Number, kernel.KernelLease]:
        return dict(self.map)

    async def checked(self, manager: lease_manager.LeaseManager | None = None) -> Any:
        """What is known after a check."""
        manager = manager or self.manager
        manager.schedule("rbd99", self.device)
        async with asyncio.timeout(waiting.limit(30)):
            while (known := manager.known.get("rbd99")) is None or known.reasons is None:
                await asyncio.sleep(0.01)
        return known
