"""Benchmarks of RBD datasets, on a real Ceph cluster of this machine.

image   of an ext4 and an XFS image: the fill of its copy against ``rbd export``, against ``cp -a``
        from the mounted image, and against the same reads that store nothing; CPU of it; cold
        reads of the complete copy, mounted as a view is, against a plain copy on the same disk
sparse  memory of the agent and of its children while it fills and verifies a small and a large
        image with the same files, which lie all over it

The kernel here has no RBD client: a loop device over rbd-fuse stands in for the mapped image.
Every program's time begins with its start; ours is a fork of the process that the agent has for
that. Ours ends when all is durable and checked; the peers' with their last write. Sizes:
``--size files=...``, ``image``, ``small``, ``large`` (bytes).
"""

from collections.abc import Mapping

from cache.store import image_copy
from tests.bench import harness, rbd_image, rbd_memory, reader
from tests.testbed import ceph

MIB, GIB = 2**20, 2**30
READERS = 4


def run(place: harness.Workplace) -> harness.Results:
    with place.room("cluster") as room, ceph.running(room / "ceph") as cluster:
        for kind in ("ext4", "xfs"):
            yield from _measure(place, cluster, kind)


def _measure(place: harness.Workplace, cluster: ceph.CephCluster, kind: str) -> harness.Results:
    size = place.size(2 * GIB, 320 * MIB, "image")
    number = place.size(10_000, 100, "files")
    with place.room(kind) as room:
        image = rbd_image.Image(cluster, room, kind, size, number)
        image.fill()  # the prepared process loads what fills need once in an agent's life
        cpu: list[float] = []

        def ours() -> float:
            seconds, used = image.fill()
            stored = image_copy.used(image.folder)
            cpu.append(used * GIB / stored)
            return stored / MIB / seconds

        def rate(seconds: float) -> float:
            return image_copy.used(image.folder) / MIB / seconds

        rates = place.in_turn(
            {
                "ours": ours,
                "export": lambda: rate(image.export()),
                "files": lambda: rate(image.files()),
                "reads": lambda: rate(image.reads()),
            }
        )
        for name, target in (("export", 5.0), ("files", 5.0), ("reads", 0.85)):
            found = harness.at_least(rates["ours"], rates[name], target, "MiB/s")
            yield f"{kind}_fill_vs_{name}", found
        yield f"{kind}_cpu", harness.at_most(cpu, 2.0, "s of CPU for each GiB stored")
        # What the last round of ``files`` copied: the same files on the same disk.
        copy = image.room / "copied"
        with image.shown() as view:
            listed, total = reader.files_below(view)
            read = reader.Reader(room, kind, listed, total)
            sides = {"view": read.cold(view, READERS), "copy": read.cold(copy, READERS)}
            shown, plain = place.in_turn(sides).values()
        yield f"{kind}_cold_vs_copy", harness.at_least(shown, plain, 0.95, "files/s")


GROUPS: Mapping[str, harness.Group] = {
    "image": run,
    "sparse": rbd_memory.sparse,
}
