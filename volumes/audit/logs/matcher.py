"""Matching: blocks of bytes in, hits out, with a bound on the work per second. Pure of any I/O.

A block is searched for each anchor at the C library's speed; only lines that contain one are
looked at by regular expressions. Lines above the budget are counted and not looked at.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

GROUPS = ("device", "image", "pod", "volume", "path", "pid")
LONGEST_LINE = 4096
LONGEST_PARTIAL = 1 << 16
# Different things per flush; a flood of made-up device names must not fill memory.
MOST_HITS = 200


@dataclass
class Hit:
    """Lines alike since the last flush: same pattern, same thing."""

    pattern: str
    source: str
    text: str
    groups: dict[str, str]
    count: int = 1


@dataclass
class Counters:
    """Invariant: every line that came is in exactly one of seen and dropped."""

    seen: int = 0
    dropped: int = 0  # above the budget
    lost: int = 0  # overwritten or cut away before they were read
    matched: int = 0
    squeezed: int = 0  # matched, but too many different things at once


@dataclass(frozen=True)
class _Compiled:
    id: str
    regex: re.Pattern[str]


@dataclass
class Sieve:
    """One source's matcher."""

    source: str
    patterns: list[dict[str, str]]  # of this kind of source: id, anchor, regex
    devices: str  # regex of watched device names
    budget: int  # lines per second
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._anchors: dict[bytes, list[_Compiled]] = {}
        for pattern in self.patterns:
            compiled = _Compiled(pattern["id"], re.compile(pattern["regex"]))
            self._anchors.setdefault(pattern["anchor"].encode(), []).append(compiled)
        self._devices = re.compile(self.devices)
        self._tokens = float(self.budget)
        self._last = self.clock()
        self._hits: dict[tuple[str, ...], Hit] = {}

    def feed(self, block: bytes, begun: bytes = b"") -> bytes:
        """Bytes as they were read, after ``begun``: what the same stream's last feed gave back.

        Gives back the line that is not finished yet. It is the stream's and not the sieve's: a
        source may have many files, and the tail of one must not begin a line of another.
        """
        data = begun + block
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > LONGEST_PARTIAL:  # no line that matters is so long
            rest = b""
            self.counters.lost += 1
        lines = data.count(b"\n", 0, end)
        if lines:
            self._take(data, end, lines)
        return rest

    def _take(self, data: bytes, end: int, lines: int) -> None:
        allowed = self._allow(lines)
        if allowed < lines:
            head = data[:end].split(b"\n", allowed)
            data = b"\n".join(head[:allowed]) + b"\n"
            end = len(data) if allowed else 0
            self.counters.dropped += lines - allowed
        self.counters.seen += allowed
        if end:
            self._search(data[:end])

    def _allow(self, lines: int) -> int:
        now = self.clock()
        self._tokens = min(float(self.budget), self._tokens + (now - self._last) * self.budget)
        self._last = now
        allowed = min(lines, int(self._tokens))
        self._tokens -= allowed
        return allowed

    def _search(self, data: bytes) -> None:
        done: set[tuple[int, str]] = set()
        for anchor, patterns in self._anchors.items():
            at = data.find(anchor)
            while at >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                text = data[begin : min(end, begin + LONGEST_LINE)].decode("utf-8", "replace")
                for pattern in patterns:
                    if (begin, pattern.id) not in done:
                        done.add((begin, pattern.id))
                        self._match(pattern, text)
                at = data.find(anchor, end)

    def _match(self, pattern: _Compiled, text: str) -> None:
        match = pattern.regex.search(text)
        if match is None:
            return
        found = {name.rstrip("2"): value for name, value in match.groupdict().items() if value}
        groups = {name: value[:256] for name, value in found.items() if name in GROUPS}
        if "device" in groups and not self._devices.fullmatch(groups["device"]):
            return  # somebody else's disk
        self.counters.matched += 1
        key = (pattern.id, *(groups.get(name, "") for name in GROUPS if name != "pid"))
        known = self._hits.get(key)
        if known is not None:
            known.count += 1
            known.text = text[:1000]
        elif len(self._hits) < MOST_HITS:
            self._hits[key] = Hit(pattern.id, self.source, text[:1000], groups)
        else:
            self.counters.squeezed += 1

    def flush(self) -> Iterator[Hit]:
        """What was found since the last time."""
        hits, self._hits = self._hits, {}
        yield from hits.values()
