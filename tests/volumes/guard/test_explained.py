"""'nodeagent volume explain' in the accident itself: with an agent, without one, and for a device
that the agent never looks at."""

from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, waiting

pytestmark = pytest.mark.real

SIZE = 320 * blockdev.MiB


def test_explained_with_and_without_an_agent(where: cell.Cell, tmp_path: Path) -> None:
    image = blockdev.blank(tmp_path / "image", SIZE)
    other = blockdev.blank(tmp_path / "other", SIZE)
    blockdev.run("mkfs.ext4", "-q", str(image))
    with cell.agent(tmp_path / "agent", where) as agent:

        def explained(device: str, *words: str) -> str:
            done = agent.cli("volume", "explain", device, *words)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def seen(device: str) -> bool:
            return agent.guarded(device).get("reasons") not in (None, [])

        with blockdev.loop(image) as device:
            waiting.until(lambda: seen(device), 10, "the first look")
            assert "Next: Nothing: it holds what was last seen" in explained(device)
        blockdev.blank(image, SIZE)  # it reads as empty, as in the accident
        with blockdev.loop(image) as device:
            waiting.until(lambda: agent.guarded(device).get("missing"), 10, "the finding")
            step = explained(device).splitlines()[-1]
            assert "and held ext4" in step and "Do not format it" in step
            direct = explained(device, "--direct")
            assert "no agent answers" in direct and direct.splitlines()[-1] == step
            assert agent.stop() == 0
            assert explained(device).splitlines()[-1] == step  # by itself
        agent.settings["volumes"]["guard"]["names"] = ["none-of-these*"]
        agent.start()
        with blockdev.loop(other) as device:
            assert agent.cli("volume", "explain", device).returncode != 0  # nobody was refused
            assert where.run("dd", "if=/dev/zero", f"of={device}", "count=1").returncode == 1
            waiting.until(lambda: agent.get("/v1/volumes/guard")["denials"], 10, "the denial")
            page = explained(device)
            assert "because this device never gets an automatic lease" in page
            assert "volumes.guard.names" in page.splitlines()[-1]
