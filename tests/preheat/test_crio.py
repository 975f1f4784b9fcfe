"""The CRI-O adapter, as far as it can be tested without CRI-O (it is in no Debian release here).

Pulls, lists and states go through the real CRI of containerd; the drop-in and its SIGHUP go to a
process that listens on a unix socket as CRI-O does. What CRI-O makes of them is not tested.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.runtimes import base, crio
from tests.preheat.rig import Rig, pinned, state, until
from tests.testbed import waiting

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
        process.wait(waiting.limit(10))
        if process.stdout is not None:
            process.stdout.close()


def hups(listener: Path) -> int:
    file = listener.parent / "hups"
    return file.read_text().count("hup") if file.exists() else 0


async def test_pins_reach_crio_only_when_they_change(listener: Path, tmp_path: Path) -> None:
    drop_in = tmp_path / "50.conf"
    box = crio.Crio(listener, drop_in, tmp_path / "state.json")
    hold = base.Hold("", "pin", 'r.e/a:b"]', "policy")
    pin = await box.pin(hold)
    await until(lambda: hups(listener) == 1)
    await box.pin(hold)
    other = await box.pin(base.Hold("", "pin", "r.e/c:d", "operator"))
    await until(lambda: hups(listener) == 2)
    named = tomllib.loads(drop_in.read_text())["crio"]["image"]["pinned_images"]
    # Another agent process finds them again.
    again = crio.Crio(listener, drop_in, tmp_path / "state.json")
    await again.unpin(pin)
    await until(lambda: hups(listener) == 3)
    await again.unpin(other)
    await until(lambda: hups(listener) == 4)

    assert named == ['r.e/a:b"]', "r.e/c:d"]
    assert tomllib.loads(drop_in.read_text())["crio"]["image"]["pinned_images"] == []


async def test_unreadable_state_is_named(listener: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    box = crio.Crio(listener, tmp_path / "50.conf", tmp_path / "state.json")
    with pytest.raises(base.RuntimeCallError, match=r"state\.json.*remove it"):
        await box.begin(base.Hold("", "pull", "r.e/a:b", "operator"))


async def test_state_of_a_newer_agent_is_left_alone(listener: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"format": 2, "holds": "something else"}')
    box = crio.Crio(listener, tmp_path / "50.conf", state)
    with pytest.raises(base.RuntimeCallError, match="newer agent wrote it"):
        await box.begin(base.Hold("", "pull", "r.e/a:b", "operator"))
    assert state.read_text() == '{"format": 2, "holds": "something else"}'


async def test_state_of_an_older_agent_is_taken_over(listener: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    box = crio.Crio(listener, tmp_path / "50.conf", state)
    hold = await box.begin(base.Hold("", "pull", "r.e/a:b", "operator"))
    state.write_text(json.dumps(json.loads(state.read_text())["holds"]))
    again = crio.Crio(listener, tmp_path / "50.conf", state)
    assert (await again._read())[hold.id] == hold


@pytest.mark.real
@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_room_works_over_plain_cri(
    rig: Rig, listener: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pull, pin, notice a removal, pull again, unpin: no lease, no event, no native call.

    containerd serves CRI; the listener stands for CRI-O's process and takes the signals.
    """
    hang_up = crio._hang_up
    monkeypatch.setattr(crio, "_hang_up", lambda _: hang_up(listener))
    image = rig.push("fw/crio:v1")
    drop_in = rig.folder / "50.conf"
    more: dict[str, Any] = {"runtime": "crio", "crio": {"drop_in": str(drop_in)}}
    async with rig.running(images=[{"ref": image.ref}], **more) as room:
        await pinned(room, image.ref)
        written = drop_in.read_text()
        await rig.kubelet.remove(image.ref)
        room.reconciler.wake()
        await until(lambda: rig.kubelet.status(image.ref))
        await state(room, image.ref, "ready")
        await room.unpin(image.ref)
        leases = await rig.kubelet.leases()

    assert image.ref in written
    assert image.ref not in drop_in.read_text()
    assert leases == []
    assert hups(listener) == 2
