"""A state directory that takes nothing more: what must be remembered is refused with its words."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import trees, waiting
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture
def small(area: Path, node: Agent) -> Iterator[Agent]:
    """An agent with a complete dataset and a state directory of 8 MiB."""
    trees.plain(area / "source", 10)
    node.add_dir("a", area / "source", warm=True)
    node.state.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "nodeagent-test", str(node.state)]
    subprocess.run(command, check=True, timeout=waiting.limit(10))
    node.start()
    node.wait_state("a", "complete")
    yield node


def rules(node: Agent) -> set[str]:
    return {each["rule"] for each in node.findings()}


def fill(folder: Path) -> Path:
    """Until not a byte is free."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(4096))
    return path


def test_a_full_state_directory_is_told_and_nothing_is_half_done(small: Agent) -> None:
    node = small
    ballast = fill(node.state)
    for asked in (lambda: node.tell("a", "warm"), lambda: node.remove("a")):
        with pytest.raises(ApiError) as refused:
            asked()
        assert refused.value.status == 507
        assert "datasets/a.json" in refused.value.error["thing"]
        assert refused.value.error["cause"] == "No space left on device"
        assert "free some space" in refused.value.error["remedy"]
    assert "Traceback" not in node.said()
    assert node.dataset("a")["state"] == "complete", "it was not removed"
    assert len(list(node.view("a").rglob("f*"))) == 10
    wanted = {"state-dir-full", "api-calls-not-recorded"}
    node.wait_for(lambda: wanted <= rules(node), 20, "the findings")
    ready = node.get("/readyz")
    assert ready["degraded"]
    assert any(str(node.state) in why and "full" in why for why in ready["reasons"]), ready
    ballast.unlink()
    node.wait_for(lambda: not wanted & rules(node), 40, "the findings to go")
    assert "not_recorded" in (node.state / "api.log").read_text()
    node.remove("a")
    assert node.stop() == 0
    node.start()
    assert node.dataset("a")["state"] == "removed"


def test_a_removal_that_was_cut_short_goes_on(area: Path, node: Agent) -> None:
    """Written first, so that the next agent ends what a killed one began."""
    trees.plain(area / "source", 10)
    node.add_dir("a", area / "source", warm=True)
    node.start()
    node.wait_state("a", "complete")
    node.kill()
    state = node.state / "datasets" / "a.json"
    state.write_text(state.read_text().replace('"removed": false', '"removed": true'))
    node.start()
    node.wait_for(lambda: not node.view("a").exists(), 20, "the view to go")
    node.wait_for(lambda: node.generations("a") == [], 20, "its store to go")
    assert node.dataset("a")["state"] == "removed"
