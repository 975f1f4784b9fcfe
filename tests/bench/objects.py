"""The limit of a fill: list a snapshot and read every object, store nothing.

``python -m tests.bench.objects CONF ROOT`` prints {"files", "bytes"}.
"""

import json
import math
import multiprocessing
import os
import sys
from typing import Any

from ceph import native, objects
from ceph.protocol import Entry
from tests.testbed import waiting


def _read(number: int, processes: int, conf: str, root: str, answers: Any) -> None:
    access = native.Access(conf, "admin", "cephfs", root)
    listing, reader = native.Listing(access), objects.Reader(access)
    counted = [0, 0]

    def each(item: Entry, data: bytes | None) -> None:
        if data is not None:
            counted[0] += 1
            counted[1] += len(data)

    folders = [item.name for item in listing.entries([]) if isinstance(item, Entry)]
    for folder in sorted(folders)[number::processes]:
        items = [item for item in listing.entries([folder]) if isinstance(item, Entry)]
        reader.read(listing.location([folder], items[0].name), items, each, math.inf)
    answers.put(counted)


def main() -> None:
    processes = (os.cpu_count() or 1) + 1
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    crew = [
        context.Process(target=_read, args=(n, processes, *sys.argv[1:3], answers), daemon=True)
        for n in range(processes)
    ]
    for member in crew:
        member.start()
    counts = [answers.get(timeout=waiting.limit(120)) for _ in crew]
    total = {"files": sum(c[0] for c in counts), "bytes": sum(c[1] for c in counts)}
    print(json.dumps(total))


if __name__ == "__main__":
    main()
