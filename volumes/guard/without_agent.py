"""What a command does without an agent: shows the guard, attaches it (at boot, and in the pod's
init container), and finds out about one device by a look, the ledger and the cluster.

The guard only becomes weaker because somebody said so by name. So settings that cannot be used
leave the kernel as it is, and so do settings without the section; ``volumes: null`` takes the guard
off. After a boot, when nothing is attached, the settings that were last in force count instead.
"""

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import kit.errors
from ceph.protocol import Extents
from kit.room import RoomSection
from linux import blockdev
from volumes import settings
from volumes.guard import canary, kernel, override, own, pace, status, steps
from volumes.ledger import store
from volumes.ledger.mirror import Answer, Mirror
from volumes.probe import prober
from volumes.probe.examine import Kind, Verdict, marks_from

_NO_SECTION = (
    "the settings have no section 'volumes': the guard stays as it was last wanted "
    "('volumes: null' takes it off)"
)
_NOBODY = "no agent answers, and only an agent permits a format"


async def kernel_status(wanted: settings.GuardSettings, state_dir: Path) -> dict[str, Any]:
    """Everything the kernel says, and a proof: an attempt by a process in the cgroup."""
    recalled = await override.recall(wanted, state_dir)
    present = override.present(override.in_force(wanted, recalled.last))
    found, from_file = recalled.override, override.settings_mode(wanted, recalled.last)
    return status.describe_kernel(present) | {
        "proof": await canary.prove(Path(present.cgroup), present.whole_node, state_dir),
        "wanted_mode": str(found.mode if found else from_file),
        "settings_mode": str(from_file),
        "override": None if found is None else found.as_json(),
        "operator_log": list(recalled.noted),
        "damaged": [text for text in (recalled.error, recalled.lost) if text],
        "agent": "not running",
    }


# --- attach


async def attach(section: RoomSection) -> dict[str, Any]:
    """The guard's status afterwards. SettingsError when nothing says what is to be attached and
    when something is attached already; HostError when the kernel does not take the guard."""
    given: settings.GuardSettings | None = section.settings.guard if section.settings else None
    recalled = await override.recall(given or settings.GuardSettings(), section.state_dir)
    if given is not None:
        given = override.in_force(given, recalled.last)
    known = given or recalled.last
    if section.off:
        known = known or settings.GuardSettings()
        await _apply(known, kernel.Mode.OFF, section.state_dir)
        return await _status(known, section, await override.forget_settings(section.state_dir))
    if given is None and (known is None or override.present(known).attached):
        if section.error is not None:
            raise section.error
        return await _status(known or settings.GuardSettings(), section, _NO_SECTION)
    assert known is not None
    mode = override.settings_mode(known, recalled.last)
    if recalled.override is not None:
        mode = recalled.override.mode
    elif recalled.error or recalled.lost:
        mode = override.stronger(mode, recalled.least, override.present(known).mode)
    unjudged = await _apply(known, mode, section.state_dir, bool(recalled.lost))
    if given is None:
        return await _status(known, section, "" if section.error else _NO_SECTION, unjudged)
    problem = recalled.error or recalled.lost
    if not problem:
        by_settings = override.settings_mode(given, recalled.last)
        problem = await override.remember(given, by_settings, recalled, section.state_dir)
    return await _status(known, section, problem, unjudged)


async def _status(
    wanted: settings.GuardSettings, section: RoomSection, *warnings: str
) -> dict[str, Any]:
    now = await kernel_status(wanted, section.state_dir)
    return now | {"warnings": [each for each in warnings if each]}


async def _apply(
    wanted: settings.GuardSettings, mode: kernel.Mode, state_dir: Path, lost: bool = False
) -> str:
    """Milliseconds, but for the look at all devices of a scope. ``lost``: what was last in force is
    not known. Returns why devices of the scope are not judged, or nothing."""
    with contextlib.closing(override.handle(wanted)) as guard:
        new = kernel.wanted(wanted, mode, blockdev.majors())
        if lost:
            new = kernel.at_least(new, await asyncio.to_thread(guard.read))
        there = await asyncio.to_thread(guard.apply, new)
        devices = own.OwnDevices(state_dir, writes=False)
        if there.judges is not kernel.Mode.OFF and wanted.scope == "ceph":
            await asyncio.to_thread(own.off, guard)
        # What an agent left judged stays: it may have seen more than this process can.
        if there.attached and there.judges is kernel.Mode.OFF and wanted.scope != "ceph":
            devices.apply(guard, wanted, 1)
            await devices.look()
        return devices.seen.problem


# --- one device


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
    watched = not device.parent and section.guard.examines(device)
    return {
        "device": status.describe_device(known, time.monotonic())
        | {"watched": watched, "partition_of": device.parent},
        "ledger": None if entry is None else dataclasses.asdict(entry),
        "denials": [], "mode": mode, "repair": None, "agent": False,
    }  # fmt: skip


def _kernel(wanted: settings.GuardSettings, device: blockdev.BlockDevice) -> tuple[str, bool]:
    """The guard's mode in the kernel, and whether the device has a lease there."""
    try:
        present = override.present(wanted)
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
            await asyncio.sleep(pace.DOUBT_SECONDS)
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
        extents = Extents(seen.start, marks_from(seen.start, device.size))
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
    if there is not None:
        here = entry or store.Entry(volume=device.volume, title=device.title)
        entry = steps.with_cluster(here, there, seen)
    known.missing = steps.missing(known, entry)
    if entry is None or not entry.type or entry.permitted or not seen.has_content:
        return
    if (entry.type, entry.uuid) != (seen.type, seen.uuid):
        known.changed_from = entry.content
