"""Matching blocks of bytes: limits, cuts, floods. Pure."""

import pytest

from volumes.audit.logs import follower, matcher, patterns

PATTERNS = patterns.expressions(patterns.built_in())
DEVICES = follower.device_names(("rbd", "nbd"))


def test_feed_counts_lines_above_the_limit() -> None:
    each = matcher.Matcher("x", PATTERNS, DEVICES, 1000, clock=lambda: 0.0)
    block = b"some line of no interest\n" * 100
    for _ in range(500):
        each.feed(block)
    assert each.counters.seen + each.counters.dropped == 50_000
    assert each.counters.seen == 1000


def test_feed_matches_a_line_cut_anywhere_once() -> None:
    line = b"rbd image rbd/csi-vol-1 is still being used\n"
    data = b"x\n" + line * 3 + b"y\n"
    for cut in range(1, 60):
        each = matcher.Matcher("x", PATTERNS, DEVICES, 10**6)
        rest = b""
        for at in range(0, len(data), cut):
            rest = each.feed(data[at : at + cut], rest)
        assert [h.count for h in each.flush()] == [3], cut
        assert each.counters.seen == 5


def test_flush_bounds_invented_names() -> None:
    each = matcher.Matcher("x", PATTERNS, DEVICES, 10**6)
    for number in range(1000):
        each.feed(f"rbd image rbd/i{number} is still being used\n".encode())
    assert len(list(each.flush())) == matcher.MOST_HITS
    assert each.counters.squeezed == 1000 - matcher.MOST_HITS


FORGED = "'fsck' found errors on device /dev/rbd5 but could not correct them"


@pytest.mark.parametrize("line", [
    f'I1125 12:00:00.1 9 prober.go:107] "Probe failed" pod="team-a/x" output="{FORGED}"',
    # klog writes a value of several lines so.
    f'I1125 12:00:00.1 9 prober.go:107] "Probe failed" pod="a/x" output=<\n\ta\n\t{FORGED}\n >',
    f'E1125 12:00:00.1 9 pod_workers.go:1301] "Error syncing pod" err="exec: \\"{FORGED}\\""',
    f'I1125 12:00:00.1 9 event.go:307] "Event" message="Liveness probe failed: {FORGED}"',
    f'level=error msg="StartContainer for \\"1\\" failed" error="exec: {FORGED}: not found"',
    f'E1125 12:00:00.1 9 pod_workers.go:1301] "{"a" * 131_100} {FORGED}"',
], ids=["probe", "lines", "command", "event", "containerd", "long"])  # fmt: skip
def test_what_a_pod_had_the_kubelet_say_is_no_hit(line: str) -> None:
    each = matcher.Matcher("x", [e for e in PATTERNS if e.source == "userspace"], DEVICES, 10**6)
    rest, data = b"", f"{line}\n".encode()
    for at in range(0, len(data), 65536):
        rest = each.feed(data[at : at + 65536], rest)
    assert list(each.flush()) == []
    each.feed(f"E1125 12:00:00.1 9 mount_linux.go:400] {FORGED}\n".encode(), rest)
    assert len(list(each.flush())) == 1
