"""What the guard and the audit hear of the node through one watch."""

from collections.abc import Sequence

import pytest

from linux import netlink
from volumes.node import watch


async def test_what_one_listener_cannot_heed_the_other_hears() -> None:
    event = netlink.Uevent("add", "rbd0", "disk")
    waiting: list[list[netlink.Uevent] | Exception] = [[event], netlink.Overflow(), []]

    class Uevents:
        def read(self) -> list[netlink.Uevent]:
            found = waiting.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    def fail(_: Sequence[netlink.Uevent] | None) -> None:
        raise ValueError("whatever it is")

    heard: list[Sequence[netlink.Uevent] | None] = []
    node = watch.NodeWatch()
    node.devices += [fail, heard.append]
    node._uevents = Uevents()  # type: ignore[assignment]
    node.hear()
    assert heard == [[event], None], "and that some may be lost"
    node.hear()
    assert heard == [[event], None] and waiting == []


async def test_who_stops_takes_nothing_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    class Tables:
        def __init__(self, *_: object) -> None:
            looks.append("made")

        async def start(self) -> None:
            looks.append("started")

        async def close(self) -> None:
            looks.append("closed")

    monkeypatch.setattr(watch, "RawBlockWatch", Tables)
    node = watch.NodeWatch()
    guard, audit = object(), object()
    await node.stop(guard)  # one whose start failed
    await node.start(guard)
    await node.start(audit)
    await node.stop(audit)
    assert node.hears_devices and looks == ["made", "started"]
    await node.stop(guard)
    assert not node.hears_devices and looks == ["made", "started", "closed"]
