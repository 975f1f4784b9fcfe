"""Who uses a tree of the store, also through mounts that are in no mount table any more."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import in_use, mounts
from tests.testbed import waiting

pytestmark = pytest.mark.real


@pytest.fixture
def tree(area: Path) -> Path:
    made = area / "tree"
    (made / "d").mkdir(parents=True)
    (made / "d" / "f").write_bytes(b"x" * 5000)
    (area / "other" / "d").mkdir(parents=True)
    (area / "other" / "d" / "f").write_bytes(b"x" * 5000)
    return made


@pytest.fixture
def shown(area: Path, tree: Path) -> Iterator[Path]:
    """Where the tree is mounted read-only, as a view is: the namespaces that other tests make at
    the same time let go of it (tests/testbed/apart.sh), instead of showing it as long as they are.
    """
    target = area / "views" / "a" / "data"
    target.mkdir(parents=True)
    clone = mounts.clone_tree(tree)
    mounts.attach(clone, target)
    os.close(clone)
    yield target
    while os.path.ismount(target):
        mounts.detach(target)


def users(tree: Path, shown: Path) -> list[in_use.Holder]:
    """A namespace that another test makes now has a copy of the mount, for a moment."""
    return in_use.of_tree(str(tree), [str(shown)])


_USES = {
    "file": "f = open('d/f')",
    "directory": "import os; f = os.open('d', os.O_RDONLY)",
    "mapping": "import mmap; f = open('d/f'); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()",
    "cwd": "import os; os.chdir('d')",
}


@pytest.mark.parametrize("detached", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("how", _USES)
def test_user_is_found(tree: Path, shown: Path, how: str, detached: bool) -> None:
    leave = "" if how == "cwd" else "import os; os.chdir('/');"
    code = f"{_USES[how]}; {leave} print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("; ;", ";")], cwd=shown, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if detached:
            mounts.detach(shown)
        assert process.pid in {each.pid for each in users(tree, shown)}
        waiting.until(
            lambda: {each.pid for each in users(tree, shown)} == {process.pid}, 10, "one user",
            detail=lambda: users(tree, shown),
        )  # fmt: skip
        assert users(tree.parent / "other", shown) == []
    finally:
        process.communicate(b"\n", timeout=waiting.limit(30))
    waiting.until(lambda: not users(tree, shown), 10, "nobody to use it")


def test_mount_elsewhere_is_a_user(area: Path, tree: Path, shown: Path) -> None:
    """As a volume of a pod is."""
    volume = area / "views" / "pod" / "data"  # where other tests let go of it, too
    volume.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(shown / "d"), str(volume)], check=True)
    assert str(volume) in "".join(each.how for each in users(tree, shown))
    subprocess.run(["umount", str(volume)], check=True)
    waiting.until(
        lambda: not users(tree, shown), 10, "nobody to use it", detail=lambda: users(tree, shown)
    )


def test_the_tree_itself_is_read_by_us_without_counting(tree: Path) -> None:
    with (tree / "d" / "f").open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=1):
        assert in_use.of_tree(str(tree)) == []
