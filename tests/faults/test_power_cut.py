"""The power goes at any moment of all that a dataset goes through, and comes back.

Whatever the disk has then is right bytes under right names, the agent starts, nothing is left over.
CUTS: how many; the suite has 20, ``make test-faults`` 500. SEED: of all that is by chance.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from linux import mountinfo
from tests.cache.test_space import disk
from tests.faults.life import NAME, Life
from tests.faults.test_nth_call import Calls
from tests.testbed import grave, held, leftovers, power, trees, waiting
from tests.testbed.agent import Agent

CUTS = int(os.environ.get("CUTS", "20"))
SEED = int(os.environ.get("SEED", "1"))
FLAGS, KINDS = [power.LOG_FLUSHED, power.LOG_LOST], ["ext4", "xfs"]
AT_REST = 25  # cuts between two looks at what is left over
SIZE = 400 * 2**20

pytestmark = [pytest.mark.real, pytest.mark.timeout(240 + 4 * CUTS)]


def cut(life: Life, ssd: Path, flag: int) -> bool:
    """The power goes; what is left of the disk is mounted, and nobody uses it. Whether something
    was lost."""
    node = life.node
    # Not synced when the power goes, unless a pass syncs the disk at this very moment.
    bait, new = ssd / "bait", ssd / "bait.new"
    new.write_bytes(b"z" * 8192)
    new.rename(bait)
    power.cut(ssd, flag)
    node.kill()
    node.wait_for(lambda: not leftovers.processes(node.folder), 20, "its children to end")
    mounts = [m.target for m in mountinfo.read() if m.target.startswith(f"{node.views}/")]
    for target in reversed(mounts):
        subprocess.run(["umount", "-l", target], check=False, timeout=waiting.limit(30))
    power.remount(ssd, ssd.with_suffix(".img"))
    lost = not bait.exists() or bait.read_bytes() != b"z" * 8192
    bait.unlink(missing_ok=True)
    new.unlink(missing_ok=True)
    return lost


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("fstype", KINDS)
def test_power_cuts_leave_nothing_wrong(area: Path, node: Agent, fstype: str, flag: int) -> None:
    print(f"SEED={SEED}")
    life = Life(area, node, SEED + 2 * FLAGS.index(flag) + KINDS.index(fstype))
    cuts, lost = CUTS // len(FLAGS) // len(KINDS), 0
    with disk(area, fstype, SIZE) as ssd:
        node.put_store(ssd / "store")
        node.start()
        node.wait_state(NAME, "complete", seconds=60)
        for number in range(1, cuts + 1):
            act, began = life.next(), time.monotonic()
            seen_at_it = life.begin(act)
            time.sleep(life.random.uniform(0, 0.8) ** 2)  # anywhere in it
            met = sorted(set(life.running().values()))
            lost += cut(life, ssd, flag)
            with grave.wrong_bytes():
                assert not (wrong := life.wrong()), wrong
            node.start()
            node.wait_served(NAME, "source", "overlay", "store")
            assert life.shown()
            how = "" if seen_at_it else ", not seen at it"
            print(f"cut {number}: {act}{how}; {met}; {time.monotonic() - began:.1f} s", flush=True)
            if number % AT_REST == 0 or number == cuts:
                life.rest()
                life.go_on()
        node.end()
    assert lost > cuts // 2, "nothing was at risk"
    assert life.looked_at > 0


def test_without_syncfs_a_power_cut_leaves_wrong_bytes(
    area: Path, node: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the test above looks for is there when an agent does not sync."""
    life = Life(area, node, SEED)
    with disk(area, "ext4", SIZE) as ssd:
        Calls(area, ssd, monkeypatch).lie()
        node.put_store(ssd / "store")
        fill = held.Fill(node, 30)
        node.start()
        fill.wait()
        node.wait_for(lambda: node.dataset(NAME)["files"]["done"] > 20, 60, "some files")
        cut(life, ssd, power.LOG_FLUSHED)
        assert any("0 wrong bytes" in each for each in life.wrong())
        node.end()


def test_complete_dataset_survives_power_cut(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 400, mean=20_000)
    with disk(area, "ext4", 200 * 2**20) as ssd:
        node.put_store(ssd / "store")
        node.add_dir("a", source)
        node.start()
        # As soon as it is said to be complete, and not a moment later.
        node.wait_for(lambda: node.dataset("a")["state"] == "complete", 60, "a to be complete")
        power.cut(ssd, power.LOG_LOST)
        node.kill()
        subprocess.run(
            ["umount", "-l", str(node.view("a"))], check=False, timeout=waiting.limit(30)
        )
        power.remount(ssd, area / "ext4.img")
        trees.assert_equal(source, node.tree("a"))
        source.rename(area / "gone")  # nothing is needed of the source
        node.start()
        node.wait_state("a", "complete")
        trees.assert_equal(area / "gone", node.view("a"))
        node.end()
