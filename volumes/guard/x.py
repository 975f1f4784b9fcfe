"""Status, mode and kill switch straight at the kernel: works whether or not an agent runs."""

from pathlib import Path
from typing import Any

import kit.errors
from volumes import settings
from volumes.guard import canary, kernel, layout, override


def handle(wanted: settings.GuardSettings) -> kernel.Kernel:
    """Handles on the guard of the settings' cgroup. HostError when there is no such hierarchy."""
    return kernel.Kernel(
        wanted.cgroup or kernel.find_cgroup(), wanted.pins, wanted.object_file or layout.OBJECT
    )


def describe(present: kernel.Present) -> dict[str, Any]:
    """What is attached, as JSON."""
    return {
        "attached": present.attached,
        "mode": str(present.mode) if present.attached else "off",
        "cgroup": present.cgroup,
        "whole_node": present.whole_node,
        "pinned": present.pinned,
        "programs": [
            {"id": p.id, "name": p.name, "tag": p.tag, "knows_arguments": p.name == layout.FULL}
            for p in present.programs
        ],
        "majors": sorted(present.majors),
        "partitions": sorted(f"{major}:{minor}" for major, minor in present.devices),
        "openers": sorted(present.openers),
        "words": sorted(" ".join(pair) for pair in present.words),
        "leases": [
            {
                "device": f"{n[0]}:{n[1]}",
                "until_monotonic": round(held.until, 3),
                "opens": held.opens,
            }
            for n, held in sorted(present.leases.items())
        ],
        "counters": dict(present.counters),
    }


def status(wanted: settings.GuardSettings, state_dir: Path) -> dict[str, Any]:
    """Everything the kernel says, and a proof: an attempt by a process in the cgroup."""
    guard = handle(wanted)
    try:
        present = guard.read()
    finally:
        guard.close()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = override.load(state_dir)
    return describe(present) | {
        "proof": canary.prove(guard.cgroup, present.whole_node, state_dir),
        "wanted_mode": str(found.mode if found else wanted.mode),
        "settings_mode": wanted.mode,
        "override": None if found is None else {**vars(found), "mode": str(found.mode)},
        "agent": "not running",
    }


def wanted_mode(wanted: settings.GuardSettings, state_dir: Path) -> layout.Mode:
    """What shall be in force: an operator's override, else the settings."""
    found = override.load(state_dir)
    return found.mode if found else layout.Mode(wanted.mode)


def set_mode(
    wanted: settings.GuardSettings, state_dir: Path, mode: str, by: str, reason: str
) -> layout.Mode:
    """In the kernel at once, and remembered for the agent. ``settings`` goes back to the settings
    file. Turning ``off`` detaches. RefusedError when there is nothing attached to be changed; the
    wish is remembered all the same."""
    if mode == "settings":
        override.clear(state_dir)
        new = layout.Mode(wanted.mode)
    else:
        new = layout.Mode(mode)
    guard = handle(wanted)
    try:
        if new is layout.Mode.OFF:
            guard.detach()
        elif guard.read().attached:
            guard.set_mode(new)
        elif mode != "settings":
            override.store(state_dir, new, by, reason)
            raise kit.errors.RefusedError(
                f"guard of {guard.cgroup}",
                "is not attached, so nothing was changed in the kernel",
                f"the agent will attach it in mode {new} when it starts",
            )
    finally:
        guard.close()
    if mode != "settings":
        override.store(state_dir, new, by, reason)
    return new


def detach(wanted: settings.GuardSettings, state_dir: Path, by: str, reason: str) -> int:
    """The kill switch: out of the kernel first, then remembered. How many programs there were."""
    guard = handle(wanted)
    count = guard.detach()
    override.store(state_dir, layout.Mode.OFF, by, reason)
    return count
