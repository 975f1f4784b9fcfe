"""Ceph monitors: their addresses, which of them answer, and in which protocol.

A client that is given ``HOST:PORT`` tries both messenger protocols and, when the key is wrong, ends
in a timeout that looks like a network fault. A monitor names its protocol in the first bytes that
it sends, so ``resolve`` asks for them, and clients get explicit addresses: a wrong key then fails
at once, and as such.
"""

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

import kit.errors

BANNER_SECONDS = 3.0

# host:port, [ipv6]:port, either behind v1: or v2:, single or in a bracketed list
_ADDRESS = re.compile(r"(?:(v[12]):)?(\[[0-9a-fA-F:.]+\]|[^\s,:\[\]]+):(\d+)(?:/\d+)?")


class Address(NamedTuple):
    protocol: str  # v1, v2, or '' where nothing says it
    host: str
    port: int

    def __str__(self) -> str:
        """As ceph.conf takes it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.protocol}:{shown}:{self.port}"


def parse(monitors: Iterable[str]) -> list[Address]:
    """All addresses in texts like ``h:6789`` or ``[v2:h:3300,v1:h:6789]``; others are skipped."""
    found = []
    for monitor in monitors:
        text = monitor[1:-1] if monitor.startswith("[v") else monitor
        for protocol, host, port in _ADDRESS.findall(text):
            found.append(Address(protocol, host.strip("[]"), int(port)))
    return found


def numeric_hosts(monitors: Iterable[str]) -> list[str]:
    """The hosts that are IP addresses, each once. Names are left out: resolving one could hang."""
    found = []
    for address in parse(monitors):
        with contextlib.suppress(ValueError):
            found.append(str(ipaddress.ip_address(address.host)))
    return list(dict.fromkeys(found))


def one_protocol(addresses: Iterable[Address]) -> tuple[str, list[str]]:
    """The protocol that the kernel's clients speak to all monitors, v1 when any of them does; and
    HOST:PORT of those that speak it."""
    known = list(addresses)
    protocol = "v1" if any(each.protocol == "v1" for each in known) else "v2"
    return protocol, [str(a).partition(":")[2] for a in known if a.protocol == protocol]


async def resolve(monitors: Iterable[str]) -> list[Address]:
    """The same addresses with their protocol; [] when no monitor answers.

    One that does not answer gets the protocol of its port: a cluster with a monitor down works.
    """
    addresses = parse(monitors)
    banners = await asyncio.gather(*(_banner(each.host, each.port) for each in addresses))
    if not any(banners):
        return []
    resolved = []
    for address, banner in zip(addresses, banners, strict=True):
        usual = "v2" if address.port == 3300 else "v1"
        resolved.append(address._replace(protocol=banner or address.protocol or usual))
    return resolved


def reach(given: list[str]) -> str:
    """For doctor. SourceError when no monitor answers."""
    found = asyncio.run(resolve(given))
    if not found:
        raise kit.errors.SourceError(
            f"monitors {', '.join(given)}", "none answers", "check the addresses and the network"
        )
    return f"a monitor of {', '.join(map(str, found))} answers"


async def _banner(host: str, port: int) -> str:
    """v1 or v2 when a monitor answers, '' otherwise."""
    try:
        async with asyncio.timeout(BANNER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                greeting = await reader.read(9)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return ""
    if greeting.startswith(b"ceph v2"):
        return "v2"
    return "v1" if greeting.startswith(b"ceph v0") else ""
