"""What the guard leaves in the kernel and on disk, and how it is taken off. In child processes.

The ledger stays unless somebody asks for its removal by name: without it the next agent takes a
volume that reads as zeros for a new one. Its copy in the clusters (metadata of images) is theirs.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from kit.traces import Trace
from linux import mountinfo, mounts
from volumes import settings
from volumes.guard import override

_BPF = "/sys/fs/bpf"


def find(section: dict[str, Any], state_dir: str) -> list[dict[str, Any]]:
    wanted = settings.VolumesSettings.of_json(section).guard
    present = override.present(wanted)
    found = [
        Trace("guard program", f"{program.name} (id {program.id}) at {present.cgroup}")
        for program in present.programs
    ]
    if wanted.pins.is_dir():
        found.append(Trace("pinned maps", str(wanted.pins)))
    if _own_mount(wanted.pins.parent):
        found.append(Trace("bpf file system", str(wanted.pins.parent)))
    state = Path(state_dir) / "volumes"
    if held := override.held_at(wanted):
        found.append(Trace("mode given by an operator", str(held)))
    if entries := _entries(state):
        text = f"what {entries} volumes hold; uninstall --yes --forget-volumes removes it"
        found.append(Trace("ledger", str(state / "ledger"), stays=text, memory=True))
    if state.exists() and (not entries or any(each.name != "ledger" for each in state.iterdir())):
        found.append(Trace("state", str(state)))
    return [trace.as_json() for trace in found]


def _own_mount(path: Path) -> bool:
    """The agent mounts one where its pins are to be when none is there; the host's is elsewhere."""
    stacked = mountinfo.stacked(str(path))
    return bool(stacked) and stacked[-1].fstype == "bpf" and str(path) != _BPF


def remove(section: dict[str, Any], state_dir: str, kind: str, name: str) -> None:
    wanted = settings.VolumesSettings.of_json(section).guard
    match kind:
        case "guard program" | "pinned maps":
            with contextlib.closing(override.handle(wanted)) as guard:
                guard.detach()
        case "bpf file system":
            # The kernel puts two files of its own into each.
            kernels = {"maps.debug", "progs.debug"}
            if _own_mount(Path(name)) and {each.name for each in Path(name).iterdir()} <= kernels:
                mounts.unmount(name)
        case "mode given by an operator":
            override.forget(wanted)
        case "ledger":
            shutil.rmtree(name)
            with contextlib.suppress(OSError):  # there is more: that goes by itself
                Path(name).parent.rmdir()
                Path(state_dir).rmdir()
        case "state":
            entries = _entries(Path(name))
            for each in Path(name).iterdir():
                if each.name == "ledger" and entries:
                    continue
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                else:
                    each.unlink()
            with contextlib.suppress(OSError):  # what is kept is in it
                Path(name).rmdir()


def _entries(state: Path) -> int:
    ledger = state / "ledger"
    return sum(each.is_file() for each in ledger.iterdir()) if ledger.is_dir() else 0
