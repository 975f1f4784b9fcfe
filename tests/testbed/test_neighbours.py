"""What another run on the machine made is left alone, and what a dead one left goes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.linux import scripts
from tests.testbed import blockdev, guest, image, leftovers, node_cgroups


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[list[Path]]:
    """Of cgroup hierarchies; directories behave like cgroups here."""
    made = [tmp_path / name for name in ("cpu", "memory")]
    for each in made:
        each.mkdir()
    yield made


def test_a_node_that_lives_keeps_its_cgroups_empty_as_they_are(roots: list[Path]) -> None:
    """Its processes may be in another pid namespace, and its cgroups empty for a while."""
    ours, dead = f"{node_cgroups.NAME}ours", f"{node_cgroups.NAME}dead"
    for root in roots:
        (root / dead / "pod").mkdir(parents=True)
    (roots[1] / f"{node_cgroups.NAME}half").mkdir()
    with node_cgroups.claimed(ours, roots):
        (roots[1] / ours / "pod").mkdir()
        node_cgroups.clear(roots)
        assert [sorted(os.listdir(root)) for root in roots] == [[ours], [ours]]
        assert (roots[1] / ours / "pod").is_dir()
    node_cgroups.clear(roots)
    assert [os.listdir(root) for root in roots] == [[], []]


def test_a_node_takes_away_its_own_cgroups(roots: list[Path]) -> None:
    name = f"{node_cgroups.NAME}ours"
    with node_cgroups.claimed(name, roots):
        (roots[0] / name / "file").touch()  # as a process that has not ended
        assert not node_cgroups.remove(name, roots)
        (roots[0] / name / "file").unlink()
        assert node_cgroups.remove(name, roots)


def test_two_runs_of_one_clone_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two containers they may have the same pid, and by chance the same id."""
    ids = iter((b"aa", b"aa", b"bb", b"aa"))
    monkeypatch.setattr(os, "urandom", lambda size: next(ids))
    build = tmp_path / "build"
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(leftovers.run_folder(build)) for _ in range(2))
        (one / "file").touch()
        assert one != two
        assert (one / "file").exists(), "it lives"
    assert os.listdir(build) == []


@pytest.mark.real
def test_a_device_that_is_somebody_elses_by_now_is_not_detached(area: Path) -> None:
    for name in ("ours", "theirs"):
        (area / name).mkdir()
        blockdev.blank(area / name / "image", blockdev.MiB)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(blockdev.loop(area / "theirs" / "image"))
        backing = Path("/sys/block", Path(device).name, "loop/backing_file")
        blockdev.detach(device, str(area / "ours"))
        assert backing.exists()
        blockdev.detach(device, str(area / "theirs"))
        assert not backing.exists()


@pytest.mark.real
@pytest.mark.parametrize("how", ["apart.sh", "holder.py"])
def test_a_copy_of_the_mounts_keeps_nothing_of_another_test(area: Path, how: str) -> None:
    ours, theirs = area / "ours", area / "a folder of theirs"
    with contextlib.ExitStack() as stack:
        for folder in (ours, theirs):
            folder.mkdir()
            blockdev.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
            stack.callback(blockdev.run, "umount", "-l", str(folder))
            (folder / "kept").mkdir()
            blockdev.run("mount", "-t", "bpf", "bpf", str(folder / "kept"))
        if how == "apart.sh":
            pid = stack.enter_context(scripts.running("pass", within=scripts.apart(ours / "below")))
        else:
            pid = stack.enter_context(_holder(ours / "root", ours / "below"))
        seen = Path(f"/proc/{pid}/mountinfo").read_text()
        assert f"{ours} " in seen and f"{ours}/kept " in seen
        assert "theirs" not in seen
        assert "theirs" in Path("/proc/self/mountinfo").read_text()


@contextlib.contextmanager
def _holder(root: Path, keep: Path) -> Iterator[int]:
    """A container with the host's root at /host."""
    root.mkdir()
    script = Path(leftovers.__file__).parents[1] / "volumes" / "audit" / "holder.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "container", str(root), "private", str(keep)],
        stdout=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_an_archive_that_a_run_uses_outlives_the_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the run lives: an import may be minutes after the build."""
    monkeypatch.setattr(image, "_buildah", lambda *words, check=True: "")
    made = [image.Image(f"{n:02}", "1", tmp_path / f"{n:02}.tar") for n in range(image.KEPT + 2)]
    for age, each in enumerate(made):
        each.archive.touch()
        os.utime(each.archive, (age, age))
    used, unused, *newer = made
    code = (
        "import sys, pathlib; from tests.testbed import image; "
        "image.keep(image.Image('00', '1', pathlib.Path(sys.argv[1]))); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(used.archive)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=image.REPO,
    ) as run:  # fmt: skip
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
        os.utime(used.archive, (0, 0))
        image._forget_old(tmp_path)
        assert used.archive.exists() and not unused.archive.exists()
        assert all(each.archive.exists() for each in newer)
        run.kill()
    image._forget_old(tmp_path)
    assert not used.archive.exists()


@pytest.mark.real
def test_an_address_of_a_run_that_is_killed_goes_by_itself() -> None:
    with guest.address() as ip:
        shown = blockdev.run("ip", "-4", "-o", "address", "show", "to", ip).stdout
        assert "forever" not in shown and "valid_lft" in shown
    assert blockdev.run("ip", "-4", "-o", "address", "show", "to", ip).stdout == ""
