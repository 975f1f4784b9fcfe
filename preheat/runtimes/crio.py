"""CRI-O: pulls through CRI, pins by a drop-in file.

CRI-O has neither leases nor events, and it takes no layers. So a cancelled pull starts again from
zero, a pinned image that was removed is pulled again at the next cycle, and our holds are kept in a
small file of our own. CRI-O reads the drop-in file again on SIGHUP; its process is the one that
listens on its socket.
"""

import asyncio
import dataclasses
import json
import os
import signal
import socket as sockets
import struct
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.formats
from preheat import manifest
from preheat.runtimes import base, cri, cri_pb2

CONNECT_SECONDS = 3.0
FORMAT = 1  # of the file of holds


class Crio(cri.CriRuntime):
    """One CRI-O. Everything but the drop-in works with any other CRI runtime."""

    abilities = base.Abilities(watches=False, ingests=False, estimates=False)
    honours_pins = None
    release_after: float | None = None

    def __init__(self, socket: Path, drop_in: Path, state: Path) -> None:
        super().__init__(socket)
        self._socket = socket
        self._drop_in = drop_in
        self._state = state
        self._holds: dict[str, base.Hold] | None = None

    async def connect(self) -> str:
        answer = await self.connection.read(cri.VERSION, cri.Empty(), deadline=cri.PROBE_SECONDS)
        return f"{answer.runtime_name} {answer.runtime_version}"

    async def inventory(self) -> base.Inventory:
        listed = await self.connection.read(cri.LIST_IMAGES, cri.Empty())
        records = tuple(record for each in listed.images for record in _records(each))
        paths = await self._image_paths()
        return base.Inventory(
            records=records,
            holds=tuple((await self._read()).values()),
            in_use=await self._images_in_use(records),
            images_path=paths[0] if paths else "",
        )

    async def read(self, digest: str) -> bytes:
        raise base.RuntimeCallError(digest, "CRI-O does not show blobs", "", "UNIMPLEMENTED")

    async def usage(self, chain_id: str) -> int:
        raise base.RuntimeCallError(chain_id, "CRI-O does not show layers", "", "NOT_FOUND")

    async def ingests(self) -> Mapping[str, base.Ingest]:
        return {}

    async def progress(self, layers: Sequence[manifest.Layer]) -> Mapping[str, base.LayerState]:
        return {}

    async def write(
        self,
        digest: str,
        size: int,
        source: manifest.Blobs,
        hold: base.Hold,
        origin: tuple[str, str],
    ) -> None:
        raise base.RuntimeCallError(digest, "CRI-O does not take layers", "", "UNIMPLEMENTED")

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        """CRI-O keeps no half-fetched blobs."""

    async def note_use(self, digest: str, when: float | None) -> None:
        """CRI-O has no place for it: uses count from the agent's start."""

    async def note_durable(self, chain_ids: Iterable[str], *, durable: bool = True) -> None:
        """CRI-O shows no layers."""

    async def unpack_again(
        self, layers: Sequence[manifest.Layer], which: Collection[str], deadline: float
    ) -> None:
        """As above."""

    async def pull(
        self, ref: str, login: base.Login | None, hold: base.Hold, deadline: float
    ) -> str:
        return cri.full_id(await self._pull_image(ref, login, None, deadline))

    # --- holds ------------------------------------------------------------------------------------

    async def _read(self) -> dict[str, base.Hold]:
        if self._holds is None:
            try:
                text = await asyncio.to_thread(self._state.read_text)
                kept = json.loads(text)
                if isinstance(kept, list):  # agents before December 2026
                    kept = {"holds": kept}
                kit.formats.check(str(self._state), kept, FORMAT)
                self._holds = {each["id"]: _hold(each) for each in kept["holds"]}
            except FileNotFoundError:
                self._holds = {}
            except kit.errors.HostError as error:
                raise base.RuntimeCallError(error.thing, error.cause, error.remedy) from error
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise base.RuntimeCallError(
                    str(self._state),
                    f"cannot be read ({error})",
                    "remove it: the agent makes its pins again",
                ) from error
        now = time.time()
        return {k: h for k, h in self._holds.items() if h.expires is None or h.expires > now}

    async def _save(self, found: dict[str, base.Hold]) -> None:
        self._holds = found
        holds = [dataclasses.asdict(hold) for hold in found.values()]
        text = json.dumps({kit.formats.KEY: FORMAT, "holds": holds}, indent=1)
        await asyncio.to_thread(kit.files.save, self._state, text.encode())

    async def begin(self, hold: base.Hold) -> base.Hold:
        name = base.hold_id(hold)
        hold = dataclasses.replace(hold, id=name, created=hold.created or time.time())
        await self._save(await self._read() | {name: hold})
        return hold

    async def end(self, hold: base.Hold) -> None:
        found = await self._read()
        if found.pop(hold.id, None) is not None:
            await self._save(found)

    async def pin(self, hold: base.Hold) -> base.Hold:
        hold = await self.begin(dataclasses.replace(hold, names=(hold.ref,)))
        await self._write_drop_in()
        return hold

    async def unpin(self, hold: base.Hold) -> None:
        await self.end(hold)
        await self._write_drop_in()

    async def clear_marks(self, records: Sequence[base.Record]) -> None:
        """CRI-O's pins are names in the drop-in."""

    async def tend(self, inventory: base.Inventory) -> bool:
        await self._write_drop_in()
        return False

    async def heal(self, hold: base.Hold) -> int:
        return 0  # the plan pulls it again

    async def target_of(self, name: str) -> manifest.Target | None:
        return None  # nothing asks: it has no events

    async def changes(self) -> AsyncIterator[base.Change]:
        return
        yield base.Change("", "removed")

    async def _write_drop_in(self) -> None:
        """Write the pinned names for CRI-O and have it read them, if they changed."""
        pins = sorted({h.ref for h in (await self._read()).values() if h.role == "pin"})
        text = drop_in(pins).encode()
        try:
            there = await asyncio.to_thread(_content, self._drop_in)
            if there == text or (there is None and not pins):
                return
            await asyncio.to_thread(kit.files.save, self._drop_in, text, 0o644)
            await asyncio.to_thread(_hang_up, self._socket)
        except OSError as error:
            raise base.RuntimeCallError(
                str(self._drop_in),
                f"the pins did not reach CRI-O ({error})",
                "let the agent write there and see the host's processes (hostPID)",
            ) from error


def drop_in(pins: list[str]) -> str:
    """The configuration that names the pinned images. JSON's strings are TOML's."""
    lines = "".join(f"  {json.dumps(ref)},\n" for ref in pins)
    return f"# Written by nodeagent; changes are lost.\n[crio.image]\npinned_images = [\n{lines}]\n"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _hang_up(socket: Path) -> None:
    """Send SIGHUP to the process that listens on ``socket``. Blocking; raises OSError."""
    with sockets.socket(sockets.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(str(socket))
        raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", raw)
    if pid <= 1:
        raise ProcessLookupError("its process is not visible from here")
    os.kill(pid, signal.SIGHUP)


def _records(listed: cri_pb2.Image) -> list[base.Record]:
    """Each name with each digest that the image has (the index's and the manifest's)."""
    digests = [each.rpartition("@")[2] for each in listed.repo_digests]
    targets = [
        manifest.Target("application/vnd.oci.image.manifest.v1+json", digest, max(1, listed.size))
        for digest in dict.fromkeys([*digests, cri.full_id(listed.id)])
        if manifest.is_digest(digest)
    ]
    names = [*listed.repo_tags, *listed.repo_digests]
    return [base.Record(name, target) for name in names for target in targets]


def _hold(value: Mapping[str, Any]) -> base.Hold:
    target = value["target"]
    return base.Hold(
        **{
            **value,
            "target": None if target is None else manifest.Target(**target),
            "names": tuple(value["names"]),
        }
    )
