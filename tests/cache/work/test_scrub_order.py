"""Which generation is scrubbed next, and what raises a doubt: the decisions."""

import asyncio
import dataclasses
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import kit.formats
from cache.settings import ScrubSettings
from cache.store import generations, health, soundness
from cache.store import watch as store_watch
from cache.store.health import DiskHealth, Sign
from cache.work import scrub_order
from cache.work.scrub_order import Candidate, Choice

EVERY = ScrubSettings(every=1000.0)
NOW = 10_000.0


def candidate(name: str, **changes: object) -> Candidate:
    plain = Candidate(name, priority=0, suspect=False, crashed=False, last=NOW)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_doubted_ones_come_first_then_those_of_a_crash_then_the_oldest() -> None:
    old, older = candidate("old", last=NOW - 1000), candidate("older", last=NOW - 5000)
    crashed = candidate("crashed", crashed=True)
    suspect, urgent = candidate("b", suspect=True), candidate("c", suspect=True, priority=5)
    found = [old, older, crashed, suspect, urgent]
    order = []
    while (chosen := scrub_order.choose(found, EVERY, NOW)) is not None:
        order.append(chosen)
        found = [each for each in found if each.name != chosen.name]
    assert order == [
        Choice("c", "suspect"), Choice("b", "suspect"), Choice("crashed", "crash"),
        Choice("older", "round"), Choice("old", "round"),
    ]  # fmt: skip


@given(st.integers(-(10**9), 10**9))
def test_a_clock_that_jumps_stops_no_scrub(jump: int) -> None:
    """A last scrub in the future counts as long ago; one in the past by its age."""
    chosen = scrub_order.choose([candidate("a", last=NOW + jump)], EVERY, NOW)
    assert (chosen is not None) == (jump > 0 or -jump >= EVERY.every)


def test_without_a_period_only_doubt_is_a_reason() -> None:
    never = ScrubSettings(every=0.0)
    found = [candidate("a", last=0.0), candidate("b", crashed=True)]
    assert scrub_order.choose(found, never, NOW) is None
    found.append(candidate("c", suspect=True))
    assert scrub_order.choose(found, never, NOW) == Choice("c", "suspect")


def test_pace() -> None:
    def rate(reason: scrub_order.Reason, *, filling: bool, earlier: str = "") -> int:
        chosen = Choice("a", reason, earlier)
        return scrub_order.pace(chosen, EVERY, filling=filling).bytes_per_second

    assert rate("suspect", filling=True) == 0
    assert rate("round", filling=False) == 20 * 2**20
    assert rate("crash", filling=False) == 200 * 2**20
    assert rate("crash", filling=True) == 20 * 2**20
    assert rate("suspect", filling=False, earlier="s1") == 200 * 2**20
    assert rate("suspect", filling=True, earlier="s1") == 20 * 2**20


_candidates = st.lists(
    st.builds(
        Candidate, st.sampled_from("abc"), st.integers(0, 2), st.booleans(), st.booleans(),
        st.integers(0, 9).map(lambda age: NOW - age * 500.0), st.sampled_from(["", "s1", "s2"]),
    ),
    max_size=9, unique_by=lambda each: (each.name, each.earlier),
)  # fmt: skip


@given(_candidates)
def test_every_generation_has_its_turn_and_a_current_one_before_what_shares_with_it(
    found: list[Candidate],
) -> None:
    """Each turn settles why it came; for the same reason no earlier one is before a current one,
    unless its last round is longer ago."""
    left = list(found)
    turns: list[tuple[Candidate, Choice]] = []
    while (chosen := scrub_order.choose(left, EVERY, NOW)) is not None:
        at = next(e for e in left if (e.name, e.earlier) == (chosen.name, chosen.earlier))
        left.remove(at)
        settled = {
            "suspect": dataclasses.replace(at, suspect=False),
            "crash": dataclasses.replace(at, crashed=False),
            "round": dataclasses.replace(at, last=NOW),
        }
        turns.append((at, chosen))
        left.append(settled[chosen.reason])
    assert all(not (e.suspect or e.crashed) for e in left)
    assert all(NOW - e.last < EVERY.every for e in left)
    order = [scrub_order.SUSPECT, scrub_order.CRASH, scrub_order.ROUND]
    assert [order.index(c.reason) for _, c in turns] == sorted(
        order.index(c.reason) for _, c in turns
    )
    for reason in order:
        those = [at for at, chosen in turns if chosen.reason == reason]
        for first, then in itertools.pairwise(those):
            assert not (first.earlier and not then.earlier) or (
                reason == scrub_order.ROUND and first.last < then.last
            )


# --- doubt


def test_a_disk_that_was_only_late_raises_no_doubt() -> None:
    late, failed = Sign("no answer", slow=True), Sign("it fails")
    seen = health.after(DiskHealth(), late, 1.0)
    assert not seen.usable and not seen.suspect
    seen = health.after(seen, failed, 2.0)
    assert seen.suspect
    assert health.after(seen, late, 3.0).suspect
    assert not health.after(seen, Sign(), 3.0 + seen.quiet).suspect


def test_generation_is_doubted_until_it_was_verified_after_the_last_trouble() -> None:
    async def check() -> None:
        known = soundness.Soundness()
        complete = dataclasses.replace(generations.new("a", "{}"), state="complete")
        assert not known.suspects(complete)
        known.count_trouble("it fails")
        known.count_trouble("it fails again")
        assert known.suspects(complete)
        assert known.suspects(dataclasses.replace(complete, verified=1))
        assert not known.suspects(dataclasses.replace(complete, verified=2))
        assert not known.suspects(generations.new("a", "{}"))  # nothing is stored

    asyncio.run(check())


def test_errors_that_ext4_counted_meanwhile_are_new() -> None:
    async def check() -> None:
        known = soundness.Soundness()
        assert known.new_errors(7) == 0  # the first look
        assert known.new_errors(7) == 0
        assert known.new_errors(9) == 2
        assert known.new_errors(0) == 0  # fsck has reset it
        assert known.new_errors(1) == 1

    asyncio.run(check())


def test_node_that_went_down_under_an_agent_is_noticed(tmp_path: Path) -> None:
    first = soundness.begun(soundness.Kept(), "boot-1")
    assert (first.crashes, first.clean) == (0, False)
    assert soundness.begun(first, "boot-1").crashes == 0  # only the agent was killed
    assert soundness.begun(first, "boot-2").crashes == 1
    assert soundness.begun(dataclasses.replace(first, clean=True), "boot-2").crashes == 0
    path = soundness.file_of(tmp_path)
    kit.formats.save(str(path), dataclasses.asdict(first), soundness.FORMAT)
    assert soundness.load(path) == first
    path.write_text("{ torn")
    assert isinstance(soundness.load(path), kit.formats.Damage)


def test_completed_requests_of_a_disk_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "dev/block/7:3"
    folder.mkdir(parents=True)
    (folder / "stat").write_text("   120 0 960 10 30 0 240 20 1 30 30\n")
    assert store_watch.completed(7 * 256 + 3, tmp_path) == 150
    assert store_watch.completed(7 * 256 + 4, tmp_path) is None
