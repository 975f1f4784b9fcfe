"""What a command finds out about one device without an agent: a look, the ledger, the cluster."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import kit.errors
from ceph.protocol import Extents
from linux import blockdev
from volumes import settings
from volumes.guard import doubt, kernel, lease_manager, override, status, steps
from volumes.ledger import store
from volumes.ledger.mirror import Answer, Mirror
from volumes.probe import prober, signature_offsets
from volumes.probe.examine import Kind, Verdict

_NOBODY = "no agent answers, and only an agent permits a format"


async def explained(
    name: str, section: settings.VolumesSettings, state_dir: Path
) -> dict[str, Any]:
    """As the agent would tell it (``explain.page``). NotFoundError, RefusedError."""
    device = await asyncio.to_thread(blockdev.by_path, name)
    mode, leased = await asyncio.to_thread(_kernel, section.guard, device)
    ledger = store.LedgerStore(state_dir / "volumes" / "ledger")
    await asyncio.to_thread(ledger.load)
    known = await _looked(device, section.guard)
    known.reasons = () if leased else (_NOBODY,)
    entry = None if device.parent else ledger.get(device.volume)
    assert known.seen is not None
    known.cluster = await _asked(device, known.seen, section)
    _compare(known, entry)
    return {
        "device": status.describe_device(known, time.monotonic())
        | {"watched": _is_watched(device, section.guard), "partition_of": device.parent},
        "ledger": None if entry is None else dataclasses.asdict(entry),
        "denials": [], "mode": mode, "repair": None, "agent": False,
    }  # fmt: skip


def _is_watched(device: blockdev.BlockDevice, wanted: settings.GuardSettings) -> bool:
    return not device.parent and wanted.examines(device.lowest.driver, device.lowest.name)


def _kernel(wanted: settings.GuardSettings, device: blockdev.BlockDevice) -> tuple[str, bool]:
    """The guard's mode in the kernel, and whether the device has a lease there."""
    try:
        guard = override.handle(wanted)
        try:
            present = guard.read()
        finally:
            guard.close()
    except (kit.errors.AgentError, OSError) as error:
        return f"not known: {error}", False
    held = present.leases.get(device.number)
    ours = held is not None and held.until > time.monotonic() and held.diskseq == device.diskseq
    return str(present.mode if present.attached else kernel.Mode.OFF), ours


async def _looked(device: blockdev.BlockDevice, wanted: settings.GuardSettings) -> steps.Known:
    """One look, and a second one where the first read nothing: a slow device is not a lost one."""
    known = steps.Known(device)
    probing = prober.Prober(wanted.probe_timeout)
    try:
        while True:
            known.seen = await probing.probe(device.path, device.encrypts)
            known.checked = time.monotonic()
            known.doubt = known.doubt.after(known.seen, known.checked)
            if not known.doubt.looks or known.doubt.agreed:
                return known
            await asyncio.sleep(doubt.AGAIN_SECONDS)
    finally:
        await probing.close()


async def _asked(
    device: blockdev.BlockDevice, seen: Verdict, section: settings.VolumesSettings
) -> Answer | None:
    """What the cluster says of the image; None for another device."""
    image = device.lowest.image
    if image is None or device.parent:
        return None
    extents = None
    if seen.verdict is Kind.BLANK_VERIFIED:
        places = [(seen.start + at, length) for at, length in signature_offsets.marks(device.size)]
        extents = Extents(seen.start, tuple(places))
    mirror = Mirror(section.clusters, section.guard.cluster_timeout)
    try:
        return await mirror.ask(image, extents, part=device.part)
    finally:
        await mirror.close()


def _compare(known: steps.Known, entry: store.Entry | None) -> None:
    """Whether what was seen is what was there: by the ledger and the image's metadata."""
    seen, device = known.seen, known.device
    assert seen is not None
    there = known.cluster.known if known.cluster is not None else None
    if there is not None and (there.volume == device.volume or not seen.has_content):
        here = entry or store.Entry(volume=device.volume, title=device.title)
        entry = store.merge(here, there)
    known.missing = lease_manager.missing(known, entry)
    if entry is None or not entry.type or entry.permitted or not seen.has_content:
        return
    if (entry.type, entry.uuid) != (seen.type, seen.uuid):
        known.changed_from = entry.content
