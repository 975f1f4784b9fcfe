"""Real trees through a real agent: every oddity arrives in the store as it is in the source."""

from pathlib import Path

import pytest

from tests.testbed import trees
from tests.testbed.agent import Agent

pytestmark = pytest.mark.real


def test_odd_tree_is_copied_whole(area: Path, node: Agent) -> None:
    source = area / "source"
    source.mkdir()
    missing = trees.odd(source)
    node.add_dir("odd", source)
    node.start()
    shown = node.wait_state("odd", "complete")
    trees.assert_equal(source, node.view("odd"), without=missing)
    assert shown["files"]["skipped"] == len(missing)
    assert shown["files"]["failed"] == 0
    expected = trees.records(source, content=False)
    files = [r for p, r in expected.items() if r.kind in ("file", "link")]
    assert shown["files"]["done"] == shown["files"]["total"] == len(files)
    assert shown["bytes"]["done"] == shown["bytes"]["total"] == sum(r.size for r in files)


def test_holes_take_no_space(area: Path, node: Agent) -> None:
    source = area / "source"
    (source / "sparse").mkdir(parents=True)
    with (source / "sparse" / "big").open("wb") as stream:
        stream.truncate(2 * 2**30)
        stream.seek(2**30)
        stream.write(b"island")
    node.add_dir("sparse", source)
    node.start()
    node.wait_state("sparse", "complete")
    trees.assert_equal(source, node.view("sparse"))
    assert trees.allocated(node.tree("sparse")) < 2**20
