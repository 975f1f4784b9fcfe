"""What a scan child sends again and again, and what the agent makes of it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.messages
from linux import blockdev
from tests.volumes.audit.world import INVENTORY, place, volume
from volumes.audit.inventory import scan
from volumes.audit.inventory.model import Inventory

_NUMBERS = st.lists(st.integers(0, 5), max_size=8)


def inventory(hosts: list[int], devices: list[int], taken: float) -> Inventory:
    return dataclasses.replace(
        INVENTORY,
        taken=taken,
        host=tuple(place(f"/mnt/{each}") for each in hosts),
        devices=tuple(
            blockdev.BlockDevice(f"rbd{each}", (252, each), "rbd", 1, False) for each in devices
        ),
        volumes=tuple(volume() for _ in devices),
        users_of=tuple((252, each) for each in devices),
    )


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=5))
def test_changes_give_the_whole_inventory(steps: list[tuple[list[int], list[int]]]) -> None:
    """Through the pipe, one after the other, whatever comes, goes or moves."""
    sent: Inventory | None = None
    known: Inventory | None = None
    for number, (hosts, devices) in enumerate(steps, 1):
        now = inventory(hosts, devices, float(number))
        text = kit.messages.encode(scan.between(sent, now, number))
        answer = kit.messages.decode(text, scan.Changes)
        known = scan.applied(known, answer)
        assert known == now and answer.number == number
        sent = now


def test_one_mount_among_thousands_is_sent_alone() -> None:
    before = inventory(list(range(3000)), [], 1.0)
    after = dataclasses.replace(before, host=(*before.host[:7], place("/new"), *before.host[7:]))
    answer = scan.between(before, after, 2)
    assert answer.inventory.host == (place("/new"),)
    assert len(kit.messages.encode(answer)) < 3000
    same = scan.applied(before, scan.between(before, before, 3))
    assert same.host is before.host  # nothing to index again


def test_changes_of_another_inventory_are_refused() -> None:
    before = inventory([1, 2, 3], [], 1.0)
    answer = scan.between(before, before, 2)
    with pytest.raises(ValueError, match="not known"):
        scan.applied(None, answer)
    with pytest.raises(ValueError, match="another inventory"):
        scan.applied(inventory([1], [], 1.0), answer)
