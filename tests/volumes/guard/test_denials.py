"""Denials: who was refused, and what becomes a finding."""

import pytest
import structlog.testing

from tests.testbed import waiting
from volumes.guard import denials, kernel, pace, reports
from volumes.probe.examine import CONTENT, Kind, Verdict


def _denial(device: str = "rbd0", program: str = "mkfs.ext4", **more: object) -> denials.Denial:
    values: dict[str, object] = {
        "at": 1.0, "device": device, "volume": "v", "title": "t", "denied": True, "pid": 1,
        "program": program, "parent": "", "command": "", "cgroup": "", "pod": "", "container": "",
    }  # fmt: skip
    return denials.Denial(**{**values, **more})  # type: ignore[arg-type]


def _caller(minor: int) -> bytes:
    """A key of the kernel's map."""
    return kernel.Event(1.0, 9, 1, 0, (252, minor), True, "mkfs.ext4", "", ()).caller


def test_denial_followed_by_lease_is_not_reported() -> None:
    kept = denials.Denials()
    kept.add(_denial())
    kept.decided("rbd0", "blank_verified", ())
    assert kept.findings(2.0) == [] and kept.delayed == 1


def test_dry_run_says_what_it_could_not_check() -> None:
    kept = denials.Denials()
    kept.add(_denial(denied=False, early=True))
    kept.decided("rbd0", "has_fs ext4", ("it is not blank",))
    (unchecked,) = kept.findings(2.0)
    assert (unchecked.rule, unchecked.severity) == ("format-unchecked", "info")
    kept.add(_denial(denied=False, early=False, program="dd"))
    kept.decided("rbd0", "unreadable", ("it is not blank",))
    unchecked, let = kept.findings(2.0)
    assert (unchecked.rule, let.rule) == ("format-unchecked", "format-would-be-denied")
    assert "was NOT stopped" in let.advice and "unchanged" not in let.advice


def test_denial_says_that_the_volume_is_unchanged() -> None:
    kept = denials.Denials()
    kept.add(_denial())
    kept.decided("rbd0", "unreadable", ("it is not blank",))
    (found,) = kept.findings(2.0)
    assert found.rule == "format-denied" and "the volume is unchanged" in found.advice


def test_denials_are_bounded_and_expire() -> None:
    kept = denials.Denials()
    for number in range(1000):
        kept.add(_denial(f"rbd{number}", volume=f"v{number}"))
        kept.decided(f"rbd{number}", "x", ("no",))
        kept.add(_denial("rbd0", at=2.0, program=f"p{number}"))
    assert len(kept.last) == denials.KEPT
    assert len(kept.waiting["rbd0"]) <= denials.MOST_CALLERS + 1
    assert sum(each.count for each in kept.waiting["rbd0"].values()) >= 999
    assert len(kept.findings(2.0)) == denials.MOST_GROUPS
    assert kept.findings(2.0 + denials.FINDING_SECONDS + 1) == []


def test_denials_of_one_caller_are_one_with_a_count() -> None:
    kept = denials.Denials()
    for pid in range(5):
        kept.add(_denial(pid=pid))
    kept.decided("rbd0", "has_fs", ("no",))
    kept.more(_denial(), 1000)
    kept.add(_denial(pid=5))
    kept.decided("rbd0", "timeout", ("no",))
    (last,) = kept.last
    assert (last.pid, last.verdict, last.count) == (5, "timeout", 1006)
    (found,) = kept.findings(2.0)
    assert found.evidence["times"] == "1006"


def test_callers_of_one_device_do_not_push_out_those_of_others() -> None:
    """A program may take another name for each attempt."""
    kept = denials.Denials()
    kept.add(_denial("rbd1", volume="rbd1"))
    kept.decided("rbd1", "has_fs", ("no",))
    for number in range(2 * denials.KEPT):
        kept.add(_denial("rbd0", f"name{number}", cgroup=f"{number}"))
        if number % 8 == 0:
            kept.decided("rbd0", "has_fs", ("no",))
    kept.more(_denial("rbd0", "unseen"), 1000)
    assert len(kept.waiting["rbd0"]) <= denials.MOST_CALLERS + 1
    kept.decided("rbd0", "has_fs", ("no",))
    assert {each.device for each in kept.last} == {"rbd0", "rbd1"}
    assert sum(each.count for each in kept.last if each.device == "rbd0") == 2 * denials.KEPT + 1000
    found = kept.findings(2.0)
    assert len(found) == denials.MOST_CALLERS + 2
    assert sum(int(each.evidence["times"]) for each in found) == 2 * denials.KEPT + 1001


def test_where_all_are_too_many_the_largest_share_gives_room() -> None:
    kept = denials.Denials()
    kept.add(_denial("rbd999", volume="rbd999"))
    kept.decided("rbd999", "has_fs", ("no",))
    for number in range(denials.KEPT):
        name = f"rbd{number % 20}"
        kept.add(_denial(name, f"name{number}", volume=name))
        kept.decided(name, "has_fs", ("no",))
    assert "rbd999" in {each.device for each in kept.last}
    assert len(kept.findings(2.0)) == denials.MOST_GROUPS
    assert any("rbd999" in each.message for each in kept.findings(2.0))


async def test_windows_are_bounded_and_tell_each_caller_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "WINDOW_SECONDS", 0.05)
    more: list[tuple[str, int]] = []
    counts = {_caller(0): 7}

    def held_back(caller: bytes) -> int:
        counts[caller] = counts.get(caller, 0)
        return counts[caller]

    kept = reports.Windows(held_back, lambda denial, count: more.append((denial.device, count)))
    with structlog.testing.capture_logs() as lines:
        for number in range(2 * reports.MOST_WINDOWS):
            name = f"rbd{number}"
            if kept.joined(name) is None:
                kept.open(name, _denial(name), _caller(number))
        assert len(lines) == reports.MOST_WINDOWS + 1  # the others share one
        assert kept.joined("rbd0") == _denial("rbd0")
        counts[_caller(0)] += 100
        counts[_caller(2 * reports.MOST_WINDOWS - 1)] = 5  # one that shares a window
        counts[kernel.whole_device(_caller(1))] = 20  # of callers that were not told at all

        def again() -> list[int]:
            return sorted(each["times"] for each in lines if each["event"].endswith("again"))

        await waiting.until_async(lambda: len(again()) >= 3, 5, "the ends of three windows")
        assert again() == [20, 108, reports.MOST_WINDOWS - 1 + 5]
        last = f"rbd{2 * reports.MOST_WINDOWS - 1}"
        assert {("rbd0", 107), ("rbd1", 20), (last, 5)} <= set(more)
        # Nothing followed in the next window: nobody is kept, and no timer runs.
        await waiting.until_async(lambda: not kept._open, 5, "the windows to end")
    kept.close()


async def test_callers_of_one_attempt_each_have_no_count_told_twice() -> None:
    counts = {_caller(0): 7}
    kept = reports.Windows(lambda caller: counts.get(caller, 0), lambda *_: None)
    assert kept._count(_caller(0)) == 7
    for number in range(1, 2 * reports.MOST_REMEMBERED):
        assert kept._count(_caller(number)) == 0
    counts[_caller(0)] = 9
    assert kept._count(_caller(0)) == 2


def _waits(kept: pace.Pace, verdict: Kind, now: float) -> list[float]:
    waits = []
    for _ in range(8):
        kept = kept.after((verdict, True, 0), now)
        waits.append(round(kept.wait(now), 6))
        now += waits[-1]
    return waits


def test_pace_slows_down_for_what_stays_the_same_and_begins_anew_for_a_change() -> None:
    assert pace.Pace().wait(0.0) == 0.0
    # The look at its attach, the one at the first denial, and further ones.
    assert _waits(pace.Pace(), Kind.HAS_FS, 0.0) == [0.3, 5, 10, 20, 40, 60, 60, 60]
    assert _waits(pace.Pace(), Kind.BLANK_VERIFIED, 0.0)[:3] == [0.3, 5, 10]
    kept = pace.Pace((Kind.HAS_FS, True, 0), 8, 1000.0)
    assert (kept.wait(now=1001.0), kept.wait(now=1060.0)) == (59.0, 0.0)
    assert kept.after((Kind.TIMEOUT, True, 0), 1001.0).wait(now=1001.0) == pytest.approx(0.3)
    assert kept.after((Kind.HAS_FS, False, 0), 1001.0).wait(now=1001.0) == pytest.approx(0.3)
    rested = 1000.0 + 3 * pace.LONGEST_SECONDS
    assert kept.after((Kind.HAS_FS, True, 0), rested).wait(rested) == pytest.approx(5.0)


def test_pace_while_a_process_formats_slows_down_and_begins_anew_at_its_end() -> None:
    """One that hangs has the device read no more often than another refusal. Its end is a look of
    its own."""
    kept = pace.Pace((Kind.BLANK_VERIFIED, True, 7), 8, 1000.0)
    assert kept.wait(now=1000.0) == 60.0
    assert kept.after((Kind.BLANK_VERIFIED, True, 0), 1005.0).wait(now=1005.0) == pytest.approx(0.3)


def test_pace_of_a_device_that_does_not_answer_is_quick() -> None:
    assert _waits(pace.Pace(), Kind.TIMEOUT, 0.0) == [0.3, 0.6, 1.2, 2.4, 4.8, 5, 5, 5]


@pytest.mark.parametrize("kind", Kind)
def test_no_denial_hands_out_the_command_that_permits_the_format(kind: Kind) -> None:
    kept = denials.Denials()
    kept.waiting["rbd0"] = {("x",): _denial(denied=True)}
    kept.decided("rbd0", str(Verdict(kind, type="ext4", uuid="u", where="x", errno=5)), ("why",))
    (found,) = kept.findings(2.0)
    assert found.rule == "format-denied"
    assert "allow-format" not in found.advice
    readable = kind in CONTENT | {Kind.UNKNOWN_CONTENT, Kind.AMBIVALENT}
    assert ("never allow the format" in found.advice) is readable
    assert "volume explain /dev/rbd0" in found.advice
