"""Which files a fill copies: all, or those of the dataset's share (``cache.store.subset``)."""

from cache.fill import coordinator
from cache.store import disk, index, subset
from cache.store.tree import Entry


def positions_of(run: coordinator.Coordinator) -> subset.Positions:
    """Of the files of a generation whose directories are all listed."""
    store, dataset = run.generation.parents[1], run.generation.parent.name
    key = subset.key_of(disk.uuid_of(str(store)), dataset)
    return subset.Positions(key, subset.Amount(run.totals.bytes, run.totals.files))


class Kept:
    """Positions follow from the sum of all sizes, so a share counts when all is listed."""

    def __init__(self, run: coordinator.Coordinator, share: int) -> None:
        self._run = run
        self._share = share
        self._positions: subset.Positions | None = None
        self.short = False  # something that is to be kept did not fit

    @property
    def partly(self) -> bool:
        """Not all files are kept."""
        return self._share < subset.ALL

    def waits(self, *, listing: bool) -> bool:
        """Nothing is copied yet: positions follow from what all files have together."""
        return listing and self.partly

    def of(self, chunk: index.Chunk) -> list[Entry]:
        """The entries of a chunk that are copied."""
        if not self.partly:
            return chunk.entries
        if self._positions is None:
            self._positions = positions_of(self._run)
        path = self._run.index.path(chunk.directory)
        inside = subset.Amount(*self._run.index.inside(chunk.directory))
        at = self._positions.of(path, inside, chunk.entries)
        pairs = zip(chunk.entries, at, strict=True)
        return [entry for entry, position in pairs if position < self._share]
