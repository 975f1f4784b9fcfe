"""The cgroups of the tests' Kubernetes nodes: of each node one below the root of every hierarchy,
with those of its containers."""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testbed import leftovers

ROOT = Path("/sys/fs/cgroup")
NAME = "nodeagent-node-"  # and an id


def hierarchies() -> list[Path]:
    """The roots of all cgroup hierarchies: of v1 one for each controller."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [each for each in sorted(ROOT.iterdir()) if each.is_dir() and not each.is_symlink()]


@contextlib.contextmanager
def claimed(name: str, roots: Sequence[Path] = ()) -> Iterator[None]:
    """Make the cgroup ``name`` in every hierarchy, and hold it against ``clear`` of other
    runs: it may be empty for a while, and whose it is shows in no pid that all of them see."""
    first, *others = roots or hierarchies()
    while True:
        (first / name).mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(leftovers.locked(first / name))
                if not (first / name).exists():
                    continue  # somebody cleared it before it was locked
            except FileNotFoundError:
                continue
            for other in others:
                (other / name).mkdir(exist_ok=True)
            yield
            return


def clear(roots: Sequence[Path] = ()) -> None:
    """Remove cgroups of runs that have ended: nobody holds them, and no process is in them."""
    roots = roots or hierarchies()
    for name in {top.name for root in roots for top in root.glob(f"{NAME}*")}:
        with contextlib.suppress(BlockingIOError), contextlib.ExitStack() as stack:
            if (roots[0] / name).exists():
                stack.enter_context(leftovers.locked(roots[0] / name, fcntl.LOCK_NB))
            remove(name, roots)


def remove(name: str, roots: Sequence[Path] = ()) -> bool:
    """Whether nothing of the cgroup is left."""
    roots = roots or hierarchies()
    empty(name, roots)
    for top in (root / name for root in reversed(roots)):  # the one that is held comes last
        with contextlib.suppress(OSError):
            top.rmdir()
    return not any((root / name).exists() for root in roots)


def empty(name: str, roots: Sequence[Path] = ()) -> bool:
    """Remove the cgroups below it that have no process any more; whether none is left."""
    left = False
    for root in roots or hierarchies():
        folders = (each for each in (root / name).rglob("*") if each.is_dir())
        for folder in sorted(folders, reverse=True):
            try:
                folder.rmdir()
            except OSError:
                left = True
    return not left
