"""Names that jobs opened and that should be fetched sooner."""

from cache.fill import index

MOST_WAITING = 256  # directories; older hints say less
MOST_NAMES = 64  # of one directory at a time


class HintQueue:
    def __init__(self) -> None:
        self._waiting: list[tuple[list[str], list[str]]] = []

    def take(self, paths: list[str]) -> None:
        """Paths relative to the root of the dataset."""
        by_directory: dict[str, list[str]] = {}
        for path in paths:
            directory, _, name = path.rpartition("/")
            by_directory.setdefault(directory, []).append(name)
        for directory, names in by_directory.items():
            self._waiting.append((directory.split("/") if directory else [], names[:MOST_NAMES]))
        del self._waiting[:-MOST_WAITING]

    def next(self, known: index.Index) -> tuple[int, list[str], list[str]] | None:
        """Directory, its path and names, the latest first; what is sealed needs no fetching."""
        while self._waiting:
            path, names = self._waiting.pop()
            number = known.find(path)
            if number is not None and known.directory(number).state != index.SEALED:
                return number, path, names
        return None
