"""What a new copy of a block image has in common with the copy of an earlier snapshot of it.

The cluster tells which objects differ between the two snapshots; all other chunks come from the
earlier copy: shared on the disk where its file system can (reflink), else copied and compared with
their checksums. So a new snapshot moves what was changed, and nothing else.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kit.errors
from cache.store import image_copy
from ceph import image
from ceph.protocol import SnapshotFacts

_UNKNOWN = image_copy.State.UNKNOWN


@dataclass(frozen=True)
class Common:
    """Chunks that need not be read from the source. ``shared``: they take no room of their own."""

    folder: Path
    chunks: tuple[int, ...]
    shared: bool


def find(
    folder: Path, snapshot: image.ImageSnapshot, held: image_copy.Chunks, beat: Callable[[], None]
) -> Common | None:
    """What the latest usable copy beside ``folder`` has in common with ``held``; None: nothing.

    A copy whose journal was replayed is left out: its blocks are not those of its snapshot. So is
    one whose snapshot was deleted: nobody knows what was changed since. SourceError.
    """
    for earlier, facts in _copies(folder, snapshot.facts):
        name = snapshot.name_of(facts.snap_id)
        if name is None:
            continue
        changed = set(image_copy.chunks_of(snapshot.changes(name, beat)))
        with image_copy.existing_copy(earlier, facts) as old:
            known = {chunk for chunk, state in old.states() if state is not _UNKNOWN}
            common = tuple(
                chunk
                for chunk, state in held.states()
                if state is _UNKNOWN
                and chunk not in changed
                and chunk in known
                and old.span(chunk) == held.span(chunk)
            )
            if common:
                return Common(earlier, common, held.shares(old, common[0]))
    return None


def take(held: image_copy.Chunks, common: Common) -> Iterator[str]:
    """Have them in ``held``, one at each step; the text says what is wrong with one, or is ''.

    A chunk that is bad or cannot be read in the earlier copy stays unknown. OSError when the disk
    is full or ``held`` cannot be written.
    """
    with image_copy.existing_copy(common.folder) as old:
        for chunk in common.chunks:
            try:
                good = held.take_from(old, chunk, share=common.shared)
                yield "" if good else f"chunk {chunk} of the earlier copy is bad; it is read again"
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                yield f"chunk {chunk} of the earlier copy cannot be read; the source is asked"


def _copies(folder: Path, mine: SnapshotFacts) -> list[tuple[Path, SnapshotFacts]]:
    """Copies of earlier snapshots of the same image beside ``folder``, the latest first."""
    found = []
    with contextlib.suppress(OSError):
        for each in folder.parent.iterdir():
            try:
                facts = image_copy.facts_of(each)
            except kit.errors.HostError:
                continue  # of a newer agent
            if (
                facts is not None
                and (facts.fsid, facts.pool_id, facts.image_id)
                == (mine.fsid, mine.pool_id, mine.image_id)
                and facts.snap_id < mine.snap_id
                and not image_copy.replayed(each)
            ):
                found.append((each, facts))
    return sorted(found, key=lambda each: -each[1].snap_id)
