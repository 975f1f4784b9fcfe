"""CRI-O behind the runtime port: pulls through CRI, pins by a drop-in file.

CRI-O has neither leases nor events nor a way to hand it layers: a cancelled pull starts anew, a
removed pin is pulled again at the next cycle, and what we hold is kept in a small file of ours.
CRI-O reads the drop-in again on SIGHUP; its process is the one that listens on its socket.
"""

import asyncio
import dataclasses
import json
import os
import signal
import socket as sockets
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kit.files
from preheat import manifest
from preheat.runtimes import base, cri, leases
from preheat.runtimes import messages as m

CONNECT_SECONDS = 3.0


class Crio:
    """One CRI-O, or as far as CRI goes any other runtime."""

    def __init__(self, socket: Path, drop_in: Path, state: Path) -> None:
        self.calls = cri.Calls(socket)
        self._socket = socket
        self._drop_in = drop_in
        self._state = state
        self._holds: dict[str, base.Hold] | None = None

    @property
    def abilities(self) -> base.Abilities:
        return base.Abilities("crio", resumes=False, watches=False, ingests=False, estimates=False)

    @property
    def breaker(self) -> cri.Breaker:
        return self.calls.breaker

    async def connect(self) -> str:
        answer = await self.calls.read(cri.CRI_VERSION, m.Empty(), deadline=CONNECT_SECONDS)
        return f"{answer.runtime_name} {answer.runtime_version}"

    async def close(self) -> None:
        await self.calls.close()

    async def inventory(self) -> base.Inventory:
        listed = await self.calls.read(cri.CRI_IMAGES, m.Empty())
        containers = await self.calls.read(cri.CRI_CONTAINERS, m.Empty())
        info = await self.calls.read(cri.CRI_FS, m.Empty())
        mounts = [each.fs_id.mountpoint for each in info.image_filesystems if each.fs_id]
        return base.Inventory(
            records=tuple(record for each in listed.images for record in _records(each)),
            holds=tuple((await self._read()).values()),
            in_use=frozenset(_full(each.image_ref) for each in containers.containers),
            images_path=mounts[0] if mounts else "",
        )

    async def read(self, digest: str) -> bytes:
        raise base.RuntimeCallError(digest, "CRI-O shows no blobs", "", "UNIMPLEMENTED")

    async def usage(self, chain_id: str) -> int:
        raise base.RuntimeCallError(chain_id, "CRI-O shows no layers", "", "NOT_FOUND")

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
        raise base.RuntimeCallError(digest, "CRI-O takes no layers", "", "UNIMPLEMENTED")

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        """CRI-O keeps none."""

    async def note_use(self, digest: str, when: float) -> None:
        """Nowhere to write it to: after a restart a use counts from then."""

    async def pull(
        self, ref: str, login: base.Login | None, hold: base.Hold, deadline: float
    ) -> str:
        request = cri.pull_request(ref, login)
        answer = await self.calls.long_change(cri.CRI_PULL, request, lease=None, deadline=deadline)
        return _full(answer.image_ref)

    # --- holds ------------------------------------------------------------------------------------

    async def _read(self) -> dict[str, base.Hold]:
        if self._holds is None:
            try:
                text = await asyncio.to_thread(self._state.read_text)
                self._holds = {each["id"]: _hold(each) for each in json.loads(text)}
            except FileNotFoundError:
                self._holds = {}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise base.RuntimeCallError(
                    str(self._state), f"cannot be read ({error})", "remove it: pins are made again"
                ) from error
        now = time.time()
        return {k: h for k, h in self._holds.items() if h.expires is None or h.expires > now}

    async def _save(self, found: dict[str, base.Hold]) -> None:
        self._holds = found
        text = json.dumps([dataclasses.asdict(hold) for hold in found.values()], indent=1)
        await asyncio.to_thread(kit.files.save, self._state, text.encode())

    async def begin(self, hold: base.Hold) -> base.Hold:
        digest = hold.target.digest if hold.role == "pin" and hold.target else ""
        name = leases.lease_id(hold.role, hold.ref, digest)
        hold = dataclasses.replace(hold, id=name, created=hold.created or time.time())
        await self._save(await self._read() | {name: hold})
        return hold

    async def end(self, hold: base.Hold) -> None:
        found = await self._read()
        if found.pop(hold.id, None) is not None:
            await self._save(found)

    async def pin(self, hold: base.Hold) -> base.Hold:
        hold = await self.begin(dataclasses.replace(hold, names=(hold.ref,)))
        await self._tell()
        return hold

    async def unpin(self, hold: base.Hold) -> None:
        await self.end(hold)
        await self._tell()

    async def heal(self, hold: base.Hold) -> int:
        return 0  # the plan pulls it again

    async def removals(self) -> AsyncIterator[str]:
        return
        yield ""

    async def _tell(self) -> None:
        """Write the drop-in and have CRI-O read it, only when it changes."""
        pins = sorted({h.ref for h in (await self._read()).values() if h.role == "pin"})
        text = drop_in(pins).encode()
        try:
            if await asyncio.to_thread(_content, self._drop_in) == text:
                return
            await asyncio.to_thread(kit.files.save, self._drop_in, text, 0o644)
            await asyncio.to_thread(_hang_up, self._socket)
        except OSError as error:
            raise base.RuntimeCallError(
                str(self._drop_in),
                f"CRI-O could not be told what is pinned ({error})",
                "the agent needs to write there and to see the host's processes (hostPID)",
            ) from error


def drop_in(pins: list[str]) -> str:
    """The configuration that names what is pinned. JSON's strings are TOML's."""
    lines = "".join(f"  {json.dumps(ref)},\n" for ref in pins)
    return f"# Written by nodeagent; changes are lost.\n[crio.image]\npinned_images = [\n{lines}]\n"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _hang_up(socket: Path) -> None:
    """SIGHUP to the process that listens on ``socket``. Blocking; OSError when it has none."""
    with sockets.socket(sockets.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(str(socket))
        raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", raw)
    if pid <= 1:
        raise ProcessLookupError("its process is not visible from here")
    os.kill(pid, signal.SIGHUP)


def _full(image_id: str) -> str:
    """CRI-O gives image ids without their algorithm."""
    return f"sha256:{image_id}" if len(image_id) == 64 and ":" not in image_id else image_id


def _records(listed: m.CriImage) -> list[base.Record]:
    """Each tag with each digest that it is known by (the index's and the manifest's)."""
    digests = [each.rpartition("@")[2] for each in listed.repo_digests]
    targets = [
        manifest.Target("application/vnd.oci.image.manifest.v1+json", digest, max(1, listed.size))
        for digest in dict.fromkeys([*digests, _full(listed.id)])
        if manifest.is_digest(digest)
    ]
    names = [*listed.repo_tags, *listed.repo_digests]
    return [base.Record(name, target, listed.pinned) for name in names for target in targets]


def _hold(value: Mapping[str, Any]) -> base.Hold:
    target = value["target"]
    return base.Hold(
        **{
            **value,
            "target": None if target is None else manifest.Target(**target),
            "names": tuple(value["names"]),
        }
    )
