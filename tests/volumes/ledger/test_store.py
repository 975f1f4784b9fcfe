"""The ledger: what is on disk, what is damaged, and how two copies become one."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volumes.ledger import store
from volumes.ledger.store import Entry, Knowledge

VOLUME = "rbd:f/1//a"
SEEN = Entry(VOLUME).saw("ext4", "u1", "", 100.0, "n1")

_entries = st.builds(
    Entry, volume=st.just(VOLUME), type=st.sampled_from(["", "ext4", "xfs"]),
    uuid=st.sampled_from(["", "u1", "u2"]), last_seen=st.sampled_from([0.0, 1.0, 2.0]),
    permitted=st.sampled_from([0.0, 0.5, 1.5, 2.5]),
)  # fmt: skip


@given(_entries, _entries)
def test_merge_never_loses_content_or_permission(a: Entry, b: Entry) -> None:
    """One exception: content seen after a permission closes it."""
    merged = store.merge(a, b)
    if Knowledge.CONTENT in (a.knowledge, b.knowledge):
        assert merged.knowledge is Knowledge.CONTENT
    elif Knowledge.MAYBE in (a.knowledge, b.knowledge) and max(a.permitted, b.permitted) > max(
        a.last_seen, b.last_seen
    ):
        assert merged.knowledge is Knowledge.MAYBE


@given(_entries)
def test_parse_reverses_dump(one: Entry) -> None:
    assert store.parse(one.dump()) == one


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"version": "1"}', '{"version": 1}', '{"version": 99, "volume": "v"}',
    '{"version": 1, "volume": "v", "type": null, "uuid": ""}', "x" * 100_000,
])  # fmt: skip
def test_parse_rejects_what_is_not_an_entry(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        store.parse(text)


def test_saw_keeps_previous_content() -> None:
    new = SEEN.permit("me", 150.0).saw("xfs", "u2", "", 200.0, "n2")
    assert (new.type, new.permitted, new.first_seen) == ("xfs", 0.0, 200.0)
    assert new.previous == ("ext4 u1 until 100",)


def test_put_survives_restart(tmp_path: Path) -> None:
    first = store.LedgerStore(tmp_path)
    first.load()
    assert first.knowledge(VOLUME) is Knowledge.NONE
    first.put(SEEN)
    again = store.LedgerStore(tmp_path)
    again.load()
    assert again.get(VOLUME) == SEEN and again.knowledge(VOLUME) is Knowledge.CONTENT


def test_damaged_file_makes_only_its_volume_unknown(tmp_path: Path) -> None:
    first = store.LedgerStore(tmp_path)
    first.load()
    first.put(SEEN)
    first.put(dataclasses.replace(SEEN, volume="rbd:f/1//b"))
    (file,) = [f for f in tmp_path.glob("*.json") if VOLUME in f.read_text()]
    for damage in (b"", b"{", b"\xff\xfe", b"{}"):
        file.write_bytes(damage)
        again = store.LedgerStore(tmp_path)
        again.load()
        assert again.knowledge(VOLUME) is Knowledge.UNKNOWN
        assert again.knowledge("rbd:f/1//b") is Knowledge.CONTENT
        assert file.name in again.unreadable
    again.put(SEEN)
    assert again.knowledge(VOLUME) is Knowledge.CONTENT and not again.unreadable


def test_failed_put_changes_nothing(tmp_path: Path) -> None:
    ledger = store.LedgerStore(tmp_path / "ledger")
    ledger.load()
    ledger.folder.rmdir()
    with pytest.raises(OSError):
        ledger.put(SEEN)
    assert ledger.get(VOLUME) is None


def test_knowledge_without_volume_is_unknown(tmp_path: Path) -> None:
    assert store.LedgerStore(tmp_path).knowledge("") is Knowledge.UNKNOWN


def test_needs_ignores_recent_same_content(tmp_path: Path) -> None:
    ledger = store.LedgerStore(tmp_path)
    ledger.load()
    ledger.put(SEEN)
    assert not ledger.needs(SEEN.saw("ext4", "u1", "", 200.0, "n1"))
    assert ledger.needs(SEEN.saw("ext4", "u1", "", 100.0 + store.SEEN_AGAIN_SECONDS, "n1"))
    assert ledger.needs(SEEN.permit("me", 101.0))
    assert ledger.needs(SEEN.saw("ext4", "u2", "", 101.0, "n1"))


def test_prune_drops_oldest_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_ENTRIES", 3)
    ledger = store.LedgerStore(tmp_path)
    ledger.load()
    ledger.put(dataclasses.replace(SEEN, volume="nbd:x", last_seen=0.0))
    for number in range(5):
        ledger.put(dataclasses.replace(SEEN, volume=f"rbd:{number}", last_seen=float(number)))
    kept = [e.volume for e in ledger.entries()]
    assert kept == ["nbd:x", "rbd:3", "rbd:4"] and len(list(tmp_path.iterdir())) == 3


def test_entry_of_a_newer_agent_is_never_replaced(tmp_path: Path) -> None:
    known = store.LedgerStore(tmp_path)
    known.load()
    entry = store.Entry("rbd:a/1//b", type="ext4", uuid="u")
    known.put(entry)
    (file,) = tmp_path.glob("*.json")
    newer = json.dumps({**json.loads(file.read_text()), "version": 2, "type": {"now": "a dict"}})
    file.write_text(newer)

    known.load()
    assert known.knowledge(entry.volume) is store.Knowledge.UNKNOWN
    assert "newer agent" in known.unreadable[file.name]
    assert not known.needs(entry)
    with pytest.raises(OSError, match="newer agent"):
        known.put(entry)
    assert file.read_text() == newer


def test_unused_permission_leaves_the_one_before_it_open() -> None:
    """A pod's, say, which may have written; an operator's lease on top of it was not used."""
    first = Entry("v").permit("raw block volume on n1", 100.0)
    again = first.permit("operator: format it", 200.0).permit("operator: once more", 300.0)
    left = store.parse(again.unused().dump())
    assert left.knowledge is Knowledge.MAYBE and left.permitted_by == "raw block volume on n1"
    assert left.unused().knowledge is Knowledge.NONE
    assert again.saw("xfs", "u", "", 400.0, "n").permit("auto", 500.0).earlier_by == ""


def test_permissions_without_content_are_not_the_first_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_ENTRIES", 2)
    ledger = store.LedgerStore(tmp_path)
    ledger.put(Entry("rbd:a").saw("ext4", "u", "", 100.0, "n"))
    ledger.put(Entry("rbd:raw").permit("raw block volume on n", 200.0))
    ledger.put(Entry("rbd:b").saw("ext4", "u", "", 300.0, "n"))
    assert [each.volume for each in ledger.entries()] == ["rbd:b", "rbd:raw"]
