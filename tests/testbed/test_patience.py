"""How long tests wait: by the measured speed of the machine, and for rounds of their own."""

import ast
import asyncio
import itertools
from pathlib import Path

import pytest

from tests.testbed import bare_timeouts, patience, waiting

TESTS = Path(__file__).parents[1]
SOON = 0.05


def test_factor_is_that_of_the_slower_part_and_has_bounds() -> None:
    quiet = patience.START_SECONDS, patience.FSYNC_SECONDS
    assert patience.factor([quiet[0] / 2] * 3, [0.0] * 3) == 1.0
    assert patience.factor([quiet[0] * 3] * 3, [quiet[1]] * 3) == 3.0
    assert patience.factor([quiet[0]] * 3, [quiet[1] * 2.5] * 3) == 2.5
    assert patience.factor([quiet[0], quiet[0], 60.0], [0.0, 0.0, 60.0]) == 1.0  # one pause
    assert patience.factor([60.0] * 3, [0.0] * 3) == patience.MOST


def test_factor_is_measured_once_and_can_be_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(patience.NAME, raising=False)
    measured = patience.ensure(tmp_path / "build")
    assert 1.0 <= measured <= patience.MOST
    assert patience.ensure(tmp_path / "gone") == measured
    assert not (tmp_path / "gone").exists()
    monkeypatch.setenv(patience.NAME, "20")
    assert patience.ensure(tmp_path) == 20.0
    assert waiting.limit(3.0) == 3.0 * waiting.HEADROOM * 20.0


def test_what_cannot_be_measured_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(patience.NAME, raising=False)
    (tmp_path / "file").touch()
    assert patience.ensure(tmp_path / "file" / "build") == 1.0
    assert "nothing could be measured" in capsys.readouterr().err


@pytest.mark.parametrize("told", ["0.5", "many", "inf", "nan"])
def test_a_wrong_factor_is_named(told: str) -> None:
    with pytest.raises(ValueError, match=f"TEST_PATIENCE is '{told}'; it must be a number of 1"):
        patience.check(told)


def test_a_pause_of_the_machine_counts_as_one_round() -> None:
    now = iter([0.0, 1.0, 20.0, 21.0, 22.0, 24.5])
    clock = waiting._Rounds(9.0, lambda: next(now))
    assert [clock.over() for _ in range(5)] == [False, False, False, False, True]
    now = iter([0.0, 1.0, 28.0])  # three times as long is too long, whatever it was
    clock = waiting._Rounds(9.0, lambda: next(now))
    assert [clock.over() for _ in range(2)] == [False, True]


def test_what_never_comes_is_named_with_how_things_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "limit", lambda seconds: seconds)
    asked = itertools.count()
    with pytest.raises(AssertionError, match=r"(?s)not within 0.1 s: the bus.*as ever"):
        waiting.until(lambda: next(asked) < 0, 0.1, "the bus", detail=lambda: "as ever")
    assert next(asked) > 1

    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    with pytest.raises(AssertionError, match="the train"):
        asyncio.run(waiting.until_async(hangs, 0.1, "the train"))
    with pytest.raises(TimeoutError):  # of the condition itself
        asyncio.run(waiting.until_async(lambda: asyncio.wait_for(hangs(), SOON), 60.0))


BARE = """
subprocess.run(command, timeout=30)
async with asyncio.timeout(5): pass
asyncio.wait_for(task, 1.5)
process.wait(10)
thread.join(10)
future.result(10)
http.client.HTTPConnection("::1", port, timeout=2.0)
kit.child.call(work, deadline=20)
def run(command, timeout=60.0): pass
async def ask(*words, timeout: float = 60.0): pass
"""
STRETCHED = """
subprocess.run(command, timeout=waiting.limit(30))
async with asyncio.timeout(SECONDS): pass
process.wait()
def run(command, timeout=waiting.limit(60)): pass
def listen(answers=5.0, *, timeout=None): pass
", ".join(words)
queue.get(timeout=0)
kit.child.call(work, deadline=0.5)
pace.wait(now=1000.0)
@pytest.mark.timeout(240)
def test(): pass
"""


def test_numbers_where_a_limit_belongs_are_found() -> None:
    assert len(list(bare_timeouts.numbers(BARE))) == len(BARE.split("\n")) - 2
    assert list(bare_timeouts.numbers(STRETCHED)) == []


def test_no_timeout_of_the_tests_is_bare() -> None:
    bare = [
        f"{file.relative_to(TESTS.parent)}:{number.lineno}: {ast.unparse(number)}"
        for file in sorted(TESTS.rglob("*.py"))
        for number in bare_timeouts.numbers(file.read_text())
    ]
    assert bare == [], "waiting.limit(SECONDS) stretches them on a slow machine"
