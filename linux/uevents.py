"""The kernel's uevents about block devices (netlink(7), NETLINK_KOBJECT_UEVENT)."""

import contextlib
import errno
import socket
from dataclasses import dataclass

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_BUFFER = 4 * 2**20
_SO_RCVBUFFORCE = 33


@dataclass(frozen=True)
class Uevent:
    action: str  # add, change, remove, online, offline
    name: str  # of the device, as in /sys/class/block
    kind: str  # disk or partition


class Overflow(Exception):
    """Events were lost: look at everything again."""


class Uevents:
    """A non-blocking socket; ``fd`` becomes readable when events wait. OSError when not allowed."""

    def __init__(self) -> None:
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, flags, _NETLINK_KOBJECT_UEVENT)
        try:
            with contextlib.suppress(OSError):  # without CAP_NET_ADMIN the default must do
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    def read(self, most: int = 256) -> list[Uevent]:
        """Block events that wait, at most ``most``. Raises Overflow."""
        found = []
        for _ in range(most):
            try:
                data, sender = self._socket.recvfrom(16384)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    raise Overflow from None
                raise
            if sender[0] == 0:  # from the kernel, not from a process
                event = parse(data)
                if event is not None:
                    found.append(event)
        return found

    def close(self) -> None:
        self._socket.close()


def parse(data: bytes) -> Uevent | None:
    """One message; None when it is not about a block device."""
    fields = dict(
        part.decode(errors="replace").split("=", 1) for part in data.split(b"\0") if b"=" in part
    )
    if fields.get("SUBSYSTEM") != "block" or "DEVNAME" not in fields:
        return None
    return Uevent(fields.get("ACTION", ""), fields["DEVNAME"], fields.get("DEVTYPE", "disk"))
