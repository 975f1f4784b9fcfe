"""When one node asks, and what that makes of a fleet."""

import email.utils
import itertools
import math
import random
from typing import Any

import pytest

from kube.settings import ThisNode
from preheat.registry import failure, schedule
from preheat.registry.failure import Kind, PullError
from preheat.settings import PreheatSettings

REF, OTHER = "r.e/a:1", "r.e/b:1"
START = 1_800_000_000.0
FLEET = {"nodes": 7500, "per_registry": 50}
GB = 10**9


def node(number: int = 0, refs: tuple[str, ...] = (REF,), **more: Any) -> schedule.Schedule:
    section = PreheatSettings.model_validate(more).at(ThisNode(name=f"node{number}"))
    made = schedule.Schedule(section, random.Random(number).random)
    made.want(dict.fromkeys(refs, False), START)
    return made


def lookup(each: schedule.Schedule, answered: float = 0.0, ref: str = REF) -> float:
    return each.lookup_at(ref, answered, fixed=False, failed=None)


def most_per_second(times: list[float]) -> int:
    seconds = [int(at) for at in times]
    return max(seconds.count(each) for each in set(seconds))


def test_look_ups_are_spread_over_the_nodes() -> None:
    """7,500 look-ups in 300 s are 25 a second on average; all at once would be 7,500."""
    times = [lookup(node(number)) for number in range(7500)]

    assert most_per_second(times) < 60
    assert START <= min(times) <= max(times) <= START + 300
    assert times[7] == lookup(node(7))


def test_pull_follows_its_look_up_in_the_same_spread() -> None:
    each = node(3)
    each.answered(REF, lookup(each))
    each.measured(REF, "sha256:1", GB, False, lookup(each))

    assert each.pull_at(REF, START, begun=False) == lookup(each)


def test_refreshes_are_spread_over_their_period_after_a_start_together() -> None:
    times = [lookup(node(number, refresh=3600), START + 1) for number in range(2000)]

    assert most_per_second(times) < 10
    assert START < min(times) < START + 60
    assert START + 3500 < max(times) < START + 1.2 * 3600


def test_refresh_comes_once_in_its_period() -> None:
    each = node(5, refresh=600)
    times = [START]
    for _ in range(100):
        times.append(lookup(each, times[-1]))
    gaps = [b - a for a, b in itertools.pairwise(times[1:])]

    assert 0.85 * 600 <= min(gaps) <= max(gaps) <= 1.15 * 600


@pytest.mark.parametrize("images", [1, 5])
def test_expected_nodes_at_a_registry_stay_within_the_fleets_number(images: int) -> None:
    """Each pull of 5 GB takes 50 s."""
    refs = tuple(f"r.e/a{number}:1" for number in range(images))
    spans: list[tuple[float, float]] = []
    for number in range(7500):
        each = node(number, refs, fleet=FLEET)
        for ref in refs:
            each.answered(ref, START)
            each.measured(ref, "sha256:1", 5 * GB, False, START)
        for ref in refs:
            at = each.pull_at(ref, START, begun=False)
            spans.append((at, at + 50))
    longest = max(end for _, end in spans) - START
    busy = 7500 * images * 50
    moments = [START + longest * part / 50 for part in range(50)]
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment in moments]

    assert busy / longest <= 50 * schedule.PULL_PART
    # Random, so some more at times: five times its standard deviation.
    assert max(at_once) <= 30 + 5 * math.sqrt(30)


def test_pulls_that_are_done_do_not_let_the_rest_come_early() -> None:
    each = node(1, (REF, OTHER), fleet=FLEET)
    for ref in (REF, OTHER):
        each.measured(ref, "sha256:1", 5 * GB, False, START)
    before = each.pull_at(OTHER, START, begun=False)
    each.measured(REF, "sha256:1", 0, True, START + 100)

    assert each.pull_at(OTHER, START, begun=False) == before


def test_pulls_of_a_size_that_nobody_knows_are_spread_as_large_ones() -> None:
    """While look-ups fail, the runtimes of the fleet try themselves: not all of them at once."""
    times = [node(k, fleet=FLEET).pull_at(REF, START, begun=False) for k in range(7500)]
    known = [node(k, fleet=FLEET) for k in range(7500)]
    for each in known:
        each.measured(REF, "sha256:1", 5 * GB, False, START)

    assert most_per_second(times) < 6
    assert max(times) > max(each.pull_at(REF, START, begun=False) for each in known)


def test_moved_tag_is_pulled_when_it_is_seen_if_refreshes_are_spread_enough() -> None:
    for refresh, waits in ((3600, False), (10, True)):
        each = node(1, refresh=refresh)
        each.measured(REF, "sha256:1", GB, False, START)
        each.measured(REF, "sha256:2", GB, False, START + 5000)
        at = each.pull_at(REF, START + 5000, begun=False)
        assert (at > START + 5000) == waits


def test_window_that_opens_starts_nobody_at_once() -> None:
    opening = START // 86400 * 86400 + 86400
    times = []
    for number in range(2000):
        each = node(number, windows=["00:00-06:00"])
        each.measured(REF, "sha256:1", GB, False, START)
        times.append(each.pull_at(REF, START, begun=number % 2 == 0))

    assert most_per_second(times) < 30
    assert opening <= min(times) <= max(times) <= opening + 300


def test_changed_settings_start_nobody_at_once() -> None:
    times = []
    for number in range(2000):
        each = node(number)
        each.anew(REF, START + 1000)
        times.append(lookup(each))

    assert most_per_second(times) < 30
    assert START + 1000 <= min(times) <= max(times) <= START + 1300


def test_operator_waits_for_no_turn() -> None:
    each = node(1)
    each.hurry(REF)

    assert lookup(each) <= START
    assert each.pull_at(REF, START, begun=False) == START


def test_operators_request_for_a_new_image_is_looked_up_at_once() -> None:
    """On the node already or not: its tag may have moved."""
    each = node(1)
    each.hurry(OTHER)
    each.want({REF: False, OTHER: False}, START)

    assert lookup(each, ref=OTHER) <= START
    assert lookup(each) > START


def down(each: schedule.Schedule, since: float, seconds: float) -> failure.PullFailure:
    """The last failed pull of a registry that does not answer."""
    at, tries, found = since, 0, None
    while found is None or at < since + seconds:
        tries += 1
        found = each.failed(REF, PullError(REF, Kind.NETWORK, "x"), tries, at, pull=True)
        at = found.retry_at or math.inf
    return found


def test_registry_that_returns_is_met_in_turn() -> None:
    """Those with half of the image too: the outage cut them all off."""
    times, back = [], START + 7200
    for number in range(500):
        each = node(number)
        each.measured(REF, "sha256:1", GB, False, START)
        failed = down(each, START + 3600, 3600)
        each.answered(REF, back)
        assert each.standing(REF, failed) is None
        times.append(each.pull_at(REF, back, begun=True))

    assert most_per_second(times) < 10
    assert back <= min(times) <= max(times) <= back + 300


def test_short_interruption_costs_no_turn() -> None:
    each = node(1)
    each.measured(REF, "sha256:1", GB, False, START)
    failed = each.failed(REF, PullError(REF, Kind.NETWORK, "x"), 1, START + 400, pull=True)
    each.answered(REF, START + 404)

    assert each.standing(REF, failed) == failed
    assert (failed.retry_at or 0) < START + 404
    assert each.pull_at(REF, START + 404, begun=False) == START + 404


def test_registry_that_asks_for_fewer_requests_rests_as_a_whole() -> None:
    each = node(1, (REF, OTHER, "else.where/c:1"), spread=0)
    each.failed(REF, PullError(REF, Kind.BUSY, "429", wait=60.0), 1, START)

    assert lookup(each, ref=OTHER) >= START + 60
    assert each.pull_at(OTHER, START, begun=False) >= START + 60
    assert lookup(each, ref="else.where/c:1") == START


def test_asked_wait_reads_both_forms() -> None:
    date = email.utils.formatdate(START + 90, usegmt=True)

    assert failure.asked_wait("60", START) == 60
    assert failure.asked_wait(date, START) == 90
    assert failure.asked_wait(email.utils.formatdate(START - 90, usegmt=True), START) == 0
    assert failure.asked_wait("9" * 400, START) == failure.asked_wait("86400", START) == 3600
    for text in ("", "soon", "-5", "１", "Fri, 99 Nov 2026 99:99:99 GMT"):
        assert failure.asked_wait(text, START) is None


def test_nodes_that_were_told_the_same_time_come_back_apart() -> None:
    error = PullError(REF, Kind.BUSY, "429", wait=60.0)
    times = [node(n).failed(REF, error, 1, START).retry_at or 0 for n in range(2000)]

    assert START + 60 <= min(times) <= max(times) <= START + 360
    assert most_per_second(times) < 30
