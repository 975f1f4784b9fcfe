"""Where an image comes from when not from its registry: ``oci:/PATH`` or ``oci:DATASET/PATH``.

Pure. A dataset is one of the cache's on this node, by its name; its files are read as jobs read
them, through its view.
"""

import re
from pathlib import Path

SCHEME = "oci:"
_DATASET = re.compile(r"oci:(?P<dataset>[a-z0-9][a-z0-9-]{0,62})/(?P<path>[^/].*)")


def check(source: str) -> str:
    """``source`` as settings and requests write it. Raises ValueError."""
    inside = _DATASET.fullmatch(source)
    path = inside["path"] if inside else source.removeprefix(SCHEME)
    absolute = inside is not None or path.startswith("/")
    if not source.startswith(SCHEME) or not absolute or not source.isprintable():
        raise ValueError(f"{source[:100]!r} is not oci:/PATH or oci:DATASET/PATH")
    if ".." in path.split("/") or len(source) > 1024:
        raise ValueError(f"{source[:100]!r}: the path must not have '..', nor 1024 characters")
    return source


def path_of(source: str, datasets: Path) -> Path:
    """Where it is on this node. ``datasets``: the folder of the cache's views."""
    view = view_of(source, datasets)
    if view is None:
        return Path(source.removeprefix(SCHEME))
    return view / source.removeprefix(SCHEME).partition("/")[2]


def view_of(source: str, datasets: Path) -> Path | None:
    """The view of the dataset that it is in, a mount while the dataset is served; None: in none."""
    inside = _DATASET.fullmatch(source)
    return None if inside is None else datasets / inside["dataset"] / "data"
