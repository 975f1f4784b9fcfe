"""What the mount that jobs read can do, and what it cannot: the lines of docs/mount.md."""

import ctypes
import os
import select
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cache.views import view
from linux import mountinfo, syscalls
from tests.testbed import trees

pytestmark = pytest.mark.real

CHANGES = 0xFFF & ~0x31  # all of inotify but accesses, opens, and closes of what was read
UNMOUNTED, IGNORED, OF_A_DIRECTORY = 0x2000, 0x8000, 0x40000000


class Place:
    """A source on the real disk, and a store with all of it on another file system."""

    def __init__(self, area: Path, disk: Path) -> None:
        self.source, self.store, self.view = area / "source", disk / "store", disk / "view"
        self._scratch = disk / "scratch"
        for folder in (self.store, self.view, self._scratch):
            folder.mkdir()
        trees.plain(self.source, 30)
        subprocess.run(["cp", "-a", f"{self.source}/.", str(self.store)], check=True)
        self._stage = ""

    def show(self, stage: view.Stage) -> None:
        view.publish(
            str(self.view), stage, str(self.source), str(self.store), str(self._scratch),
            before=self._stage,
        )  # fmt: skip
        self._stage = stage


@pytest.fixture
def place(area: Path, memory: Path) -> Place:
    return Place(area, memory)


# Told to look, it says whether it has a working directory, and what it reads from there.
STANDS = """
import os, sys
for _ in sys.stdin:
    try:
        where = os.getcwd()
    except FileNotFoundError:
        where = "lost"
    print(where, len(os.listdir(".")), flush=True)
"""


def test_who_stands_in_the_view_loses_the_path_and_no_file(place: Place) -> None:
    place.show(view.Stage.OVERLAY)
    names = len(os.listdir(place.view / "d0"))
    with subprocess.Popen(
        [sys.executable, "-c", STANDS], cwd=place.view / "d0", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as job:  # fmt: skip
        assert job.stdin is not None and job.stdout is not None

        def look() -> str:
            assert job.stdin is not None and job.stdout is not None
            print(file=job.stdin, flush=True)
            return job.stdout.readline().strip()

        assert look() == f"{place.view}/d0 {names}"
        view.refresh(str(place.view))
        assert look() == f"{place.view}/d0 {names}", "a refresh is no swap"
        place.show(view.Stage.STORE)
        assert look() == f"lost {names}"


@pytest.mark.parametrize("stage", [view.Stage.SOURCE, view.Stage.OVERLAY, view.Stage.STORE])
def test_names_are_the_same_in_the_order_of_what_serves(place: Place, stage: view.Stage) -> None:
    place.show(stage)
    serves = place.store if stage is view.Stage.STORE else place.source
    shown = os.listdir(place.view / "d0")
    assert sorted(shown) == sorted(os.listdir(place.source / "d0"))
    if stage is not view.Stage.OVERLAY:
        assert shown == os.listdir(serves / "d0")


@pytest.mark.parametrize("stage", [view.Stage.SOURCE, view.Stage.OVERLAY, view.Stage.STORE])
def test_programs_run_and_have_no_more_rights(place: Place, stage: view.Stage) -> None:
    for folder in (place.source, place.store):
        (folder / "program").write_text("#!/bin/sh\necho it runs\n")
        (folder / "program").chmod(0o4755)
    place.show(stage)
    run = subprocess.run([place.view / "program"], capture_output=True, text=True, check=True)
    assert run.stdout == "it runs\n"
    top = mountinfo.top(place.view)
    assert top is not None
    assert {"ro", "nosuid", "nodev"} <= top.options and "noexec" not in top.options


def test_size_is_that_of_the_file_system_that_serves(place: Place) -> None:
    sizes = {}
    for stage in (view.Stage.SOURCE, view.Stage.STORE):
        place.show(stage)
        sizes[stage] = os.statvfs(place.view).f_blocks * os.statvfs(place.view).f_frsize
    for stage, folder in ((view.Stage.SOURCE, place.source), (view.Stage.STORE, place.store)):
        whole = os.statvfs(folder)
        assert sizes[stage] == whole.f_blocks * whole.f_frsize
    assert sizes[view.Stage.SOURCE] != sizes[view.Stage.STORE]


def test_inotify_hears_nothing_of_new_files(place: Place) -> None:
    place.show(view.Stage.OVERLAY)
    watch = syscalls.checked(syscalls.libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
    try:
        path = os.fsencode(place.view / "d0")
        added = syscalls.libc.inotify_add_watch(watch, path, CHANGES)
        syscalls.checked(added, "inotify_add_watch")
        (place.source / "d0" / "new").write_text("new")
        place.show(view.Stage.STORE)
        (place.store / "d0" / "newer").write_text("newer")
        heard = os.read(watch, 4096) if select.select([watch], [], [], 0)[0] else b""
        # Of each event the mask; none of them has a name.
        masks = {struct.unpack_from("iI", heard, at)[1] for at in range(0, len(heard), 16)}
        assert {mask & ~OF_A_DIRECTORY for mask in masks} == {UNMOUNTED, IGNORED}
    finally:
        os.close(watch)


@pytest.mark.parametrize(
    ("stage", "exports"), [(view.Stage.OVERLAY, False), (view.Stage.STORE, True)]
)
def test_only_the_store_can_be_exported_by_nfs(
    place: Place, stage: view.Stage, exports: bool
) -> None:
    """A server hands out handles of files."""
    place.show(stage)
    handle = ctypes.create_string_buffer(128 + 8)
    ctypes.memmove(handle, (128).to_bytes(4, sys.byteorder), 4)
    mount = ctypes.c_int()
    path = os.fsencode(next(path for path in place.view.rglob("*") if path.is_file()))
    result = syscalls.libc.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0)
    assert (result == 0) is exports
