"""``nodeagent image preheat --wait`` against an agent that answers what a test wants."""

import pytest

from kit import terminal
from tests.cache.test_commands import Clock, FakeAgent
from tests.nodeagent.test_main import run

REF = "r.e/a:v1"


def row(state: str, reason: str = "") -> dict[str, object]:
    return {
        "ref": REF, "state": state, "reason": reason, "pinned": True, "bytes_total": 10,
        "bytes_done": 0, "dropped_until": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("last", "code"), [(row("ready"), 0), (row("failed", "no such image in the registry"), 5)]
)
def test_it_says_what_it_waits_for_and_the_end_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: dict[str, object],
    code: int,
) -> None:
    monkeypatch.setattr(terminal, "time", Clock())
    fake = FakeAgent(monkeypatch)
    fake.answers["preheat"] = row("waiting", "outside of the windows")
    fake.stream = [*[row("waiting", "outside of the windows")] * 3, row("pulling"), last]
    assert run(monkeypatch, "image", "preheat", REF, "--wait") == code
    told = capsys.readouterr()
    assert told.err.count(f"{REF} is waiting: outside of the windows") == 1
    assert told.err.count("no such image") == (1 if code else 0)
