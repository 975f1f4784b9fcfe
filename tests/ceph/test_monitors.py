import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from ceph import monitors
from ceph.monitors import Address


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("10.0.0.1:6789", [("", "10.0.0.1", 6789)]),
        ("mon-a.example:3300", [("", "mon-a.example", 3300)]),
        ("[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]",
         [("v2", "10.0.0.1", 3300), ("v1", "10.0.0.1", 6789)]),
        ("v2:[fe80::1]:3300", [("v2", "fe80::1", 3300)]),
        ("[fe80::1]:6789", [("", "fe80::1", 6789)]),
        ("10.0.0.1:6789,10.0.0.2:6789", [("", "10.0.0.1", 6789), ("", "10.0.0.2", 6789)]),
        ("10.0.0.1", []),
        ("", []),
    ],
)  # fmt: skip
def test_parse(text: str, addresses: list[tuple[str, str, int]]) -> None:
    assert monitors.parse((text,)) == addresses


def test_an_address_is_written_as_ceph_conf_takes_it() -> None:
    assert str(Address("v2", "10.0.0.1", 3300)) == "v2:10.0.0.1:3300"
    assert str(Address("v1", "fe80::1", 6789)) == "v1:[fe80::1]:6789"


def test_numeric_hosts_leaves_names_out() -> None:
    given = ("[v2:10.0.0.1:3300,v1:10.0.0.1:6789]", "mon-a:6789", "[fe80::1]:6789")
    assert monitors.numeric_hosts(given) == ["10.0.0.1", "fe80::1"]


@contextlib.asynccontextmanager
async def listening(greeting: bytes) -> AsyncIterator[int]:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_resolve_asks_the_monitor_for_its_protocol() -> None:
    async with listening(b"ceph v2\nrest") as new, listening(b"ceph v027") as old:
        asked = (f"127.0.0.1:{new}", f"v2:127.0.0.1:{old}", "127.0.0.1:1")
        assert [address.protocol for address in await monitors.resolve(asked)] == ["v2", "v1", "v1"]


async def test_resolve_is_empty_without_any_monitor() -> None:
    async with listening(b"HTTP/1.1 400") as other:
        assert await monitors.resolve((f"127.0.0.1:{other}", "127.0.0.1:1")) == []
