"""How the index keeps entries that are to be copied: one chunk in two columns.

``entries`` is zlib of JSON with the fields that every agent knows. ``changes`` has ctime and change
version of each, behind the CRC-32 of ``entries``: an older agent that writes entries leaves it as
it is, and it counts no more.
"""

import array
import json
import zlib

from cache.store.tree import Entry

KEPT_AS_JSON = 9  # the fields of an entry that older agents know


def packed(entries: list[Entry]) -> tuple[int, int, int, bytes, bytes]:
    """Their number, bytes and SSD bytes, and the two columns that keep them."""
    packed = zlib.compress(json.dumps([entry[:KEPT_AS_JSON] for entry in entries]).encode(), 1)
    changes = array.array("Q", [zlib.crc32(packed)])
    for entry in entries:
        changes.extend((entry.ctime_ns % 2**64, entry.change))
    return (
        len(entries),
        sum(entry.size for entry in entries if entry.is_file),
        sum(entry.allocated for entry in entries),
        packed,
        zlib.compress(changes.tobytes(), 1),
    )


def unpacked(packed: bytes, changes: bytes | None) -> list[Entry]:
    """Without ctime and change version when an older agent, which knows none, wrote the entries."""
    entries = [Entry(*fields) for fields in json.loads(zlib.decompress(packed))]
    if changes is None:
        return entries
    numbers = array.array("Q", zlib.decompress(changes))
    if numbers[0] != zlib.crc32(packed):
        return entries
    return [
        entry._replace(ctime_ns=ctime - (ctime >> 63 << 64), change=change)
        for entry, ctime, change in zip(entries, numbers[1::2], numbers[2::2], strict=True)
    ]
