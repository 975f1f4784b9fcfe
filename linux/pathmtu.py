"""What the kernel knows of the way to an address (ip(7) IP_MTU, netdevice(7)). Sends nothing."""

import fcntl
import socket
import struct
from dataclasses import dataclass

_IP_MTU, _IPV6_MTU = 14, 24
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921


@dataclass(frozen=True)
class Path:
    mtu: int  # of the whole way, as far as the kernel has learnt it
    interface: str  # empty when it cannot be told
    interface_mtu: int


def to(address: str) -> Path:
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
            return Path(mtu, "", mtu)
        for _, name in socket.if_nameindex():
            if _address(probe, name) == own:
                request = struct.pack("16si", name.encode(), 0)
                answer = fcntl.ioctl(probe, _SIOCGIFMTU, request + bytes(12))
                return Path(mtu, name, struct.unpack_from("16xi", answer)[0])
    return Path(mtu, "", mtu)


def _address(probe: socket.socket, name: str) -> str:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return ""  # an interface without an IPv4 address
    return socket.inet_ntoa(answer[20:24])
