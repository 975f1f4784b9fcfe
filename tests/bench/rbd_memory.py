"""Memory of the agent and its children while they fill and verify block images of two sizes.

Both images have the same files, and those lie all over them: only what must be known of an image
grows with its size.
"""

import threading
from pathlib import Path
from typing import Any

from cache.store import image_copy
from tests.bench import agent, harness, rbd_image
from tests.testbed import ceph, waiting
from tests.testbed.agent import Agent

MIB, GIB = 2**20, 2**30
_DATASET = "image"
_LOOK_SECONDS = 0.05
_END_SECONDS = 200
# More than this, and something of 19 GiB more is kept in memory: their records alone are 83 kB.
_GROWTH_MIB = 16


class Memory(threading.Thread):
    """The most MiB that an agent, each of its children and all of them together have taken.

    The first two are the kernel's own maxima, the last one is what was seen in ``_LOOK_SECONDS``.
    """

    def __init__(self, nodeagent: Agent) -> None:
        super().__init__(daemon=True)
        self.own = self.child = self.all = 0.0
        self._agent = nodeagent
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        self.own = max(self.own, agent.peak_rss(self._agent.pid))
        for pid in agent.processes(self._agent)[1:]:
            self.child = max(self.child, agent.peak_rss(pid))
        self.all = max(self.all, agent.memory(self._agent))

    def __enter__(self) -> "Memory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


def sparse(place: harness.Workplace) -> harness.Results:
    sizes = place.size(GIB, 160 * MIB, "small"), place.size(20 * GIB, 192 * MIB, "large")
    files = place.size(5_000, 50, "files")
    most: dict[str, tuple[list[float], list[float]]] = {}
    with place.room("sparse") as room, ceph.running(room / "ceph") as cluster:
        images = [
            rbd_image.Image(cluster, room, "ext4", size, files, spread=True) for size in sizes
        ]
        for _ in range(place.rounds):
            for which, (image, size) in enumerate(zip(images, sizes, strict=True)):
                for name, mib in _measured(cluster, room, image.name, size).items():
                    most.setdefault(name, ([], []))[which].append(mib)
    for name, (small, large) in most.items():
        growth = [after - before for before, after in zip(small, large, strict=True)]
        note = " and ".join(
            f"{min(found):.0f} to {max(found):.0f} MiB for {size / GIB:g} GiB"
            for found, size in zip((small, large), sizes, strict=True)
        )
        yield f"memory_growth_{name}", harness.at_most(growth, _GROWTH_MIB, "MiB", note)


def _measured(cluster: ceph.CephCluster, room: Path, image: str, size: int) -> dict[str, float]:
    """MiB by what took them, and when."""
    with agent.running(room / "agent", _settings(cluster, room, image)) as nodeagent:
        with Memory(nodeagent) as fill:
            nodeagent.tell(_DATASET, "warm")
            nodeagent.wait_state(_DATASET, "complete", seconds=_END_SECONDS)
        with Memory(nodeagent) as verify:
            nodeagent.tell(_DATASET, "verify", {})
            waiting.until(lambda: _verified(nodeagent), _END_SECONDS, "the end of the verify")
        (generation,) = nodeagent.generations(_DATASET)
        _say_where(generation, size)
    return {
        "fill_process": fill.child,
        "fill_agent": fill.own,
        "fill_all": fill.all,
        "verify_process": verify.child,
        "verify_all": verify.all,
    }


def _settings(cluster: ceph.CephCluster, room: Path, image: str) -> dict[str, Any]:
    secret = room / "secret"
    secret.write_text(cluster.secret())
    source = {
        "kind": "rbd",
        "monitors": [cluster.monitor],
        "pool": "rbd",
        "image": image,
        "snapshot": rbd_image.SNAPSHOT,
        "user": "admin",
        "secret_file": str(secret),
    }
    dataset = {"name": _DATASET, "freshness": "snapshot", "warm": False, "source": source}
    return {"budget": "100GiB", "reserve": "1%", "datasets": [dataset]}


def _verified(nodeagent: Agent) -> bool:
    state = (nodeagent.dataset(_DATASET)["verify"] or {}).get("state")
    if state == "bad":
        raise RuntimeError("the copy is bad")
    return bool(state == "good")


def _say_where(generation: Path, size: int) -> None:
    """How much is stored, and that it lies all over the image."""
    with image_copy.existing_copy(generation) as held:
        stored = [chunk for chunk, state in held.states() if state is image_copy.State.STORED]
        reach = (stored[-1] - stored[0] + 1) / held.count
    used = image_copy.used(generation) / MIB
    harness.say(
        f"  {size / GIB:g} GiB: {len(stored)} chunks, {used:.0f} MiB, over {reach:.0%} of it"
    )
    if reach < 0.5:
        raise RuntimeError("its files do not lie all over the image")
