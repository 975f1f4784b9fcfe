"""kill -9 of the agent and its passes at any moment of all they do, under readers that check.

KILLS: how many; the suite has a few, ``make test-faults`` 200. SEED: of all that is by chance.
"""

import collections
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cache.test_follow import reading
from tests.cache.test_interrupted import parent
from tests.faults.life import NAME, Life
from tests.testbed import pod
from tests.testbed.agent import Agent

KILLS = int(os.environ.get("KILLS", "5"))
SEED = int(os.environ.get("SEED", "1"))
AT_REST = 20  # kills between two looks at what is left over
VICTIMS = ("agent", "agent and passes", "coordinator", "workers")

pytestmark = [pytest.mark.real, pytest.mark.timeout(240 + 5 * KILLS)]


def strike(life: Life, victim: str) -> collections.Counter[str]:
    """Kill; which passes were under way."""
    node, running = life.node, life.running()
    workers = [pid for pid in running if parent(pid) in running]
    chosen = {
        "coordinator": [pid for pid in running if pid not in workers],
        "workers": life.random.sample(workers, min(len(workers), 2)),
        "agent and passes": list(running),
    }.get(victim, [])
    met = collections.Counter(kind for pid, kind in running.items() if pid not in workers)
    if victim.startswith("agent"):
        node.kill()
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if victim.startswith("agent"):
        node.start()
    return met


def test_readers_see_one_snapshot_or_the_other_whatever_is_killed(area: Path, node: Agent) -> None:
    print(f"SEED={SEED}")
    life = Life(area, node, SEED)
    node.start()
    node.wait_state(NAME, "complete", seconds=60)
    met: collections.Counter[str] = collections.Counter()
    killed: collections.Counter[str] = collections.Counter()
    with pod.pod(area / "pod", node.views / NAME) as inside:
        roots: list[tuple[list[str], str]] = [([], str(node.view(NAME)))] * 2
        roots += [(inside.command(), inside.data)] * 2
        with reading(area, roots) as seen:
            for number in range(KILLS):
                act, began = life.next(), time.monotonic()
                seen_at_it = life.begin(act)
                time.sleep(life.random.uniform(0, 0.8) ** 2)  # anywhere in it
                victim = life.random.choice(VICTIMS)
                met += strike(life, victim)
                killed[victim] += 1
                how = "" if seen_at_it else ", not seen at it"
                took = time.monotonic() - began
                print(f"kill {number}: {act}{how}; {victim}; {took:.1f} s", flush=True)
                if number % AT_REST == AT_REST - 1:
                    life.rest()
                    life.go_on()
            life.rest()
    print(f"{KILLS} kills: {dict(killed)}; under way: {dict(met)}; not begun: {dict(life.missed)}")
    print(f"{sum(each['rounds'] for each in seen)} rounds, {sum(e['opens'] for e in seen)} opens")
    assert [each["troubles"] for each in seen] == [[]] * 4
    assert all(set(each["stamps"]) <= life.stamps and each["opens"] for each in seen)
    assert sum(life.missed.values()) < KILLS, "no pass was seen"
    if KILLS >= 100:
        assert sum(met.values()) >= KILLS // 2, "the kills met too little"
        assert set(met) == {"fill", "evict", "verify", "withdraw"}
