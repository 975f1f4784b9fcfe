"""Matching blocks of bytes: limits, cuts, floods. Pure."""

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
