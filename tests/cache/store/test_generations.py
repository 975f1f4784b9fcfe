"""Generation folders: figures of a killed fill, and the quarantine list."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
from cache.store import generations, index
from cache.store.tree import Entry

names = st.binary(min_size=1, max_size=40).filter(lambda b: b"\0" not in b and b"/" not in b)
files = st.lists(
    st.tuples(st.lists(names.map(os.fsdecode), max_size=3), names.map(os.fsdecode)), max_size=8
)


def generation(root: Path, name: str, *, state: str, used: int, indexed: int) -> None:
    folder = root / name / "g"
    fields = {"dataset": name, "identity": "{}", "state": state, "used": used}
    generations.save(str(folder), fields)
    known = index.Index.open(folder / index.NAME)
    known.add_root(Entry("", 0o40755, 0, 0, 0, 0, 1, 1, False))
    known.listed(index.ROOT, entries=1, files=1, size=1, stored=(1, 1, indexed), skipped=0)
    known.close()


def test_inventory_uses_the_index_of_a_killed_fill(tmp_path: Path) -> None:
    generation(tmp_path, "first", state="filling", used=0, indexed=10**9)
    generation(tmp_path, "again", state="filling", used=10**9, indexed=0)
    generation(tmp_path, "done", state="complete", used=5, indexed=10**9)
    found = generations.inventory(str(tmp_path))
    used = {Path(folder).parent.name: size for folder, size in found.items()}
    assert used["first"] >= 10**9
    assert used["again"] == 10**9
    assert used["done"] == 5


def test_generation_of_a_newer_agent_is_refused(tmp_path: Path) -> None:
    generations.save(str(tmp_path), {"dataset": "a", "identity": "{}", "format": 2})
    fields = generations.load(str(tmp_path))
    assert fields is not None
    with pytest.raises(kit.errors.HostError, match="newer agent wrote it"):
        generations.generation_of(fields)


def test_generation_ignores_fields_of_other_versions(tmp_path: Path) -> None:
    generations.save(
        str(tmp_path), {"dataset": "a", "identity": "{}", "state": "new", "later": 1, "files": 7}
    )
    fields = generations.load(str(tmp_path))
    assert fields is not None
    assert generations.generation_of(fields) == generations.Generation(
        dataset="a", identity="{}", files=7
    )


@given(files)
def test_quarantine_keeps_names_of_any_bytes(listed: list[tuple[list[str], str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generations.write_quarantined(folder, listed)
        assert generations.has_quarantined(name) == bool(listed)
        once = [each for at, each in enumerate(listed) if each not in listed[:at]]
        assert generations.read_quarantined(folder) == once


def test_quarantine_skips_a_torn_last_line(tmp_path: Path) -> None:
    (tmp_path / generations.QUARANTINE).write_text('[["d"], "good"]\n[["d"], "to')
    assert generations.read_quarantined(tmp_path) == [(["d"], "good")]


def test_by_directory_bounds_the_names_at_once() -> None:
    listed = [(["d"], f"f{n}") for n in range(2500)] + [([], "top")]
    grouped = list(generations.by_directory(listed))
    assert [len(found) for _, found in grouped] == [1000, 1000, 500, 1]
    assert grouped[-1] == ([], ["top"])
