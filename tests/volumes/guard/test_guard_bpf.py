"""What the kernel refuses and what it never hinders, whoever asks and from wherever."""

import asyncio
import contextlib
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from linux import bpf, procfs
from tests.testbed import blockdev, cell, grave, waiting
from volumes.guard import kernel

pytestmark = pytest.mark.real

SIZE = 320 * blockdev.MiB

WRITERS = {
    "mkfs.ext4 -F": ("mkfs.ext4", "-F"),
    "mkfs.xfs -f": ("mkfs.xfs", "-f"),
    "mkfs.btrfs -f": ("mkfs.btrfs", "-f"),
    "wipefs -a": ("wipefs", "-a", "-f"),
    "dd": ("dd", "if=/dev/zero", "count=1", "conv=notrunc"),
    "mkswap": ("mkswap", "-f"),
    "blkdiscard": ("blkdiscard", "-f"),
    "parted": ("parted", "-s"),
    "luksFormat": (
        *("cryptsetup", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"),
        *("--key-file", "/etc/hostname", "luksFormat"),
    ),
    "shell redirection": ("sh", "-c"),
}


def _command(name: str, device: str) -> tuple[str, ...]:
    words = WRITERS[name]
    if name == "dd":
        return (*words, f"of={device}")
    if name == "parted":
        return (*words, device, "mklabel", "gpt")
    if name == "shell redirection":
        return (*words, f"echo x > {device}")
    return (*words, device)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    image = blockdev.blank(folder / "image", SIZE)
    with blockdev.loop(image) as device:
        blockdev.run("mkfs.ext4", "-q", device)
        with blockdev.mounted(device, folder / "mnt") as target:
            (target / "data").write_bytes(os.urandom(2**20))
    return image


@pytest.fixture
def device(image: Path) -> Iterator[str]:
    with blockdev.loop(image) as made:
        yield made


@pytest.mark.parametrize("name", WRITERS)
def test_enforce_denies_writers(guarded: cell.Cell, device: str, image: Path, name: str) -> None:
    before = blockdev.sha256(image)

    done = guarded.run(*_command(name, device))

    with grave.missing_denial():
        assert done.returncode != 0
        assert blockdev.sha256(image) == before


@pytest.mark.parametrize("name", WRITERS)
def test_writers_succeed_without_guard(tmp_path: Path, name: str) -> None:
    """Else the refusals above might have another cause."""
    blank = blockdev.blank(tmp_path / "blank", SIZE)
    with blockdev.loop(blank) as device:
        done = blockdev.run(*_command(name, device), check=False)
        # mkfs.xfs -f and the others write; cryptsetup needs the device mapper only to open
        assert done.returncode == 0, done.stderr


def test_enforce_denies_chroot_with_own_node(
    guarded: cell.Cell, device: str, image: Path, tmp_path: Path
) -> None:
    shutil.copy("/bin/busybox", tmp_path / "busybox")
    os.mknod(tmp_path / "disk", 0o60600, os.stat(device).st_rdev)
    before = blockdev.sha256(image)

    for words in (("dd", "if=/busybox", "of=/disk", "count=1"), ("mkswap", "/disk")):
        done = guarded.run("chroot", str(tmp_path), "/busybox", *words)
        with grave.missing_denial():
            assert done.returncode != 0 and "Operation not permitted" in done.stderr

    with grave.missing_denial():
        assert blockdev.sha256(image) == before


def test_enforce_denies_other_mount_namespace(guarded: cell.Cell, device: str, image: Path) -> None:
    before = blockdev.sha256(image)
    done = guarded.run("unshare", "-m", "mkfs.ext4", "-F", device)
    with grave.missing_denial():
        assert done.returncode != 0 and "not permitted" in done.stderr
        assert blockdev.sha256(image) == before


def test_enforce_denies_second_devtmpfs(guarded: cell.Cell, device: str, tmp_path: Path) -> None:
    script = f"mount -t devtmpfs none {tmp_path} && mkfs.ext4 -F {tmp_path}/{Path(device).name}"
    done = guarded.run("unshare", "-m", "sh", "-c", script)
    with grave.missing_denial():
        assert done.returncode != 0 and "not permitted" in done.stderr


@pytest.fixture(scope="module")
def allow_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device program that a container runtime attaches for a privileged container."""
    folder = tmp_path_factory.mktemp("bpf")
    source = folder / "allow.c"
    source.write_text(
        "#define SEC(name) __attribute__((section(name), used))\n"
        'SEC("cgroup/dev") int allow_all(void *ctx) { return 1; }\n'
        'char LICENSE[] SEC("license") = "GPL";\n'
    )
    blockdev.run(
        *("clang", "-O2", "-g", "-target", "bpf", "-c", str(source)), "-o", str(folder / "allow.o")
    )
    return folder / "allow.o"


def test_enforce_denies_below_allow_all_program(
    guarded: cell.Cell, device: str, allow_all: Path
) -> None:
    container = guarded.path / "container"
    container.mkdir()
    directory = os.open(container, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with bpf.loaded(allow_all, "allow_all", {}) as (program, _):
            program.attach(directory)
            done = guarded.run("mkfs.ext4", "-F", device, cgroup=container)
            program.detach(directory)
            program.close()
    finally:
        os.close(directory)
        container.rmdir()
    with grave.missing_denial():
        assert done.returncode != 0 and "not permitted" in done.stderr


def test_enforce_allows_mount_check_read_resize_detach(guarded: cell.Cell, tmp_path: Path) -> None:
    image, target = tmp_path / "image", tmp_path / "mnt"
    target.mkdir()
    blockdev.blank(image, SIZE)
    with blockdev.loop(image) as device:
        blockdev.run("mkfs.ext4", "-q", device, "100M")
        for words in (
            ("blkid", "-p", device),
            ("lsblk", device),
            ("wipefs", "-n", device),
            ("blockdev", "--getsize64", device),
            ("dd", f"if={device}", "of=/dev/null", "count=8"),
            ("fsck", "-a", device),
            ("fsck.ext4", "-f", "-y", device),
            ("resize2fs", device),  # offline
            ("mount", "-t", "ext4", "-o", "defaults", device, str(target)),
            ("dd", "if=/dev/zero", f"of={target}/data", "bs=1M", "count=4", "conv=fsync"),
            ("mount", "-o", "remount,ro", str(target)),
            ("mount", "-o", "remount,rw", str(target)),
            ("umount", str(target)),
            ("mount", "-o", "ro", device, str(target)),
            ("umount", str(target)),
            ("losetup", "-d", device),
        ):
            done = guarded.run(*words)
            assert done.returncode == 0, (words, done.stderr)


def test_enforce_allows_online_growth(guarded: cell.Cell, tmp_path: Path) -> None:
    """ext4 too grows online only with CAP_SYS_RESOURCE, which this machine withholds: the guest of
    test_guest.py does that."""
    target = tmp_path / "mnt"
    target.mkdir()
    for fstype, grow in (("xfs", "xfs_growfs"),):
        image = tmp_path / fstype
        blockdev.blank(image, SIZE)
        with blockdev.loop(image) as device:
            blockdev.run(f"mkfs.{fstype}", device)
            assert guarded.run("mount", device, str(target)).returncode == 0
            os.truncate(image, 2 * SIZE)
            blockdev.run("losetup", "-c", device)
            done = guarded.run(grow, str(target))
            grown = os.statvfs(target).f_blocks * os.statvfs(target).f_frsize
            assert guarded.run("umount", str(target)).returncode == 0
        assert done.returncode == 0, done.stderr
        assert grown > SIZE


def test_words_allow_luks_open_and_deny_format(guarded: cell.Cell, tmp_path: Path) -> None:
    """This machine has no device mapper: open gets as far as asking for it, past the guard."""
    image, key = tmp_path / "image", tmp_path / "key"
    key.write_bytes(b"k" * 64)
    blockdev.blank(image, 64 * blockdev.MiB)
    with blockdev.loop(image) as device:
        blockdev.run(*("cryptsetup", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"),
                     *("--key-file", str(key), "luksFormat", device))  # fmt: skip
        guard = guarded.guard()
        before, began = guard.read().counters, time.monotonic_ns()
        opened = _writes_as(guarded, tmp_path, "cryptsetup", "luksOpen", device)
        connecting = guard.maps["connecting"]
        times = [struct.unpack("=Q", connecting.get(k) or b"")[0] for k in connecting.snapshot()]
        assert sum(began <= each <= time.monotonic_ns() for each in times) == 1
        formatted = _writes_as(guarded, tmp_path, "cryptsetup", "luksFormat", device)
        after = guard.read().counters
        guard.close()
    assert (opened, formatted) == ("opened", "EPERM")
    assert after["by_word"] - before["by_word"] >= 1  # the kernel asks twice for one open
    assert after["denied"] - before["denied"] == 1


def _writes_as(where: cell.Cell, folder: Path, name: str, argument: str, device: str) -> str:
    """A write open by a process called ``name`` with that first argument."""
    source, program = folder / f"{name}.c", folder / name
    if not program.exists():
        source.write_text(
            "#include <fcntl.h>\n#include <stdio.h>\n#include <errno.h>\n"
            "int main(int c, char **v) { int f = open(v[2], O_RDWR);"
            ' puts(f >= 0 ? "opened" : errno == EPERM ? "EPERM" : "other"); return 0; }\n'
        )
        blockdev.run("clang", "-o", str(program), str(source))
    script = f"cd {folder} && exec ./{name} {argument} {device}"
    return where.run("sh", "-c", script).stdout.strip()


def test_reads_and_other_majors_are_not_counted(guarded: cell.Cell, device: str) -> None:
    guard = guarded.guard()
    before = guard.read().counters
    guarded.run("dd", f"if={device}", "of=/dev/null", "count=1")
    guarded.run("dd", "if=/dev/zero", "of=/dev/null", "count=1")
    assert guard.read().counters == before
    guard.close()


class Leased(NamedTuple):
    device: str
    number: kernel.Number
    guard: kernel.Kernel


@contextlib.contextmanager
def _leased(where: cell.Cell, folder: Path, size: int = SIZE) -> Iterator[Leased]:
    """A blank device that has a lease, longer than any mkfs."""
    with blockdev.loop(blockdev.blank(folder / "leased", size)) as device:
        rdev = os.stat(device).st_rdev
        number = os.major(rdev), os.minor(rdev)
        guard = where.guard()
        guard.read()
        try:
            guard.reserve(number, None)
            guard.grant(number, time.monotonic() + 600, None)
            yield Leased(device, number, guard)
        finally:
            guard.revoke(number)
            guard.close()


def test_lease_allows_format_and_expires(guarded: cell.Cell, tmp_path: Path) -> None:
    with _leased(guarded, tmp_path) as (device, number, guard):
        assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode == 0
        used = guard.leases()[number].opens
        assert used > 0
        guard.grant(number, time.monotonic() + 600, None)
        assert guard.leases()[number].opens >= used, "a renewal keeps what the kernel counted"
        guard.grant(number, time.monotonic() - 1, None)
        guard.free(number)
        assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode != 0
        assert number in guard.leases(), "it ended by itself"


FORMATTERS = {
    "mkfs -t ext4": ("mkfs", "-t", "ext4", "-F"),  # it executes the other one
    "mkfs.ext4": ("mkfs.ext4", "-F", "-m0", "-Enodiscard,lazy_itable_init=1"),
    "mkfs.xfs": ("mkfs.xfs", "-f"),
    "mkfs.btrfs": ("mkfs.btrfs", "-f"),
    "mkswap": ("mkswap",),
    "luksFormat": WRITERS["luksFormat"],
}


@pytest.mark.parametrize("name", FORMATTERS)
def test_a_formatter_may_open_the_device_again_and_the_next_may_not(
    guarded: cell.Cell, tmp_path: Path, name: str
) -> None:
    with _leased(guarded, tmp_path) as (device, _, _guard):
        first = guarded.run(*FORMATTERS[name], device)
        assert first.returncode == 0, first.stderr
        for _ in range(20):
            with grave.missing_denial():
                assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode != 0
        assert guarded.run("fsck", "-a", device).returncode in (0, 4, 8), "an opener may"


# It opens the device and prints a line. For each line that it reads, it opens the device again or
# writes to it.
_FIRST = """
import os, sys, threading
device, held = sys.argv[1], []
def opens():
    try:
        held.append(os.open(device, os.O_RDWR)); print("opened", flush=True)
    except PermissionError:
        print("EPERM", flush=True)
opens()
for line in sys.stdin:
    match line.strip():
        case "open": opens()
        case "thread": t = threading.Thread(target=opens); t.start(); t.join()
        case "child":
            if os.fork() == 0: opens(); os._exit(0)
            os.wait()
        case "inherit":
            if os.fork() == 0:
                os.pwrite(held[0], b"child", 0); os.fsync(held[0])
                print("wrote", flush=True); os._exit(0)
            os.wait()
        case "exec": os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
"""


def test_a_lease_belongs_to_the_first_process(guarded: cell.Cell, tmp_path: Path) -> None:
    """While it is at work and after it, until the agent gives the lease to the next."""
    with _leased(guarded, tmp_path) as (device, number, guard):
        assert guarded.run("fsck.ext4", "-n", device).returncode == 8, "an opener is no writer"
        first = guarded.popen(sys.executable, "-c", _FIRST, device)
        assert first.stdin is not None and first.stdout is not None

        def told(line: str) -> str:
            assert first.stdin is not None and first.stdout is not None
            print(line, file=first.stdin, flush=True)
            return first.stdout.readline().strip()

        assert first.stdout.readline() == "opened\n"
        used = guard.leases()[number].opens
        for _ in range(20):
            assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode != 0
        assert guard.leases()[number].opens == used, "who is refused changes nothing"
        assert guarded.run("fsck", "-a", device).returncode in (0, 4, 8)
        used, before = guard.leases()[number].opens, used
        assert used > before, "an opener may write"
        guard.set_mode(kernel.Mode.DRY_RUN)
        assert guarded.run("dd", "if=/dev/null", f"of={device}").returncode == 0
        guard.set_mode(kernel.Mode.ENFORCE)
        assert guard.leases()[number].opens > used, "nobody is refused in dry-run"
        ways = ("open", "thread", "child", "inherit", "exec", "open")
        assert [told(way) for way in ways] == [
            *("opened", "opened", "EPERM", "wrote", "opened", "opened"),
        ]
        writer = guard.leases()[number].writer
        assert writer is not None and writer.pid == first.pid and not writer.has_ended()
        assert writer in _writing(number)
        # Another process with its number, later.
        guard.maps["writers"].set(
            struct.pack("=II", *number), struct.pack("=QQ", writer.started - 10**7, writer.pid)
        )
        assert told("open") == "EPERM"
        other = guard.leases()[number].writer
        assert other is not None and other.has_ended()
        guard.maps["writers"].set(
            struct.pack("=II", *number), struct.pack("=QQ", writer.started, writer.pid)
        )
        first.kill()
        first.communicate()
        assert writer.has_ended()
        assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode != 0
        guard.free(number)
        assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode == 0


def _writing(number: kernel.Number) -> frozenset[procfs.StartedProcess]:
    return asyncio.run(kernel.writing(number))


# Opens the device in each way, and keeps its files open. Its first thread may
# end. What lies on a file system that never answers is not asked for: only the kernel is.
_OPENED = """
import ctypes, os, sys, threading
way, device = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if way == "unmounted":
    libc.unshare(0x20000)
    libc.mount(b"none", b"/", None, (1 << 18) | 16384, None)
    assert libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None) == 0
    os.mknod("/mnt/disk", 0o60600, os.stat(device).st_rdev)
    device = "/mnt/disk"
if way == "many":
    others = [open("/dev/null", "w") for _ in range(900)]
held = os.open(device, os.O_RDONLY if way == "reads" else os.O_RDWR)
if way == "unmounted":
    assert libc.umount2(b"/mnt", 2) == 0
if way == "closed":
    os.close(held)
print("ready", flush=True)
if way == "thread":
    threading.Thread(target=sys.stdin.read).start()
    libc.pthread_exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize(("way", "writes"), [
    ("open", True), ("many", True), ("thread", True), ("unmounted", True),
    ("reads", False), ("closed", False),
])  # fmt: skip
def test_the_kernel_says_who_has_a_device_open_for_writing(
    guarded: cell.Cell, tmp_path: Path, way: str, writes: bool
) -> None:
    """In whatever mount namespace, by whatever path."""
    with _leased(guarded, tmp_path) as (device, number, guard):
        program = guarded.popen(sys.executable, "-c", _OPENED, way, device)
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            writer = guard.leases()[number].writer
            assert (program.pid in {each.pid for each in _writing(number)}) == writes
            assert (writer in _writing(number)) == writes
            assert _writing((number[0], number[1] + 1)) == frozenset()
        finally:
            program.kill()
            program.communicate()
        assert _writing(number) == frozenset()


def test_a_pods_lease_is_everybodys(guarded: cell.Cell, tmp_path: Path) -> None:
    with _leased(guarded, tmp_path) as (device, number, guard):
        assert guarded.run("mkfs.ext4", "-q", device).returncode == 0
        guard.free(number, everybodys=True)
        for _ in range(3):
            assert guarded.run("mkfs.ext4", "-q", "-F", device).returncode == 0
        assert guard.leases()[number].is_everybodys
        guard.revoke(number)
        guard.reserve(number, None)
        guard.grant(number, time.monotonic() + 60, None)
        done = [guarded.run("mkfs.ext4", "-q", "-F", device).returncode for _ in range(2)]
        assert done[0] == 0 and done[1] != 0, "it has a first process again"


def test_a_lease_that_holds_stays_its_writers_when_another_is_given(guarded: cell.Cell) -> None:
    """An operator permits while a formatter is at work."""
    guard = guarded.guard()
    guard.read()
    number = 7, 999_999
    guard.reserve(number, 5)
    guard.grant(number, time.monotonic() + 60, 5)
    guard.maps["writers"].set(struct.pack("=II", *number), struct.pack("=QQ", 1, 2))
    guard.reserve(number, 5)
    assert guard.leases()[number].writer == (1, 2)
    guard.grant(number, 0.0, 5)
    guard.reserve(number, 5)
    assert guard.leases()[number].writer is None, "it had ended"
    guard.revoke(number)
    guard.close()


def test_lease_that_replaces_a_live_one_counts_as_used(guarded: cell.Cell) -> None:
    """An open that the kernel counts while the agent writes the new value would be lost."""
    guard = guarded.guard()
    guard.read()
    number = 7, 999_999
    guard.reserve(number, 5)
    guard.grant(number, time.monotonic() + 60, 5)
    assert guard.leases()[number].opens == 0
    guard.grant(number, time.monotonic() + 60, 5)
    assert guard.leases()[number].opens == 1
    guard.grant(number, time.monotonic() + 60, 6)
    assert guard.leases()[number].opens == 0, "of another attachment"
    guard.revoke(number)
    guard.close()


def test_dry_run_allows_and_counts(guarded: cell.Cell, tmp_path: Path) -> None:
    image = blockdev.blank(tmp_path / "image", 64 * blockdev.MiB)
    guard = guarded.guard()
    try:
        guard.set_mode(kernel.Mode.DRY_RUN)
        before = guard.read().counters
        with blockdev.loop(image) as device:
            done = guarded.run("mkfs.ext4", "-q", "-F", device)
        after = guard.read().counters
    finally:
        guard.set_mode(kernel.Mode.ENFORCE)
        guard.close()
    assert done.returncode == 0
    assert after["would_deny"] > before["would_deny"] and after["denied"] == before["denied"]


def test_open_descriptor_outlives_lease_and_new_open_does_not(
    guarded: cell.Cell, tmp_path: Path
) -> None:
    """The guard is called at open: an expired lease closes no descriptor, and opens none."""
    with _leased(guarded, tmp_path) as (device, number, guard):
        script = f"exec 3<>{device}; echo open; read go; echo x >&3 || exit 1; exec 4<>{device}"
        process = guarded.popen("sh", "-c", script)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "open\n"
        guard.grant(number, time.monotonic() - 1, None)  # expired, not revoked
        _, error = process.communicate("go\n", timeout=waiting.limit(20))
    assert process.returncode != 0
    assert "not permitted" in error
    assert (tmp_path / "leased").read_bytes()[:1] == b"x"


def test_cell_guards_only_itself(guarded: cell.Cell, tmp_path: Path) -> None:
    """The machine outside the cell is not guarded by these tests."""
    image = blockdev.blank(tmp_path / "image", 64 * blockdev.MiB)
    with blockdev.loop(image) as device:
        assert subprocess.run(["mkfs.ext4", "-q", "-F", device], check=False).returncode == 0
