"""The guard outlives its agent, is adopted by the next one, and is replaced without a gap."""

import contextlib
import fcntl
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kit.files
from linux import blockdev as blockdev_of_linux
from linux import bpf
from tests.testbed import blockdev, cell, constants, grave, waiting
from tests.volumes.guard import hammer
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import controller, kernel, lease

pytestmark = pytest.mark.real


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    image = blockdev.blank(tmp_path / "image", 320 * blockdev.MiB)
    with blockdev.loop(image) as made:
        blockdev.run("mkfs.ext4", "-q", made)
        yield made


def test_guard_outlives_killed_agent_and_is_adopted(
    where: cell.Cell, device: str, tmp_path: Path
) -> None:
    with cell.agent(tmp_path, where) as agent:
        before = agent.cli_json("volume", "guard", "status")
        assert (before["mode"], before["proof"]) == ("enforce", "enforced")

        agent.kill()
        done = where.run("mkfs.ext4", "-F", device)
        assert done.returncode != 0 and "not permitted" in done.stderr
        alone = agent.cli_json("volume", "guard", "status")
        assert (alone["agent"], alone["mode"], alone["proof"]) == (
            *("not running", "enforce", "enforced"),
        )

        agent.start()
        after = agent.cli_json("volume", "guard", "status")
        assert after["programs"] == before["programs"]
        # What was refused while no agent ran is told now.
        waiting.until(
            lambda: "format-denied" in {f["rule"] for f in agent.findings()},
            10, "the refusal to be told", detail=agent.findings,
        )  # fmt: skip


def test_a_lease_of_a_disk_that_stays_ends_soon_after_its_agent(
    where: cell.Cell, tmp_path: Path
) -> None:
    """nbd and loop: the kernel does not see that another medium came to the device."""
    blank = blockdev.blank(tmp_path / "blank", 320 * blockdev.MiB)
    other = blockdev.blank(tmp_path / "other", 320 * blockdev.MiB)
    blockdev.run("mkfs.ext4", "-q", str(other))
    before = blockdev.sha256(other)

    def opens(device: str) -> bool:
        rdev = os.stat(device).st_rdev
        guard = where.guard()
        guard.read()
        guard.free((os.major(rdev), os.minor(rdev)))  # else the last one has the lease
        guard.close()
        return where.run("sh", "-c", f"exec 3<>{device}").returncode == 0

    with cell.agent(tmp_path, where) as agent, blockdev.loop(blank) as device:
        waiting.until(lambda: opens(device), 10, "the lease")
        time.sleep(lease.GRACE_SECONDS + lease.BEAT_SECONDS)
        assert opens(device), "a living agent keeps it"
        agent.kill()
        blockdev.run("losetup", "-d", device)
        blockdev.run("losetup", device, str(other))
        waiting.until(lambda: not opens(device), 2 * lease.GRACE_SECONDS, "the end of the lease")
        guard = where.guard()
        number = os.stat(device).st_rdev
        held = guard.read().leases[os.major(number), os.minor(number)]
        guard.close()
        assert held.until > time.monotonic(), "it had not ended by itself"
        agent.start()  # and does not have it again
        waiting.until(lambda: agent.guarded(device).get("verdict"), 10, "a look")
        with grave.missing_denial():
            assert where.run("mkfs.ext4", "-F", device).returncode != 0
        guard = where.guard()
        assert not guard.read().leases
        guard.close()
    with grave.wrong_bytes():
        assert blockdev.sha256(other) == before


def test_a_partition_with_an_extended_major_stays_guarded_across_a_restart(
    where: cell.Cell, tmp_path: Path
) -> None:
    """Its major is no driver's, so the kernel's table has its number."""
    image = blockdev.blank(tmp_path / "image", 64 * blockdev.MiB)
    with cell.agent(tmp_path, where) as agent, blockdev.loop(image) as device:
        part = f"{device}p1"
        blockdev.run("addpart", device, "1", "2048", "65536")
        try:
            assert os.major(os.stat(part).st_rdev) != os.major(os.stat(device).st_rdev)
            waiting.until(
                lambda: where.run("sh", "-c", f"exec 3<>{part}").returncode != 0, 10, "the guard"
            )
            with hammer.hammer(where, part, "mkfs.ext4") as stop:
                for _ in range(2):
                    agent.kill()
                    agent.start()
                opened, refused = stop()
            assert (opened, refused > 100) == (0, True)
        finally:
            blockdev.run("delpart", device, "1")


def test_guard_is_adopted_without_pins(where: cell.Cell, tmp_path: Path) -> None:
    enforce = kernel.wanted(
        settings.GuardSettings(drivers=("loop",)), kernel.Mode.ENFORCE, {7: "loop"}
    )
    first = where.guard()
    before = first.apply(enforce)
    first.close()
    blockdev.run("umount", str(where.pins.parent))

    second = kernel.Kernel(where.path, tmp_path / "bpf" / "elsewhere")
    after = second.apply(enforce)
    second.close()
    blockdev.run("umount", str(tmp_path / "bpf"), check=False)

    assert [p.id for p in after.programs] == [p.id for p in before.programs]


def _rebuilt(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Another version of the program."""
    text = kernel.OBJECT.with_name("guard.bpf.c").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    source = folder / f"{name}.c"
    source.write_text(text)
    include = f"-I/usr/include/{os.uname().machine}-linux-gnu"
    blockdev.run("clang", "-O2", "-g", "-target", "bpf", include, "-c", str(source), "-o",
                 str(folder / f"{name}.o"))  # fmt: skip
    return folder / f"{name}.o"


# Each map in another shape, with which an upgrade cannot use the one that is there.
_SHAPES = {
    "majors": ("__u32, __u8, 4096)", "__u32, __u8, 2048)"),
    "devices": ("struct device, __u8, 4096)", "struct device, __u8, 8192)"),
    "config": ("config, BPF_MAP_TYPE_ARRAY, __u32, __u32, 1)",
               "config, BPF_MAP_TYPE_ARRAY, __u32, __u32, 2)"),
    "scope": ("scope, BPF_MAP_TYPE_ARRAY, __u32, __u32, 1)",
              "scope, BPF_MAP_TYPE_ARRAY, __u32, __u32, 2)"),
    "own": ("struct device, struct device, 4096)", "struct device, struct device, 2048)"),
    "leases": ("struct lease, 4096)", "struct lease, 2048)"),
    "writers": ("struct writer, 4096)", "struct writer, 2048)"),
    "beats": ("__u32, __u64, 1)", "__u32, __u64, 2)"),
    "openers": ("char[NAME], __u8, 128)", "char[NAME], __u8, 64)"),
    "words": ("struct word, __u8, 512)", "struct word, __u8, 1024)"),
    "connecting": ("LRU_HASH, __u32, __u64, 1024)", "LRU_HASH, __u32, __u64, 512)"),
    "callers": ("struct heard, 1024)", "struct heard, 512)"),
    "counters": ("__u64, COUNTERS)", "__u64, COUNTERS + 1)"),
    "events": ("256 * 1024)", "512 * 1024)"),
}  # fmt: skip


def test_upgrade_has_no_gap(where: cell.Cell, device: str, tmp_path: Path) -> None:
    """Another program, then each map in another shape, and back, under constant attempts."""
    enforce = kernel.wanted(
        settings.GuardSettings(drivers=("loop",)), kernel.Mode.ENFORCE, {7: "loop"}
    )
    logic = _rebuilt(tmp_path, "logic", ("CANARY_MAJOR 4095", "CANARY_MAJOR 4094"))
    shapes = {name: _rebuilt(tmp_path, name, change) for name, change in _SHAPES.items()}
    where.guard().apply(enforce)
    seen = set()
    held = (7, 1_000_003)  # no other test adds that disk
    stacked = (4094, 3)  # as the kernel notes a mapping on top of a guarded device
    where_now = where.guard()
    where_now.read()
    assert set(where_now.maps) == set(shapes)
    where_now.reserve(held, 1)
    where_now.grant(held, time.monotonic() + 600, 1)
    where_now.reserve_own([held])
    where_now.judge(kernel.Mode.DRY_RUN, {held: held})
    where_now.maps["devices"].set(struct.pack("=II", *stacked), b"\1")
    connects, pid = where_now.maps["connecting"], struct.pack("=I", os.getpid())
    # As if this process had run cryptsetup luksOpen.
    connects.set(pid, struct.pack("=Q", time.monotonic_ns()))
    with (
        hammer.hammer(where, device, "mkfs.ext4") as bad,
        hammer.hammer(where, device, "mount") as good,
    ):
        for version in (logic, *shapes.values(), kernel.OBJECT) * 2:
            guard = where.guard(version)
            present = guard.apply(enforce)
            assert len(present.programs) == 1 and guard.ends_with_disk
            assert {held} == set(present.leases), version
            with _new_disk() as number:
                assert {stacked, number} <= guard.read().devices, version
            assert present.judges is kernel.Mode.DRY_RUN, version
            assert guard.maps["own"].get(struct.pack("=II", *held)), version
            assert guard.maps["connecting"].get(pid), version
            guard.maps["connecting"].set(pid, struct.pack("=Q", time.monotonic_ns()))  # for 60 s
            seen.add(present.programs[0].id)
            guard.close()
        bad_opened, bad_refused = bad()
        good_opened, good_refused = good()
    where_now.close()
    assert len(seen) == 2 * (len(shapes) + 2), "every step replaced the program"
    assert (bad_opened, good_refused) == (0, 0)
    assert bad_refused > 1000 and good_opened > 1000


def test_leases_of_a_program_without_writers_stay_everybodys(
    where: cell.Cell, device: str, tmp_path: Path
) -> None:
    """As they were given: a raw block volume's pod goes on. One that is freed has a first."""
    enforce = kernel.wanted(
        settings.GuardSettings(drivers=("loop",)), kernel.Mode.ENFORCE, {7: "loop"}
    )
    earlier = _rebuilt(
        tmp_path, "earlier",
        ("MAP(writers, BPF_MAP_TYPE_HASH, struct device, struct writer, 4096);", ""),
        ("\tbpf_map_delete_elem(&writers, number);\n", ""),
        ("(task && !is_writer(dev, task))", "0"),
        ("bpf_map_update_elem(&writers, dev, &asks, BPF_NOEXIST);", ""),
        ("bpf_map_lookup_elem(&writers, dev)", "0"),
    )  # fmt: skip
    where.guard().detach()
    rdev = os.stat(device).st_rdev
    number = os.major(rdev), os.minor(rdev)

    def writes() -> list[bool]:
        done = (where.run("sh", "-c", f"exec 3<>{device}").returncode for _ in range(2))
        return [code == 0 for code in done]

    with (
        bpf.loaded(earlier, kernel.PROGRAM, {}) as (program, maps),
        kit.files.closing(os.open(where.path, os.O_RDONLY)) as cgroup,
    ):
        assert "writers" not in maps
        kernel.fill(maps, enforce)
        held = kernel.KernelLease(time.monotonic() + 600, 0, 1)
        maps["leases"].set(struct.pack("=II", *number), held.pack())
        program.attach(cgroup)
        for each in (program, *maps.values()):
            each.close()
    assert writes() == [True, True]
    guard = where.guard()
    guard.apply(enforce)
    assert writes() == [True, True] and guard.leases()[number].is_everybodys
    guard.free(number)
    assert writes() == [True, False]
    writer = guard.leases()[number].writer
    guard.close()
    guard = where.guard(_rebuilt(tmp_path, "shape", _SHAPES["writers"]))
    guard.apply(enforce)  # another upgrade: the lease is still that process's
    assert writes() == [False, False] and guard.leases()[number].writer == writer
    guard.detach()


@contextlib.contextmanager
def _new_disk() -> Iterator[kernel.Number]:
    """This process adds a loop disk; its number."""
    minor = random.randrange(900_000, 1_000_000)
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        fcntl.ioctl(control, 0x4C80, minor)
        try:
            yield 7, minor
        finally:
            fcntl.ioctl(control, 0x4C81, minor)


async def test_a_new_device_leaves_the_mode_that_a_command_set(
    where: cell.Cell, tmp_path: Path
) -> None:
    """The agent has not read yet that the mode is another one."""
    weak = constants.made(settings.GuardSettings, **cell.settings(where, mode="dry-run"))
    made = controller.Controller(weak, (), witness(), state_dir=tmp_path)
    direct = where.guard()
    try:
        await made.apply(weak)
        direct.set_mode(kernel.Mode.ENFORCE)
        disk = blockdev_of_linux.BlockDevice("loop0", (7, 0), "loop", 2**20, False)
        mapping = blockdev_of_linux.BlockDevice(
            "dm-77", (4094, 77), "device-mapper", 2**20, False, below=(disk,)
        )
        made.in_force.cover(mapping)
        present = direct.read()
        assert mapping.number in present.devices
        assert present.mode is kernel.Mode.ENFORCE
    finally:
        await made.stop()
        direct.detach()
        direct.close()


def test_detach_lasts_until_set_mode_settings(
    where: cell.Cell, device: str, tmp_path: Path
) -> None:
    with cell.agent(tmp_path, where) as agent:
        agent.cli_json("volume", "guard", "detach", "--reason", "a test")
        assert where.run("tune2fs", "-L", "x", device).returncode == 0
        time.sleep(6)  # longer than a reconcile: the agent does not attach it again by itself
        status = agent.cli_json("volume", "guard", "status")
        assert (status["mode"], status["proof"]) == ("off", "let through")
        assert status["override"]["reason"] == "a test"
        assert "guard-overridden" in {f["rule"] for f in agent.findings()}

        agent.cli_json("volume", "guard", "set-mode", "settings", "--reason", "over")
        with grave.missing_denial():
            assert where.run("mkfs.ext4", "-F", device).returncode != 0
        actions = [e["action"] for e in agent.cli_json("volume", "guard", "status")["operator_log"]]
        assert actions == ["detach", "set-mode"]


def test_kill_switch_works_without_agent(where: cell.Cell, device: str, tmp_path: Path) -> None:
    with cell.agent(tmp_path, where) as agent:
        agent.kill()
        assert where.run("tune2fs", "-L", "x", device).returncode != 0
        agent.cli_json("volume", "guard", "set-mode", "dry-run", "--reason", "a test")
        assert where.run("tune2fs", "-L", "x", device).returncode == 0
        agent.cli_json("volume", "guard", "set-mode", "enforce", "--reason", "a test")
        assert where.run("tune2fs", "-L", "x", device).returncode != 0
        agent.cli_json("volume", "guard", "detach", "--reason", "a test")
        assert where.run("tune2fs", "-L", "x", device).returncode == 0
        agent.start()  # and the next agent respects it
        assert agent.cli_json("volume", "guard", "status")["mode"] == "off"


def test_attach_command_works_without_agent(where: cell.Cell, device: str, tmp_path: Path) -> None:
    with cell.agent(tmp_path, where) as agent:
        agent.kill()
        where.guard().detach()
        assert where.run("tune2fs", "-L", "x", device).returncode == 0
        status = agent.cli_json("volume", "guard", "attach")
        assert (status["mode"], status["proof"]) == ("enforce", "enforced")
        assert where.run("tune2fs", "-L", "x", device).returncode != 0


def test_controller_attaches_again_after_foreign_detach(where: cell.Cell, tmp_path: Path) -> None:
    with cell.agent(tmp_path, where) as agent:
        where.guard().detach()  # by somebody's bpftool, not by our kill switch
        waiting.until(
            lambda: agent.get("/v1/volumes/guard")["attached"] and where.guard().read().attached,
            10,
            "the guard to be attached again",
        )
