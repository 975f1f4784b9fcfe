"""The CRI-O adapter, as far as it can be tested without CRI-O (it is in no Debian release here).

Pulls, lists and states go through the real CRI of containerd; the drop-in and its SIGHUP go to a
process that listens on a unix socket as CRI-O does. What CRI-O makes of them is not tested.
"""

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preheat.component
from preheat.runtimes import base, crio
from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

MB = 1_000_000

_LISTENER = """
import pathlib, signal, socket, sys
hups = pathlib.Path(sys.argv[2])
signal.signal(signal.SIGHUP, lambda *_: hups.open("a").write("hup\\n"))
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
print("ready", flush=True)
while True:
    s.accept()[0].close()
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "crio.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", _LISTENER, str(socket), str(tmp_path / "hups")],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield socket
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


async def test_pins_are_written_for_crio_and_it_is_told_only_when_they_change(
    listener: Path, tmp_path: Path
) -> None:
    drop_in = tmp_path / "50.conf"
    box = crio.Crio(listener, drop_in, tmp_path / "state.json")
    hold = base.Hold("", "pin", 'r.e/a:b"]', "policy")
    pin = await box.pin(hold)
    await box.pin(hold)
    other = await box.pin(base.Hold("", "pin", "r.e/c:d", "operator"))
    named = tomllib.loads(drop_in.read_text())["crio"]["image"]["pinned_images"]
    # Another agent process finds them again.
    again = crio.Crio(listener, drop_in, tmp_path / "state.json")
    await again.unpin(pin)
    await again.unpin(other)

    hups = tmp_path / "hups"
    await rig.until(lambda: hups.read_text().count("hup") == 4)
    assert named == ['r.e/a:b"]', "r.e/c:d"]
    assert tomllib.loads(drop_in.read_text())["crio"]["image"]["pinned_images"] == []


@pytest.mark.real
@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_the_room_works_over_plain_cri(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pull, pin, notice a removal, pull again, unpin: no lease, no event, no native call."""
    told: list[Path] = []
    monkeypatch.setattr(crio, "_hang_up", told.append)
    images.push("fw/crio", "v1", [registry.layer("crio", MB, 95)])
    ref = f"{gate.host}/fw/crio:v1"
    drop_in = tmp_path / "50.conf"
    more: dict[str, Any] = {
        "runtime": "crio",
        "images": [{"ref": ref}],
        "crio": {"drop_in": str(drop_in)},
    }
    room: preheat.component.Preheat
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        written = drop_in.read_text()
        await kubelet.remove(ref)
        room.core.wake()
        await rig.until(lambda: kubelet.status(ref))
        await rig.state(room, ref, "ready")
        await room.unpin(ref)
        leases = await kubelet.leases()
        await asyncio.sleep(0)

    assert ref in written
    assert ref not in drop_in.read_text()
    assert leases == ()
    assert len(told) == 2
