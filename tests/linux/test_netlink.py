import select
import socket
from pathlib import Path

import pytest

from linux import netlink
from tests.testbed import blockdev

ADD = (
    b"add@/devices/rbd/0\0ACTION=add\0DEVPATH=/devices/rbd/0\0SUBSYSTEM=block\0"
    b"DEVNAME=rbd0\0DEVTYPE=disk\0"
)


def test_parse_uevent_takes_block_devices_only() -> None:
    assert netlink.parse_uevent(ADD) == netlink.Uevent("add", "rbd0", "disk")
    assert netlink.parse_uevent(ADD.replace(b"=block", b"=net")) is None
    assert netlink.parse_uevent(ADD.replace(b"DEVNAME=rbd0\0", b"")) is None
    assert netlink.parse_uevent(b"libudev\0\xff\xff") is None


def test_path_to_an_address_of_this_machine() -> None:
    found = netlink.path_to("127.0.0.1")
    assert found.interface == "lo" and 0 < found.mtu <= found.interface_mtu
    with pytest.raises(OSError):
        netlink.path_to("not an address")


def test_uevents_reports_overflow_and_ignores_other_senders() -> None:
    events = netlink.Uevents()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    class Fake:
        def __init__(self, *answers: object) -> None:
            self.answers = list(answers)

        def recvfrom(self, _: int) -> object:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self) -> None: ...

    events.close()
    ours.close()
    theirs.close()
    events._socket = Fake((ADD, (0, 1)), (ADD, (77, 1)), BlockingIOError())  # type: ignore[assignment]
    assert [event.name for event in events.read()] == ["rbd0"]
    events._socket = Fake(OSError(105, "No buffer space available"))  # type: ignore[assignment]
    with pytest.raises(netlink.Overflow):
        events.read()


@pytest.mark.real
def test_uevents_hears_of_a_loop_device(area: Path) -> None:
    (area / "image").write_bytes(bytes(blockdev.MiB))
    events = netlink.Uevents()
    try:
        with blockdev.loop(area / "image") as device:
            names: set[str] = set()
            while Path(device).name not in names and select.select([events.fd], [], [], 10)[0]:
                names |= {event.name for event in events.read()}
            assert Path(device).name in names
        assert events.read() is not None
    finally:
        events.close()
