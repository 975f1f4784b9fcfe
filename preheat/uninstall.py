"""What preheating leaves in the container runtime, and how it is taken out.

Images stay: they are the runtime's. Pins, holds of pulls, notes and our labels go. ``find`` and
``remove`` are for ``nodeagent uninstall``, in child processes; ``release_all`` is the command.
"""

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import kit.errors
import kit.formats
from kit.traces import Trace
from preheat.pulling import durability
from preheat.registry import documents
from preheat.runtimes import base, containerd, store
from preheat.settings import PreheatSettings

# Of the runtimes that the chart knows: the usual one, and that of k3s and RKE2.
SOCKETS = (
    Path("/run/containerd/containerd.sock"),
    Path("/run/k3s/containerd/containerd.sock"),
)


def _stray(inventory: base.ImageInventory) -> list[base.Record]:
    pinned = {hold.image_id for hold in inventory.held("pin")}
    return [each for each in inventory.records if each.ours and each.name not in pinned]


def _traces(inventory: base.ImageInventory) -> list[Trace]:
    """What is in the runtime."""
    found = [Trace(hold.role, f"{hold.id} ({hold.ref})") for hold in inventory.holds]
    found += [Trace("lease", each) for each in inventory.unknown_holds]
    found += [Trace("mark", each.name) for each in _stray(inventory)]
    if partial := [d for d, ingest in inventory.ingests.items() if ingest.ours is not None]:
        found.append(Trace("partial layers", f"{len(partial)}"))
    if inventory.last_used:
        found.append(Trace("labels", f"{store.LAST_USED} ({len(inventory.last_used)})"))
    if inventory.durable:
        found.append(Trace("labels", f"{store.DURABLE} ({len(inventory.durable)})"))
    return found


async def _take(
    runtime: containerd.Containerd, inventory: base.ImageInventory, kind: str, name: str
) -> None:
    match kind:
        case "file" if name.endswith(kit.formats.SUFFIX):
            kit.formats.forget(Path(name))  # a directory, perhaps
        case "file":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        case "documents":
            await asyncio.to_thread(shutil.rmtree, name)
        case "partial layers":
            for digest in inventory.ingests:
                await runtime.content.abort(f"{base.OWN_PREFIX}{digest}")
        case "labels" if name.startswith(store.DURABLE):
            await runtime.layers.note(inventory.durable, durable=False)
        case "labels":
            for digest in inventory.last_used:
                await runtime.content.note_use(digest, None)
        case "mark":
            await runtime.marks.clear_stray(
                [each for each in _stray(inventory) if each.name == name]
            )
        case "lease":
            if name in inventory.unknown_holds:
                await runtime.end(base.Hold("note", "", "policy", id=name))
        case _:
            for hold in inventory.holds:
                if hold.id == name.partition(" ")[0]:
                    await (runtime.unpin(hold) if kind == "pin" else runtime.end(hold))


def sockets(section: dict[str, Any]) -> tuple[list[Path], list[Path]]:
    """Whom to ask: the runtime of the settings. Where these name no socket of their own, perhaps
    because the room was taken out of them before the node was cleared, every runtime that this host
    has. And those that do not run, where another one does.

    NotFoundError: it has none.
    """
    given = PreheatSettings.of_json(section)
    if given.socket != PreheatSettings().socket:
        return [given.socket], []
    found = [path for path in SOCKETS if path.exists()]
    if not found:
        raise kit.errors.NotFoundError(
            "the container runtime", f"there is no socket {given.socket}", "set preheat.socket"
        )
    running = [each for each in found if _listens(each)]
    return running or found, [each for each in found if running and each not in running]


def _listens(path: Path) -> bool:
    """Whether somebody has the socket open. One that cannot be asked may have somebody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def find(section: dict[str, Any], state_dir: str) -> list[dict[str, Any]]:
    async def look(socket: Path) -> list[Trace]:
        async with containerd.connected(socket) as (runtime, _):
            return _traces(await runtime.inventory())

    running, ended = sockets(section)
    found = [trace for each in running for trace in asyncio.run(look(each))]
    why = "it does not run; what it may hold of ours is seen when it does: repeat this then"
    found += [Trace("container runtime", str(each), stays=why) for each in ended]
    kept = Path(state_dir) / documents.FOLDER
    found += [Trace("documents", str(kept))] if kept.is_dir() else []
    boot = Path(state_dir) / durability.STATE
    files = (boot, kit.formats.aside(boot))
    found += [Trace("file", str(path)) for path in files if path.exists()]
    return [trace.as_json() for trace in found]


def remove(section: dict[str, Any], state_dir: str, kind: str, name: str) -> None:
    async def take(socket: Path) -> None:
        async with containerd.connected(socket) as (runtime, _):
            await _take(runtime, await runtime.inventory(), kind, name)

    for each in sockets(section)[0]:
        asyncio.run(take(each))


async def release_all(socket: Path, *, yes: bool) -> list[Trace]:
    """What of ours is in the runtime; with ``yes`` it is gone at return.

    May be repeated when it was interrupted. Raises RuntimeCallError, and RefusedError when there is
    something again afterwards: an agent works on this runtime.
    """
    async with containerd.connected(socket) as (runtime, _):
        inventory = await runtime.inventory()
        found = _traces(inventory)
        if not yes:
            return found
        for trace in found:
            await _take(runtime, inventory, trace.kind, trace.name)
        # Clearing the mark of one pin leaves it for another of the same image: look again.
        inventory = await runtime.inventory()
        await runtime.marks.clear_stray(_stray(inventory))
        left = _traces(await runtime.inventory())
        if left:
            raise kit.errors.RefusedError(
                "the container runtime",
                f"has {len(left)} of ours again, {left[0].kind} {left[0].name} first",
                "stop the agent that works on it, then try again",
            )
        return found
