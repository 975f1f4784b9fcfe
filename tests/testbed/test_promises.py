"""Every promise has a proof, and one that is taken out is missed."""

import dataclasses
from pathlib import Path

import pytest

from tests.testbed import gate, promises

ENTRIES = gate.lines(gate.FILE.read_text())
ALL = promises.read(promises.PAGE.read_text())


def test_each_promise_has_a_proof_that_is_there_and_in_its_set() -> None:
    assert len(ALL) > 40
    assert list(promises.complaints(ALL, ENTRIES)) == []


@pytest.mark.parametrize("promise", ALL, ids=lambda each: each.text[:60])
def test_a_proof_that_is_taken_out_of_the_gate_is_missed(promise: promises.Promise) -> None:
    without = [
        entry
        for entry in ENTRIES
        if not any(gate.names(entry, proof) or entry.startswith(proof) for proof in promise.soon)
    ]
    taken_out = len(without) < len(ENTRIES)
    assert bool(list(promises.complaints([promise], without))) is taken_out


def test_a_proof_that_is_renamed_left_out_or_forgotten_is_missed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_a.py"
    promise = promises.Promise("no byte is lost", ("tests/test_a.py::test_bytes",), ())

    def missed(text: str, of: promises.Promise = promise, *entries: str) -> list[str]:
        file.write_text(text)
        return list(promises.complaints([of], entries, tmp_path))

    plain = "import os\n\n\ndef test_bytes() -> None:\n    pass\n"
    real = plain.replace("def", "@pytest.mark.real\ndef")
    assert missed(plain) == []
    assert missed(real, promise, "tests/test_a.py") == []
    assert "is in the other set" in missed(real)[0]
    assert "is not there" in missed(plain.replace("test_bytes", "test_other"))[0]
    assert "is left out" in missed(plain.replace("def", "@pytest.mark.skip\ndef"))[0]
    assert "is left out" in missed("pytestmark = pytest.mark.xfail\n" + plain)[0]
    assert missed(plain, dataclasses.replace(promise, soon=())) == [
        "nothing proves: no byte is lost"
    ]
    file.unlink()
    assert "is not there" in next(promises.complaints([promise], [], tmp_path))
