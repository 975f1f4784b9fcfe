"""What a PersistentVolume says, and which formats it forbids."""

import dataclasses
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from kube.objects import PersistentVolume, attachment_name
from volumes.guard import lease
from volumes.ledger import statement
from volumes.ledger.statement import ALLOW_FORMAT, HOLDS_DATA, Statement
from volumes.ledger.store import Entry, Knowledge

NOW = 1_800_000_000.0
DAY = 86400.0
VOLUME = PersistentVolume("pvc-1", "u-1", "7", NOW - 60, "d", "h", {})
ENTRY = Entry("rbd:f/3//a", type="ext4", uuid="e1", last_seen=NOW, node="n")


def _refusals(said: Statement, *, no_extents: bool = False) -> list[str]:
    return list(statement.refusals(said, no_extents=no_extents, outage=600.0, young=DAY))


def _with(**annotations: str) -> Statement:
    return statement.read(dataclasses.replace(VOLUME, annotations=annotations), "", NOW)


def test_any_mark_forbids_also_one_that_is_not_understood() -> None:
    mark = json.dumps({"type": "ext4", "uuid": "e1", "seen": "2026", "node": "n1"})
    for text in (mark, "", "{", "[]", "yes"):
        said = _with(**{HOLDS_DATA: text})
        assert said.knowledge is Knowledge.CONTENT
        for no_extents in (False, True):
            (reason,) = _refusals(said, no_extents=no_extents)
            assert "pvc-1 says that it holds data" in reason
    assert "ext4 e1, seen 2026 on n1" in _refusals(_with(**{HOLDS_DATA: mark}))[0]


def test_old_volume_needs_proof_or_an_operator() -> None:
    old = dataclasses.replace(VOLUME, created=NOW - 30 * DAY)
    said = statement.read(old, "", NOW)
    assert "720h ago" in _refusals(said)[0]
    assert ALLOW_FORMAT in _refusals(said)[0]
    assert _refusals(said, no_extents=True) == []
    for uid, refused in (("u-1", False), ("u-2", True), ("", True), ("yes", True)):
        allowed = dataclasses.replace(old, annotations={ALLOW_FORMAT: uid})
        assert bool(_refusals(statement.read(allowed, "", NOW))) is refused
    assert not _refusals(statement.read(VOLUME, "", NOW))
    # A clock that is a day behind makes an old volume look as if it came tomorrow.
    assert _refusals(statement.read(dataclasses.replace(VOLUME, created=NOW + DAY), "", NOW))


def test_mark_below_a_mapping_does_not_forbid_the_mappings_first_format() -> None:
    """luksFormat makes content on the volume, then mkfs is to run on the mapping."""
    mapping = "CRYPT-LUKS2-0123456789abcdef-luks-rbd-1"
    marked = dataclasses.replace(VOLUME, annotations={HOLDS_DATA: "{}"})
    assert statement.read(marked, "", NOW).knowledge is Knowledge.CONTENT
    assert statement.read(marked, mapping, NOW).knowledge is Knowledge.NONE
    both = {HOLDS_DATA: "{}", statement.annotation(mapping): "{}"}
    marked = dataclasses.replace(VOLUME, annotations=both)
    assert statement.read(marked, mapping, NOW).knowledge is Knowledge.CONTENT
    name = statement.annotation(mapping).partition("/")[2]
    assert len(name) <= 63  # of an annotation's name, as the API server has it


def test_mark_is_written_again_only_for_other_content_of_the_same_volume() -> None:
    mark = json.dumps({"type": "ext4", "uuid": "e1", "volume": ENTRY.volume})
    assert statement.is_stale(None, ENTRY)
    assert not statement.is_stale(mark, ENTRY)
    assert statement.is_stale(mark, dataclasses.replace(ENTRY, uuid="e2"))
    assert not statement.is_stale(mark, dataclasses.replace(ENTRY, volume="x", uuid="e2"))
    assert not statement.is_stale("by hand", ENTRY)


_said = st.builds(
    Statement,
    knowledge=st.sampled_from([k for k in Knowledge if k is not Knowledge.MAYBE]),
    age=st.sampled_from([-2 * DAY, -10.0, 0.0, DAY, DAY + 1, 300 * DAY]),
    allowed=st.booleans(),
    silent_for=st.sampled_from([0.0, 599.0, 600.0, 1e9]),
)


@given(_said, st.booleans())
def test_refusals_agree_with_the_written_rule(said: Statement, no_extents: bool) -> None:
    forbidden = said.knowledge is Knowledge.CONTENT
    if not no_extents:
        young = -300 <= said.age <= DAY
        forbidden |= said.knowledge is Knowledge.NONE and not young and not said.allowed
        forbidden |= said.knowledge is Knowledge.UNKNOWN and said.silent_for < 600
    assert bool(_refusals(said, no_extents=no_extents)) is forbidden


def test_lease_is_refused_whenever_its_testimony_forbids_it() -> None:
    """With evidence that is good in all else, and with random evidence."""
    from tests.volumes.guard.test_lease import GOOD

    choose = random.Random(1)
    for _ in range(5_000):
        said = Statement(
            choose.choice([Knowledge.NOT_ASKED, Knowledge.NONE, Knowledge.CONTENT,
                           Knowledge.UNKNOWN]),
            age=choose.choice([0.0, 2 * DAY]), allowed=choose.random() < 0.3,
            silent_for=choose.choice([0.0, 1e4]),
        )  # fmt: skip
        extents = choose.choice([Knowledge.NONE, Knowledge.NOT_ASKED])
        evidence = dataclasses.replace(GOOD, witness=said, extents=extents)
        refused = lease.refusals(evidence, lease.LeasePolicy())
        assert list(refused) == _refusals(said, no_extents=extents is Knowledge.NONE)


def test_attachment_is_named_as_kubelet_names_it() -> None:
    """sha256 of handle, driver and node without separators, as in csi_attacher.go."""
    assert attachment_name("rbd.csi.ceph.com", "0001-0009-rook", "node-1") == (
        "csi-09c7c49d777b855c2bbf5a38d96f415aa0d4c22d972503ec525b283918fbbe78"
    )
