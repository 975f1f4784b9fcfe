"""A source that was unmounted after it was reached: the directory beneath is not the dataset."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.fill import protocol
from linux import mounts
from tests.cache import passes
from tests.testbed import trees

pytestmark = pytest.mark.real


@pytest.fixture
def mounted(area: Path) -> Iterator[passes.Generation]:
    """Its source is a mount; the directory beneath is empty."""
    made = passes.Generation(area)
    trees.plain(area / "behind", 40)
    made.source.mkdir()
    made.folder.mkdir()
    mounts.mount(str(area / "behind"), made.source, None, mounts.MS_BIND)
    yield made
    if made.source.is_mount():
        mounts.detach(made.source)


def test_passes_refuse_the_directory_beneath(mounted: passes.Generation) -> None:
    fill = protocol.FillTask(**mounted.common)
    verify = protocol.VerifyTask(**mounted.common, against_source=False, reachable=True)
    assert passes.run("fill", fill).result == "complete"
    before = trees.records(mounted.tree)
    assert len(before) > 40
    mounts.detach(mounted.source)
    for end in (passes.run("fill", fill), passes.run("verify", verify)):
        assert (end.result, end.why) == ("failed", "the source is not the one that was reached")
    assert trees.records(mounted.tree) == before
