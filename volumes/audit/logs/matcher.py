"""Finds the lines that match a pattern, with a limit on the work per second. Pure: no I/O.

A block of bytes is searched for each pattern's anchor at the speed of the C library; regular
expressions run only on lines that contain one. Lines above the limit are counted and not read.
The log child uses this module, so it imports neither pydantic nor yaml.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kit.pause import Bucket

GROUPS = ("device", "image", "pod", "volume", "path", "pid")
_LONGEST_LINE = 4096
_LONGEST_PARTIAL = 1 << 16
_LONGEST_GROUP = 256
_LONGEST_TEXT = 1000
# What kubelet and the runtime say of containers quotes whoever made the pod: commands, paths, what
# a probe prints. None of it is about volumes.
_OF_CONTAINERS = re.compile(
    r"\b(?:prober|pod_workers|kuberuntime_\w+|remote_runtime|kubelet_pods|handlers)\.go:\d+\]|"
    r"\b(?:ExecSync|StartContainer|CreateContainer|RunPodSandbox|[Pp]robe failed)\b"
)
_OF_A_VALUE = "\t"  # klog writes a value of several lines so
# Different hits per flush: a flood of invented device names must not fill memory.
MOST_HITS = 200


@dataclass(frozen=True)
class Expression:
    """The part of a pattern that matching needs (patterns.yaml explains the fields)."""

    id: str
    source: str
    anchor: str
    regex: str


@dataclass
class Hit:
    """Equal lines since the last flush: same pattern, same groups."""

    pattern: str
    source: str
    text: str
    groups: dict[str, str]
    count: int = 1


@dataclass
class Counters:
    """Lines of one source. Invariant: every line read is either seen or dropped."""

    seen: int = 0
    dropped: int = 0  # above the limit
    lost: int = 0  # overwritten or truncated before they were read
    matched: int = 0
    squeezed: int = 0  # matched, but there were too many different hits at once


@dataclass
class Matcher:
    """The matcher of one source."""

    source: str
    expressions: Sequence[Expression]  # for this kind of source
    devices: str  # regex of the names of watched devices
    budget: int  # lines per second
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._anchors: dict[bytes, list[tuple[str, re.Pattern[str]]]] = {}  # pattern's id, regex
        for each in self.expressions:
            compiled = each.id, re.compile(each.regex)
            self._anchors.setdefault(each.anchor.encode(), []).append(compiled)
        self._devices = re.compile(self.devices)
        self._quotes = any(each.source == "userspace" for each in self.expressions)
        self._lines = Bucket(self.budget, self.budget, self.clock)
        self._hits: dict[tuple[str, ...], Hit] = {}

    def feed(self, block: bytes, begun: bytes = b"") -> bytes:
        """Match a block that follows ``begun``; returns the unfinished line at its end.

        The unfinished line belongs to the stream and not to the matcher: a source can have many
        files, and the end of one must not become the beginning of a line of another.
        """
        data = begun + block
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > _LONGEST_PARTIAL:  # no relevant line is so long
            rest = _OF_A_VALUE.encode()  # what follows of it has lost its beginning
            self.counters.lost += 1
        lines = data.count(b"\n", 0, end)
        if lines:
            self._take(data, end, lines)
        return rest

    def _take(self, data: bytes, end: int, lines: int) -> None:
        allowed = min(lines, int(self._lines.level))
        self._lines.take(allowed)
        if allowed < lines:
            head = data[:end].split(b"\n", allowed)
            data = b"\n".join(head[:allowed]) + b"\n"
            end = len(data) if allowed else 0
            self.counters.dropped += lines - allowed
        self.counters.seen += allowed
        if end:
            self._search(data[:end])

    def _search(self, data: bytes) -> None:
        done: set[tuple[int, str]] = set()
        for anchor, patterns in self._anchors.items():
            at = data.find(anchor)
            while at >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                text = data[begin : min(end, begin + _LONGEST_LINE)].decode("utf-8", "replace")
                # It may be the text of whoever made a pod.
                theirs = self._quotes and (
                    text.startswith(_OF_A_VALUE) or _OF_CONTAINERS.search(text) is not None
                )
                for id, regex in () if theirs else patterns:
                    if (begin, id) not in done:
                        done.add((begin, id))
                        self._match(id, regex, text)
                at = data.find(anchor, end)

    def _match(self, id: str, regex: re.Pattern[str], text: str) -> None:
        match = regex.search(text)
        if match is None:
            return
        found = {name.rstrip("2"): value for name, value in match.groupdict().items() if value}
        groups = {name: value[:_LONGEST_GROUP] for name, value in found.items() if name in GROUPS}
        if "device" in groups and not self._devices.fullmatch(groups["device"]):
            return  # a device that is not watched
        self.counters.matched += 1
        key = (id, *(groups.get(name, "") for name in GROUPS if name != "pid"))
        known = self._hits.get(key)
        if known is not None:
            known.count += 1
            known.text = text[:_LONGEST_TEXT]
        elif len(self._hits) < MOST_HITS:
            self._hits[key] = Hit(id, self.source, text[:_LONGEST_TEXT], groups)
        else:
            self.counters.squeezed += 1

    def flush(self) -> Iterator[Hit]:
        """The hits since the last flush."""
        hits, self._hits = self._hits, {}
        yield from hits.values()
