"""Which ranges of a block image are read from its copy: over every short image, and long ones."""

import itertools
import random

from cache.store import extents, ranges
from cache.store.ranges import Local
from linux.devmapper import SECTOR, Line

CHUNK = extents.EXTENT_BYTES // SECTOR
EVERY = [bytes(each) for n in range(1, 8) for each in itertools.product((0, 1, 2), repeat=n)]
SOURCE, COPY = "250:0", "7:3"


def from_copy(local: list[Local], chunks: int) -> list[bool]:
    found = [False] * chunks
    for each in local:
        found[each.start : each.end] = [True] * each.count
    return found


def table(local: list[Local], sectors: int, shift: int = 0) -> list[Line]:
    return ranges.lines(local, sectors, shift, COPY, SOURCE)


def test_what_is_not_known_is_never_read_from_the_copy() -> None:
    for states in EVERY:
        for most in (2, 3, 4, 5, 99):
            shown = from_copy(ranges.plan(states, most), len(states))
            assert not any(here and not state for here, state in zip(shown, states, strict=True))


def test_all_that_is_stored_is_read_from_the_copy_where_the_lines_are_enough() -> None:
    for states in EVERY:
        shown = from_copy(ranges.plan(states), len(states))
        assert all(here for here, state in zip(shown, states, strict=True) if state == 2)


def test_a_part_is_the_first_chunks_and_never_more_than_the_room() -> None:
    wanted, step = list(range(3, 60, 2)), extents.EXTENT_BYTES
    sizes = []
    for used in (0, 5 * step):
        for room in range(-step, 80 * step, step // 3):
            found = ranges.fitting(wanted, used, room)
            assert list(found) == wanted[: len(found)]
            assert len(found) * step <= max(0, room)
            sizes.append(len(found))
            # What fits then is all that is ever taken within that budget.
            taken = len(found) * step
            assert not ranges.fitting(wanted[len(found) :], used + taken, room - taken)
        assert sizes == sorted(sizes)
        assert sizes.pop() == len(wanted)
        sizes.clear()


def test_a_complete_image_is_one_range() -> None:
    for states in EVERY:
        whole = [ranges.Local(0, len(states))]
        assert (ranges.plan(states) == whole) == (0 not in states)


def test_lines_cover_the_device_once_and_show_the_same_place_of_the_image() -> None:
    for states in EVERY:
        for sectors, shift in (
            (len(states) * CHUNK, 0),
            (len(states) * CHUNK - 8, 0),  # the last chunk is short
            (len(states) * CHUNK - 2048 - 16, 2048),  # a partition
        ):
            local = ranges.plan(states)
            lines = table(local, sectors, shift)
            assert [line.start for line in lines] == [
                sum(before.length for before in lines[:n]) for n in range(len(lines))
            ]
            assert sum(line.length for line in lines) == sectors
            assert all(line.length > 0 and line.offset == line.start + shift for line in lines)
            shown = from_copy(local, len(states))
            for line in lines:
                chunks = {line.offset // CHUNK, (line.offset + line.length - 1) // CHUNK}
                assert all(shown[chunk] == (line.device == COPY) for chunk in chunks)


def test_a_table_tells_which_chunks_it_shows_from_the_copy() -> None:
    for states in EVERY:
        local = ranges.plan(states)
        assert ranges.shown_by(table(local, len(states) * CHUNK), COPY) == local


def test_lines_are_bounded_and_the_longest_ranges_win() -> None:
    chosen = random.Random(5)
    for _ in range(20):
        states = bytes(chosen.choice((0, 0, 1, 2)) for _ in range(3000))
        local = ranges.plan(states, 101)
        assert len(table(local, len(states) * CHUNK)) <= 101
        left = set(ranges.plan(states, 10**6)) - set(local)
        assert max(each.count for each in left) <= min(each.count for each in local)


def test_a_bad_chunk_goes_back_to_the_source_at_once() -> None:
    for states in EVERY:
        shown = ranges.plan(states)
        for chunk in range(len(states)):
            now = states[:chunk] + b"\0" + states[chunk + 1 :]
            was_shown = from_copy(shown, len(states))[chunk]
            # Where as much is to be gained as never is, only what is bad is a reason.
            assert ranges.is_worth(now, shown, shown) == was_shown
            if was_shown:
                assert ranges.is_worth(now, shown, ranges.plan(now))
                assert not from_copy(ranges.plan(now), len(states))[chunk]


def test_a_fill_changes_the_table_a_bounded_number_of_times() -> None:
    for chunks in (1, 7, 500, 20_000):
        states, changes = bytearray(chunks), 0
        shown: list[Local] = []
        for chunk in range(chunks):
            states[chunk] = 2
            if chunk % max(1, chunks // 1000) and chunk + 1 < chunks:
                continue
            wanted = ranges.plan(bytes(states))
            if ranges.is_worth(bytes(states), shown, wanted):
                shown, changes = wanted, changes + 1
        assert 1 <= changes <= 2 * ranges.RELOADS
        assert sum(each.count for each in shown) >= chunks - chunks // ranges.RELOADS
        assert not ranges.is_worth(bytes(states), shown, shown)
