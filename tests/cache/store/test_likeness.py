"""Whether the files of a source are those that were stored: every mixture of what is seen."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.store import likeness
from cache.store.identity import Match
from cache.store.likeness import Look
from cache.store.tree import entry_of
from tests.cache import passes

S, G, C, T, E, O = Look.SAME, Look.GONE, Look.CHANGED, Look.TOUCHED, Look.EQUAL, Look.OTHER  # noqa: E741


@pytest.mark.parametrize(
    ("looks", "match"),
    [
        ([], Match.SAME),  # nothing is stored, so nothing can be mixed
        ([S, S, S], Match.SAME),
        ([S, C, G, T], Match.SAME),  # changed in places, which the compare tells
        ([S, G, G, G], Match.SAME),
        ([E, E, E], Match.SAME),  # chmod -R, cp -al, or a true copy behind the same name
        ([E, C, G], Match.SAME),
        ([E, T], Match.SAME),
        ([O, O, O], Match.OTHER),
        ([E, E, O], Match.OTHER),  # other bytes under the same size and mtime
        ([C, C, C], Match.OTHER),
        ([C, G], Match.OTHER),
        ([T, T], Match.OTHER),  # nothing is stored but names: beginning anew costs nothing
        ([G, G, G], Match.UNPROVEN),  # not mounted yet: what is stored must stay
        ([G, G, C], Match.UNPROVEN),
    ],
)
def test_judgement(looks: list[Look], match: Match) -> None:
    assert likeness.judge(looks) is match


@pytest.mark.parametrize(
    ("change", "look"),
    [
        (lambda path: None, S),
        (lambda path: path.unlink(), G),
        (lambda path: path.write_bytes(b"longer than before"), C),
        (lambda path: os.utime(path, ns=(1, 1)), C),
        (lambda path: path.chmod(0o600), T),
        (lambda path: os.link(path, path.with_name("other")), T),
    ],
    ids=["nothing", "gone", "size", "mtime", "mode", "links"],
)
def test_status(tmp_path: Path, change: Callable[[Path], object], look: Look) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    kept = entry_of("file", path.stat())
    change(path)
    assert likeness.look_of(kept, path.stat() if path.exists() else None) is look


def change(generation: passes.Generation, what: Callable[[Path], None]) -> dict[str, str]:
    for path in sorted(generation.source.rglob("f*")):
        what(path)
    stamp = generation.common["stamp"]
    return likeness.compare(str(generation.folder), str(generation.source), stamp)


def other_bytes(path: Path) -> None:
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
    os.utime(path, ns=times)


def used_long_ago(path: Path) -> None:
    os.utime(path, ns=(10**18, path.stat().st_mtime_ns))


@pytest.mark.real
def test_files_of_a_source_tell_what_became_of_it(area: Path) -> None:
    made = passes.complete(area, 60)
    assert change(made, lambda path: None) == {"match": "SAME", "why": "", "refused": ""}
    assert change(made, lambda path: path.chmod(0o640))["match"] == "SAME"
    assert change(made, used_long_ago)["match"] == "SAME"
    # Their bytes were compared, which is no use of them.
    assert {path.stat().st_atime_ns for path in made.source.rglob("f*")} == {10**18}
    found = change(made, other_bytes)
    assert found["match"] == "OTHER"
    assert "has other bytes, and none of 32" in found["why"]
    shutil.rmtree(made.source / "d0")
    assert change(made, lambda path: path.unlink())["match"] == "UNPROVEN"
    # Nothing was listed yet, or the index is lost: the next pass lists the source anew.
    (made.folder / "index.sqlite").unlink()
    assert change(made, lambda path: None)["match"] == "SAME"
