"""What changed between two inventories. Pure.

The scan child sends an inventory after every mount of the node. With thousands of mounts that are
megabytes, of which one line is new. So it sends ``Changes``: an inventory whose long lists hold
only what is new, and how much of the list before stays in front of that and behind it.

Invariant: ``applied(before, between(before, after)) == after``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from volumes.audit.inventory.model import Inventory

LISTS = ("devices", "related", "host", "spaces", "users", "users_of", "volumes")


@dataclass(frozen=True)
class Changes:
    """``number``: of this answer of a child. ``kept``: of each list, how many entries stay at its
    beginning and at its end; empty when nothing is known of an earlier inventory."""

    number: int
    inventory: Inventory
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def between(before: Inventory | None, after: Inventory, number: int) -> Changes:
    """``before``: what the receiver has; None: nothing."""
    if before is None:
        return Changes(number, after)
    kept: dict[str, tuple[int, int]] = {}
    new: dict[str, Any] = {}
    for name in LISTS:
        old, now = getattr(before, name), getattr(after, name)
        head, tail = _same(old, now)
        kept[name] = head, tail
        new[name] = now[head : len(now) - tail]
    return Changes(number, dataclasses.replace(after, **new), kept)


def applied(before: Inventory | None, changes: Changes) -> Inventory:
    """The whole inventory. ValueError when it needs a ``before`` that is missing or too short."""
    if not changes.kept:
        return changes.inventory
    if before is None:
        raise ValueError("changes of an inventory that is not known")
    whole: dict[str, Any] = {}
    for name, (head, tail) in changes.kept.items():
        old, new = getattr(before, name), getattr(changes.inventory, name)
        if head + tail > len(old):
            raise ValueError(f"changes of another inventory: {name} has {len(old)} entries")
        unchanged = not new and head + tail == len(old)
        whole[name] = old if unchanged else (*old[:head], *new, *old[len(old) - tail :])
    return dataclasses.replace(changes.inventory, **whole)


def _same(old: Sequence[Any], now: Sequence[Any]) -> tuple[int, int]:
    """How many entries are equal at the beginning, and of the others at the end."""
    most = min(len(old), len(now))
    head = 0
    while head < most and _equal(old[head], now[head]):
        head += 1
    tail = 0
    while tail < most - head and _equal(old[-1 - tail], now[-1 - tail]):
        tail += 1
    return head, tail


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
