"""Benchmarks of the dataset cache, against what its users would use instead.

view    a complete view and one that still fills, against a plain copy on the same disk, bindfs
        and an rclone mount; readers open, fstat, read and close (reader.c), in random order
fill    warming from a snapshot of a real CephFS, against cp -a, rclone copy and reading alone;
        and the complete view against ceph-fuse
rest    memory and CPU of an agent that has nothing to do, and while jobs read
"""

from collections.abc import Mapping

from tests.bench import cache_fill, cache_rest, cache_view, harness

GROUPS: Mapping[str, harness.Group] = {
    "view": cache_view.run,
    "fill": cache_fill.run,
    "rest": cache_rest.run,
}
