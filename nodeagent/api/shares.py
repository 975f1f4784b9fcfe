"""Which questions about unknown tokens the agent asks. Nothing here waits or knows a network.

Strangers can make up as many tokens as they like, and each costs the API server a question. So the
questions have shares. What one share uses up is not missing in another:

* ``good``: this very token was good within a day.
* ``owner``: the token says that it belongs to somebody who was admitted from this address within a
  day: a token that was rotated. It is a guess until the answer is there, so wrong ones cost.
* ``newcomer``: the first few questions of an address. Few addresses that ask all the time cannot
  use up this share, so a first login from somewhere else finds room.
* ``stranger``: all others.

A question whose answer admits somebody costs nothing of any rate.
"""

import base64
import collections
import functools
import ipaddress
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cachetools

from nodeagent.api import access, rotation

GOOD, OWNER, NEWCOMER, STRANGER = SHARES = ("good", "owner", "newcomer", "stranger")
MOST_AT_ONCE = 8  # questions of each share
REVIEWS_PER_SECOND, REVIEWS_AT_ONCE = 5.0, 25  # of each share but the good one
OWNERS_PER_SECOND, OWNERS_AT_ONCE = 1 / 60, 3  # of one owner at one address
NEWCOMERS_PER_SECOND, NEWCOMERS_AT_ONCE = 1 / 600, 2  # of one address
STRANGERS_PER_SECOND, STRANGERS_AT_ONCE = 1.0, 10  # of one address
GOOD_SECONDS = 86400.0  # for which it is remembered that a token was good, and whose it was
MOST_REMEMBERED = 1024
CLOCK_SECONDS = 300.0  # by which the clocks of this node and of the cluster may differ


def claims(token: str) -> dict[str, Any]:
    """What a JWT says of itself, true or not; {} for tokens of other kinds."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def expired(said: dict[str, Any], now: float) -> bool:
    """Whether a token says so of itself. Nobody is admitted by what he leaves out.

    ``now``: Unix seconds.
    """
    try:
        return now > float(said["exp"]) + CLOCK_SECONDS
    except (ArithmeticError, ValueError, LookupError, TypeError):
        return False


@functools.lru_cache(access.MOST_CALLERS)
def place(peer: str) -> str:
    """What limits count of an address: of IPv6 the /64, all of which one host may have."""
    try:
        found = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return "loopback"
    if found.version == 4:
        return str(found)
    return str(ipaddress.IPv6Network((found.packed, 64), strict=False))


@dataclass(frozen=True)
class Question:
    """``owner``: who the token says that it belongs to, at this place; None when it does not."""

    token: bytes  # its digest
    place: str
    owner: bytes | None


def question(token: bytes, peer: str, said: dict[str, Any]) -> Question:
    at, who = place(peer), [said.get("iss"), said.get("sub")]
    named = all(isinstance(each, str) for each in who)
    return Question(token, at, rotation.digest(json.dumps([at, *who])) if named else None)


class Shares:
    """``take`` before a question; ``end`` when it has ended, however it did."""

    def __init__(self) -> None:
        self._asking: collections.Counter[str] = collections.Counter()
        self._good: cachetools.TTLCache[bytes, None] = cachetools.TTLCache(
            MOST_REMEMBERED, GOOD_SECONDS, timer=time.monotonic
        )
        self._owners: cachetools.TTLCache[bytes, None] = cachetools.TTLCache(
            MOST_REMEMBERED, GOOD_SECONDS, timer=time.monotonic
        )
        self._of_all = access.Rate(REVIEWS_PER_SECOND, REVIEWS_AT_ONCE)
        self._of_one = {
            OWNER: access.Rate(OWNERS_PER_SECOND, OWNERS_AT_ONCE),
            NEWCOMER: access.Rate(NEWCOMERS_PER_SECOND, NEWCOMERS_AT_ONCE),
            STRANGER: access.Rate(STRANGERS_PER_SECOND, STRANGERS_AT_ONCE),
        }

    def take(self, asked: Question) -> str | None:
        """The share that the question is of; None when it may not be asked now."""
        if asked.token in self._good:
            if self._asking[GOOD] >= MOST_AT_ONCE:
                return None
            self._asking[GOOD] += 1
            return GOOD
        for share, one in self._choices(asked):
            rate = self._of_one[share]
            # Neither rate pays when the other one refuses.
            if self._asking[share] < MOST_AT_ONCE and rate.has(one) and self._of_all.admits(share):
                rate.admits(one)
                self._asking[share] += 1
                return share
        return None

    def _choices(self, asked: Question) -> Iterator[tuple[str, str]]:
        if asked.owner is not None and asked.owner in self._owners:
            yield OWNER, asked.owner.hex()
        yield NEWCOMER, asked.place
        yield STRANGER, asked.place

    def end(self, asked: Question, share: str, *, admitted: bool) -> None:
        self._asking[share] -= 1
        if not admitted:
            return
        self._good[asked.token] = None
        if asked.owner is not None:
            self._owners[asked.owner] = None
        if share != GOOD:
            one = dict(self._choices(asked))[share]
            self._of_one[share].give_back(one)
            self._of_all.give_back(share)
