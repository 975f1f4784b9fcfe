"""The limit of a fill of a block image: the same reads, nothing stored.

``python -m tests.bench.image_reads CONF IMAGE SNAPSHOT`` prints the bytes.
"""

import sys

from cache.store import image_copy
from ceph import image
from ceph.protocol import ImageAccess


def main() -> None:
    conf, name, snapshot = sys.argv[1:]
    with image.opened(ImageAccess(conf, "admin", "rbd", "", name, snapshot)) as opened:
        size = opened.facts.size
        chunks = sorted(set(image_copy.chunks_of(opened.extents(_nothing))))
        step = image_copy.CHUNK_BYTES
        wanted = ((each * step, min(step, size - each * step)) for each in chunks)
        print(sum(len(data) for _, data in opened.read(wanted, _nothing)))


def _nothing() -> None:
    """Nobody waits meanwhile."""


if __name__ == "__main__":
    main()
