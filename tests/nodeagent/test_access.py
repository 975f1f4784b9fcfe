"""Host names and rates."""

import asyncio
from pathlib import Path

import pytest

import kit.files
from kit.room import Role
from nodeagent.api import access, reviews
from tests.testbed import waiting

ALICE = access.Caller("alice", Role.DANGEROUS, "alice")


@pytest.mark.parametrize(
    ("listen", "header", "admitted"),
    [
        ("10.0.0.1", "10.0.0.1:9471", True),
        ("10.0.0.1", "NODE.example", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "localhost", False),
        ("10.0.0.1", "", False),
        ("10.0.0.1", "evil.example:9471", False),
        ("0.0.0.0", "10.0.0.2:1", True),
        ("0.0.0.0", "[fd00::1]:1", True),
        ("0.0.0.0", "evil.example", False),
        ("::1", "[::1]:9470", True),
        ("127.0.0.1", "localhost:9470", True),
        ("127.0.0.1", "127.0.0.1@evil.example", False),
    ],
)
def test_hosts(listen: str, header: str, admitted: bool) -> None:
    assert access.Hosts(listen, ["node.example"]).admits(header) is admitted


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("?", "?"),
        ("127.0.0.1", "loopback"), ("127.9.9.9", "loopback"), ("::1", "loopback"),
        ("::ffff:127.0.0.2", "loopback"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"),
    ],
)  # fmt: skip
def test_a_host_counts_once_whatever_addresses_it_makes_up(peer: str, counted: str) -> None:
    assert reviews.place(peer) == counted


def test_rate_gives_a_burst_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rate = access.Rate(2.0, 3)
    assert [rate.of("a").take() for _ in range(4)] == [True, True, True, False]
    assert rate.of("b").take()
    now = 0.6
    assert [rate.of("a").take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [rate.of("a").take() for _ in range(4)] == [True, True, True, False]


async def test_record_of_calls_holds_no_secret(tmp_path: Path) -> None:
    calls = access.CallLog(tmp_path)
    writer = asyncio.create_task(calls.write())
    sent = {"reason": "see https://h.example/?sig=s3cretS3cret", "password": "s3cretS3cret", "n": 1}
    calls.note(ALICE, changed=True, path="/v1/x?token=s3cretS3cret", sent=sent)
    await calls.flush()
    writer.cancel()
    (entry,) = kit.files.last_entries(tmp_path / "api.log", 9)
    assert "s3cretS3cret" not in repr(entry)
    assert entry["sent"] == {"reason": "see https://h.example/?sig=***", "password": "***", "n": 1}


async def test_strangers_cannot_fill_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    calls, logged = access.CallLog(tmp_path), []
    monkeypatch.setattr(access.log, "info", lambda _, **entry: logged.append(entry))
    for number in range(1000):
        calls.note(access.Caller(f"{number}", None, f"unknown {number}"), changed=False)
    calls.note(ALICE, changed=True)
    assert len(logged) == access.REFUSED_AT_ONCE + 1
    now = 1 / access.REFUSED_PER_SECOND
    calls.note(access.Caller("later", None, "unknown"), changed=False)
    assert logged[-1] == {"who": "later", "skipped": 1000 - access.REFUSED_AT_ONCE}
    # In a day they must not push out what the kubelet keeps of a container's log, 5 x 10 MB.
    for _ in range(86_400):
        now += 1.0
        calls.note(access.Caller("stranger", None, "unknown"), changed=False)
    assert len(logged) < 20_000


async def test_calls_that_changed_nothing_push_no_change_out_of_the_record(tmp_path: Path) -> None:
    calls = access.CallLog(tmp_path)
    calls.note(ALICE, changed=True, path="/v1/datasets/a")
    reader = access.Caller("prometheus", Role.READ, "prometheus")
    for _ in range(10 * access.MOST_WAITING_LINES):
        calls.note(reader, changed=False)
    calls.note(ALICE, changed=True, path="/v1/datasets/b")
    writer = asyncio.create_task(calls.write())
    await calls.flush()
    writer.cancel()
    record = kit.files.last_entries(tmp_path / "api.log", 9)
    assert [(e["who"], e["path"]) for e in record] == [
        ("alice", "/v1/datasets/a"), ("alice", "/v1/datasets/b"),
    ]  # fmt: skip
    refused = kit.files.last_entries(tmp_path / "api-refused.log", 999)
    assert len(refused) < 2 * access.REFUSED_AT_ONCE


async def test_the_record_says_how_many_lines_it_lost(tmp_path: Path) -> None:
    calls = access.CallLog(tmp_path)
    for _ in range(access.MOST_WAITING_LINES + 7):
        calls.note(ALICE, changed=True)
    writer = asyncio.create_task(calls.write())
    await calls._lines.join()
    calls.note(ALICE, changed=True, path="after")
    await calls.flush()
    writer.cancel()
    assert kit.files.last_entries(tmp_path / "api.log", 1)[0]["lost"] == 7


async def test_a_record_that_takes_nothing_is_told_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "AGAIN_SECONDS", 0.01)
    told: list[str] = []
    (tmp_path / "api.log").mkdir()
    calls = access.CallLog(tmp_path, told.append)
    writer = asyncio.create_task(calls.write())
    for _ in range(3):
        calls.note(ALICE, changed=True)
    await calls.flush()
    assert "api.log: Is a directory" in told[-1]
    (tmp_path / "api.log").rmdir()
    await waiting.until_async(lambda: told[-1] == "", 10, "the record to go on")
    calls.note(ALICE, changed=True, path="after")
    await calls.flush()
    writer.cancel()
    first, last = kit.files.last_entries(tmp_path / "api.log", 9)
    assert (first["who"], first["not_recorded"]) == ("nodeagent", 3)
    assert last["path"] == "after"
