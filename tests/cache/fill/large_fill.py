"""Fills of large files in a process of their own (see test_cephfs_large.py).

    large_fill.py killed|striped AREA SOURCE CEPH_CONF

A pass forks its workers, which load librados: they must not come from a process that has loaded it.
Standard input is the pipe from the agent: no command comes.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from cache.fill import fill as fill_pass
from cache.fill import protocol
from cache.store import extents
from ceph import native
from tests.cache import passes
from tests.cache.fill.test_fill import Fill
from tests.cache.store.test_large import known, records
from tests.testbed import trees

MIB = 2**20


class CephFill(Fill):
    def __init__(self, area: Path, source: Path, access: native.Access) -> None:
        self.generation = area / "generation"
        self.generation.mkdir(exist_ok=True)
        common = passes.common(self.generation, source)
        limits = dataclasses.replace(passes.LIMITS, budget=2**40, workers=2)
        more = {"immutable": True, "limits": limits, "native": access}
        self.run, self.decides = fill_pass.begin(protocol.FillTask(**common | more))
        self.run.start(self.decides)


def killed(begin: "Begin") -> None:
    fill = begin()
    snapshot = begin.source
    wanted = sum(
        extents.count_of(path.stat().st_size)
        for path in snapshot.rglob("*")
        if path.stat().st_size > 64 * MIB
    )
    assert fill.until(lambda: known(fill.generation) > wanted // 2) is None
    for member in fill.run.pool.members.values():
        os.kill(member.pid, 9)
    fill.stop()
    durable = durable_bytes(begin.area / "generation")
    again = begin()
    ended = again.end()
    assert (ended.result, ended.why) == ("complete", ""), ended
    copied = again.run.page.counted()[1]
    whole = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())
    say(f"copied {copied} of {whole} bytes after the kill, {durable} were durable")
    small = (snapshot / "small").stat().st_size  # committed before the kill, or not
    assert whole - durable - small <= copied <= whole - durable
    assert trees.records(begin.area / "generation/tree") == trees.records(snapshot)
    # The holes of one file are not objects: they are asked of the mount.
    assert again.decides.large.objects > 0
    again.stop()


def durable_bytes(generation: Path) -> int:
    """Those of the extents that are known; the last one of a file is short."""
    total = 0
    for path in records(generation):
        raw = path.read_bytes()
        size = json.loads(raw[: extents.HEADER_BYTES].rstrip(b"\0"))["size"]
        for extent, state in enumerate(raw[extents.HEADER_BYTES :: extents.RECORD_BYTES]):
            total += extents.span_of(size, extent)[1] if state else 0
    return total


def striped(begin: "Begin") -> None:
    fill, snapshot = begin(), begin.source
    ended = fill.end()
    assert (ended.result, ended.why) == ("complete", ""), ended
    assert trees.records(begin.area / "generation/tree") == trees.records(snapshot)
    sizes = [path.stat().st_size for path in snapshot.rglob("*") if path.is_file()]
    large_ones = sum(extents.count_of(size) for size in sizes if size > 64 * MIB)
    in_the_hole = 32 * MIB // extents.EXTENT_BYTES
    assert fill.decides.large.objects == large_ones - in_the_hole
    fill.stop()


def say(text: str) -> None:
    print(text, file=sys.stderr)


@dataclasses.dataclass
class Begin:
    area: Path
    source: Path
    access: native.Access

    def __call__(self) -> CephFill:
        return CephFill(self.area, self.source, self.access)


if __name__ == "__main__":
    which, area, source, conf = sys.argv[1:]
    access = native.Access(conf, "admin", "cephfs", "/large/.snap/v1")
    {"killed": killed, "striped": striped}[which](Begin(Path(area), Path(source), access))
