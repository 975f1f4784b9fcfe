"""``nodeagent dataset`` against an agent that answers what a test wants; output and exit codes."""

import json
from typing import Any

import pytest

from cache import commands
from kit import terminal
from nodeagent.commands import client
from tests.nodeagent.test_main import run


def dataset(**more: Any) -> dict[str, Any]:
    shown = {
        "name": "a", "state": "complete", "why": "", "view": "/v/a/data", "served_by": "store",
        "freshness": "frozen", "priority": 0, "warm": True,
        "source": {"kind": "dir", "path": "/s", "reachable": True, "read_by": "directory"},
        "files": {"total": 10, "done": 10, "failed": 0, "skipped": 0, "no_room": 0},
        "bytes": {"total": 1000, "done": 1000, "no_room": 0},
        "estimated": False, "phase": "", "rate": {"files": 0.0, "bytes": 0},
        "eta_seconds": None, "store_bytes": 4096, "refreshes": 0, "verify": None,
        "completed": 1.0, "notes": [], "scrub": {"state": ""},
    }  # fmt: skip
    return shown | more


class FakeAgent:
    """Stands in for the API; the real one is met in tests/e2e."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        self.stream: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []
        agent = self

        async def call(_: Any, method: str, path: str, body: Any = None, **query: Any) -> Any:
            agent.asked.append((method, path, body))
            answer = agent.answers[path.rpartition("/")[2]]
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def lines(_: Any, path: str) -> Any:
            for line in agent.stream:
                yield line

        monkeypatch.setattr(client.Client, "call", call)
        monkeypatch.setattr(client.Client, "lines", lines)
        monkeypatch.setenv("NODEAGENT_API", "http://127.0.0.1:1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    return FakeAgent(monkeypatch)


@pytest.mark.parametrize(
    ("state", "why", "code"),
    [
        ("complete", "", 0),
        ("partial", "no room for 5 files, 500 B", 10),
        ("cancelled", "", 11),
        ("removed", "", 11),
        ("evicted", "", 11),
    ],
)
def test_warm_wait_exits_by_outcome(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: FakeAgent,
    state: str,
    why: str,
    code: int,
) -> None:
    fake.answers["warm"] = dataset(state="filling")
    fake.stream = [dataset(state="filling", phase="filling"), dataset(state=state, why=why)]
    assert run(monkeypatch, "dataset", "warm", "a", "--wait") == code
    said = capsys.readouterr()
    if code:
        assert said.err.splitlines()[-1].startswith("nodeagent: ")
        assert why in said.err
    else:
        assert "a is complete: 10 files, read at /v/a/data" in said.out


class Clock:
    """Stands in for ``time`` in the commands: each look at it is ten seconds later."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 10
        return self.now

    def time(self) -> float:
        return self.now


def pass_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(commands, "time", clock)
    monkeypatch.setattr(terminal, "time", clock)


HANGS = "dataset a: no monitor answers"
UPDATE = {
    "generation": "b", "snapshot": "s2", "state": "new", "why": "",
    "files": {"total": 0, "done": 0}, "bytes": {"total": 0, "done": 0},
}  # fmt: skip
# What stays as it is for ever: the command, the dataset, what is said of it, and the exit code.
STUCK: tuple[tuple[str, dict[str, Any], str, int], ...] = (
    ("warm", {"state": "waiting", "why": HANGS}, "a is waiting: no monitor answers", 5),
    ("warm", {"state": "failed", "why": "view /v: Permission denied"},
     "a is failed: view /v: Permission denied", 11),
    ("update", {"update": UPDATE | {"why": HANGS}}, "update of a waits: no monitor answers", 5),
    ("update", {"state": "waiting", "why": HANGS}, "a is waiting: no monitor answers", 5),
    ("update", {"state": "failed", "why": "the disk is gone"}, "a is failed: the disk is gone", 11),
    ("update", {"state": "partial", "why": "no room"}, "a is partial: no room", 10),
    ("rescan", {"update": UPDATE | {"why": HANGS}}, "update of a waits: no monitor answers", 5),
    ("rescan", {"state": "cancelled"}, "a is cancelled", 11),
    ("warm", {"state": "cold", "update": UPDATE | {"why": HANGS}},
     "update of a waits: no monitor answers", 5),
    ("warm", {"state": "cold", "update": UPDATE | {"why": "no room", "state": "partial"}},
     "update of a waits: no room", 10),
)  # fmt: skip


@pytest.mark.parametrize(("command", "stuck", "said", "code"), STUCK)
def test_waiting_says_why_and_ends_when_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: FakeAgent,
    command: str,
    stuck: dict[str, Any],
    said: str,
    code: int,
) -> None:
    pass_quickly(monkeypatch)
    shown = dataset(generation="a", snapshot="s1", **stuck)
    fake.answers[command] = shown
    fake.stream = [shown] * 20
    assert run(monkeypatch, "dataset", command, "a", "--wait") == code
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(said) == 1
    assert lines[-1].startswith("nodeagent: ")
    assert "no monitor answers" not in said or "no monitor answers" in lines[-1]
    assert len(lines) < 15, "it ended before the stream did"


def test_what_is_waited_for_is_said_when_it_changes_and_once_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    """While bytes come it does not end, whatever fails in between."""
    pass_quickly(monkeypatch)
    fake.answers["warm"] = dataset(state="filling")
    data = {"total": 1000, "no_room": 0}
    fake.stream = [
        dataset(state="failed", why=f"try {number}", bytes=data | {"done": number})
        for number in range(40)
    ]
    fake.stream += [dataset(state="paused"), dataset()]
    assert run(monkeypatch, "dataset", "warm", "a", "--wait") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("a is")]
    assert said[0] == "a is failed: try 0"
    assert 2 < len(said) < 30


HELD = dataset(state="waiting", why=HANGS)
SCANS = dataset(state="scanning")
WAITS_ON: dict[str, list[dict[str, Any]]] = {
    "a failure of a moment, long after another": [
        HELD, *[SCANS] * 20, dataset(state="failed", why="EIO"), SCANS,
    ],
    "it is verified, whatever its update waits for": [
        dataset(state="verifying", update=UPDATE | {"why": HANGS})
    ] * 20,
}  # fmt: skip


@pytest.mark.parametrize("stream", WAITS_ON.values(), ids=WAITS_ON)
def test_what_goes_on_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, fake: FakeAgent, stream: list[dict[str, Any]]
) -> None:
    pass_quickly(monkeypatch)
    fake.answers["warm"] = stream[0]
    fake.stream = [*stream, dataset()]
    assert run(monkeypatch, "dataset", "warm", "a", "--wait") == 0


def test_who_waits_for_its_turn_waits_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    pass_quickly(monkeypatch)
    queued = dataset(snapshot="s1", update=UPDATE | {"why": "waits for b (priority 5)"})
    fake.answers["update"] = queued
    fake.stream = [queued] * 20 + [dataset(snapshot="s2", update=None)]
    assert run(monkeypatch, "dataset", "update", "a", "--snapshot", "s2", "--wait") == 0
    said = capsys.readouterr().err.splitlines()
    assert said.count("update of a waits for b (priority 5)") == 1


def test_progress_without_terminal_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    fake.answers["warm"] = dataset(state="filling")
    fake.stream = [dataset(state=state) for state in ("scanning", "filling", "complete")]
    assert run(monkeypatch, "dataset", "warm", "a", "--wait") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["scanning", "filling", "complete"]
    assert all("\x1b" not in line for line in lines)


def test_rescan_shows_its_own_progress(
    monkeypatch: pytest.MonkeyPatch, fake: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    update = {
        "generation": "b", "snapshot": "", "state": "filling", "why": "",
        "files": {"total": 60, "done": 7}, "bytes": {"total": 4096, "done": 1024},
    }  # fmt: skip
    shown = dataset(
        generation="a", snapshot=None, phase="filling", rate={"files": 3.0, "bytes": 2048}
    )
    fake.answers = {"rescan": shown}
    fake.stream = [shown | {"update": update}, shown | {"update": None}]
    assert run(monkeypatch, "dataset", "rescan", "a", "--wait") == 11  # it did not serve
    told = capsys.readouterr().err
    assert "update filling 7/60 files, 1.0 KiB/4.0 KiB, 3 files/s, 2.0 KiB/s" in told
    assert "10/10" not in told.splitlines()[0]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("cold", "a is asked to fill; follow it with 'nodeagent dataset warm a --wait'"),
        ("waiting", "a is waiting; follow it with 'nodeagent dataset warm a --wait'"),
    ],
)
def test_warm_does_not_call_cold_what_was_asked_for(
    state: str, said: str, monkeypatch: pytest.MonkeyPatch, fake: FakeAgent,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake.answers = {"warm": dataset(state=state)}
    assert run(monkeypatch, "dataset", "warm", "a") == 0
    assert capsys.readouterr().out.strip() == said


VERIFIED = {"checked_files": 201, "bad": 1, "replaced": 1, "withdrawn": 0}


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        (
            VERIFIED | {"state": "good"},
            "good again: 201 files checked, 1 files or directories bad before, 1 replaced",
        ),
        (
            VERIFIED | {"state": "good", "bad": 0},
            "good: 201 files checked, 0 files or directories bad",
        ),
        (
            VERIFIED | {"state": "bad", "bad": 2},
            "bad: 201 files checked, 2 files or directories bad",
        ),
    ],
)
def test_verify_tells_what_was_bad_from_what_is(verify: dict[str, Any], said: str) -> None:
    assert commands._verify_text(verify).startswith(said)


def test_share_is_what_is_to_be_kept(
    monkeypatch: pytest.MonkeyPatch, fake: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers = {"a": dataset(state="partial", kept_share=0.142)}
    assert run(monkeypatch, "dataset", "show", "a") == 0
    assert "to keep    at most 14.2% of the files, always the same ones" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("list",), ("show", "a"), ("warm", "a"), ("warm", "a", "--wait"), ("pause", "a"),
        ("resume", "a"), ("cancel", "a"), ("verify", "a"), ("remove", "a"),
    ],
)  # fmt: skip
def test_commands_print_only_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: FakeAgent,
    words: tuple[str, ...],
) -> None:
    good = {"state": "good", "checked_files": 1, "bad": 0, "replaced": 0, "withdrawn": 0}
    shown = dataset(verify=good)
    fake.answers = dict.fromkeys(("a", "warm", "pause", "resume", "cancel", "verify"), shown)
    fake.answers["datasets"] = {"datasets": [shown], "orphans": ["old"]}
    if words[0] == "remove":
        fake.answers["a"] = {"removed": "a", "in_settings": True}
    fake.stream = [shown]
    assert run(monkeypatch, "dataset", *words, "--json") == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("state", "told"),
    [("partial", "no room    for 6 files, 600 B"), ("evicted", "evicted    6 files, 600 B")],
)
def test_show_tells_files_without_room_from_those_that_were_evicted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: FakeAgent,
    state: str,
    told: str,
) -> None:
    files = {"total": 10, "done": 4, "failed": 0, "skipped": 0, "no_room": 6}
    data = {"total": 1000, "done": 400, "no_room": 600}
    fake.answers["a"] = dataset(state=state, files=files, bytes=data)
    assert run(monkeypatch, "dataset", "show", "a") == 0
    assert told in capsys.readouterr().out.splitlines()


def test_failures_that_keep_an_update_from_serving_are_named(
    monkeypatch: pytest.MonkeyPatch, fake: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "1 entry could not be copied: logs/f (it changed)"
    update = {"generation": "frozen-b", "snapshot": "", "state": "partial", "why": why}
    fake.answers = {
        "a": dataset(update=update),
        "failures": {"failures": [{"path": "logs/f", "reason": "it changed"}], "next": None},
    }
    assert run(monkeypatch, "dataset", "show", "a", "--failures") == 0
    out = capsys.readouterr().out
    assert f"update     to frozen-b: partial ({why})" in out
    assert "failures   1, of the update to frozen-b\n  logs/f: it changed" in out


@pytest.mark.parametrize(("count", "lines"), [(100, 100), (101, 101), (5000, 101)])
def test_failures_are_counted_and_the_first_are_listed(
    count: int, lines: int, monkeypatch: pytest.MonkeyPatch, fake: FakeAgent,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without room each entry of a dataset is one."""
    rows = [{"path": f"d/{number}", "reason": "no room"} for number in range(count)]
    fake.answers = {"a": dataset(), "failures": {"failures": rows, "next": None}}
    assert run(monkeypatch, "dataset", "show", "a", "--failures") == 0
    told = capsys.readouterr().out.partition(f"failures   {count}\n")[2].splitlines()
    assert run(monkeypatch, "dataset", "show", "a", "--failures", "-o", "json") == 0
    whole = json.loads(capsys.readouterr().out)["failures"]

    assert len(told) == lines
    assert ("more; '-o json' prints all" in told[-1]) is (count > 100)
    assert len(whole) == count


def test_remote_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    body = {"thing": "view /v", "cause": "in use by pid 7", "remedy": "end it", "exit_code": 6}
    fake.answers["a"] = client.RemoteError(body)
    assert run(monkeypatch, "dataset", "remove", "a") == 6
    assert capsys.readouterr().err == "nodeagent: view /v: in use by pid 7; end it\n"


@pytest.mark.parametrize(
    ("verify", "code"),
    [
        ({"state": "good", "checked_files": 9, "bad": 0, "replaced": 0, "withdrawn": 0}, 0),
        ({"state": "good", "checked_files": 9, "bad": 2, "replaced": 2, "withdrawn": 0}, 0),
        ({"state": "bad", "checked_files": 9, "bad": 2, "replaced": 1, "withdrawn": 1}, 10),
        ({"state": "failed", "why": "the index is lost"}, 11),
        ({"state": "cancelled"}, 11),
    ],
)
def test_verify_exits_by_result(
    monkeypatch: pytest.MonkeyPatch, fake: FakeAgent, verify: dict[str, Any], code: int
) -> None:
    fake.answers["verify"] = dataset()
    fake.stream = [dataset(verify={"state": "running"}), dataset(verify=verify)]
    assert run(monkeypatch, "dataset", "verify", "a") == code


def test_list_shows_datasets_and_orphans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    fake.answers["datasets"] = {"datasets": [dataset(), dataset(name="b")], "orphans": ["old"]}
    assert run(monkeypatch, "dataset", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["NAME", "STATE"]
    assert [line.split()[0] for line in lines[1:3]] == ["a", "b"]
    assert "dataset remove old" in lines[3]


def test_wide_list_has_hits_with_their_bounds_and_readers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    sample = {"ratio": 0.573, "low": 0.53, "high": 0.6, "opens": 812}
    rows = [dataset(hits=sample, used_by="pid 7 (train)"), dataset(name="b", hits=None)]
    fake.answers["datasets"] = {"datasets": rows, "orphans": []}
    assert run(monkeypatch, "dataset", "list", "-o", "wide") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "SSD HITS" in lines[0]
    assert "57% (53% to 60%)" in lines[1]
    assert "pid 7 (train)" in lines[1]
    assert "not known" in lines[2]


def test_show_escapes_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: FakeAgent
) -> None:
    fake.answers["a"] = dataset()
    fake.answers["failures"] = {
        "failures": [{"path": "d/bad\nname\x1b[2J", "reason": "Permission denied"}], "next": None
    }  # fmt: skip
    assert run(monkeypatch, "dataset", "show", "a", "--failures") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.strip().startswith("d/bad")
    assert last.endswith("Permission denied")
    assert "\x1b" not in last
