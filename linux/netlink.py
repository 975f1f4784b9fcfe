"""What the kernel says through sockets: uevents of block devices, and the MTU on a path.

``Uevents`` is netlink(7) with NETLINK_KOBJECT_UEVENT. Its buffer may overflow; the reader must then
read all devices again. ``path_to`` reads what the kernel knows about an address (ip(7) IP_MTU,
netdevice(7)) and sends nothing.
"""

import contextlib
import errno
import fcntl
import socket
import struct
from dataclasses import dataclass

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_BUFFER = 4 * 2**20
_SO_RCVBUFFORCE = 33
_IP_MTU, _IPV6_MTU = 14, 24
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921


@dataclass(frozen=True)
class Uevent:
    action: str  # add, change, remove, online, offline
    name: str  # of the device, as in /sys/class/block
    kind: str  # disk or partition


class Overflow(Exception):
    """Events were lost: all devices must be read again."""


class Uevents:
    """A non-blocking socket; ``fd`` becomes readable when events wait. OSError when refused."""

    def __init__(self) -> None:
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, flags, _NETLINK_KOBJECT_UEVENT)
        try:
            with contextlib.suppress(OSError):  # without CAP_NET_ADMIN: the default size
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            self._socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    def read(self, most: int = 256) -> list[Uevent]:
        """The waiting events of block devices, at most ``most``. Raises Overflow."""
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
                event = parse_uevent(data)
                if event is not None:
                    found.append(event)
        return found

    def close(self) -> None:
        self._socket.close()


def parse_uevent(data: bytes) -> Uevent | None:
    """One message; None when it concerns another subsystem."""
    fields = dict(
        part.decode(errors="replace").split("=", 1) for part in data.split(b"\0") if b"=" in part
    )
    if fields.get("SUBSYSTEM") != "block" or "DEVNAME" not in fields:
        return None
    return Uevent(fields.get("ACTION", ""), fields["DEVNAME"], fields.get("DEVTYPE", "disk"))


@dataclass(frozen=True)
class PathMtu:
    mtu: int  # of the whole path, as far as the kernel knows
    interface: str  # empty when unknown
    interface_mtu: int


def path_to(address: str) -> PathMtu:
    """The path to a numeric ``address``. OSError when there is no route."""
    version = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(version, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        probe.connect((address, 9))
        level, option = (
            (socket.IPPROTO_IPV6, _IPV6_MTU)
            if version == socket.AF_INET6
            else (socket.IPPROTO_IP, _IP_MTU)
        )
        mtu = probe.getsockopt(level, option)
        own = str(probe.getsockname()[0])
        if version == socket.AF_INET6:
            return PathMtu(mtu, "", mtu)
        for _, name in socket.if_nameindex():
            if _address(probe, name) == own:
                request = struct.pack("16si", name.encode(), 0)
                answer = fcntl.ioctl(probe, _SIOCGIFMTU, request + bytes(12))
                return PathMtu(mtu, name, struct.unpack_from("16xi", answer)[0])
    return PathMtu(mtu, "", mtu)


def _address(probe: socket.socket, name: str) -> str:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return ""  # an interface without an IPv4 address
    return socket.inet_ntoa(answer[20:24])
