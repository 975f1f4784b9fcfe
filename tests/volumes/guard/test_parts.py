"""The small parts: the kernel's words, owners, overrides, what is on disk."""

import math
import struct
from pathlib import Path

import pytest

import kit.errors
from linux import kmsg, netlink
from volumes import devices, settings
from volumes.guard import denials, errorlog, execguard, journal, kernel, layout, override, rawblock


@pytest.mark.parametrize(("line", "device", "is_rbd"), [
    ("I/O error, dev rbd0, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1", "rbd0", True),
    ("Buffer I/O error on dev rbd0, logical block 0, async page read", "rbd0", True),
    ("rbd: rbd0: read at objno 4 593920~4096 result -108", "rbd0", True),
    ("rbd: rbd0: encountered watch error: -107", "rbd0", True),
    ("block nbd3: Connection timed out", "nbd3", False),
    ("EXT4-fs error (device rbd0): ext4_find_entry:1455", "rbd0", True),
    ("libceph: osd0 down", "rbd7", True),
    ("libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon", "rbd7", True),
    ("libceph: osd1 (1)10.0.0.2:6801 socket closed (con state CONNECTING)", "rbd7", True),
    ("libceph: osd0 (1)10.0.0.1:6801 feature set mismatch, my 1 < server's 2, missing 1", "rbd7",
     True),
    ("blk_print_req_error: 12 callbacks suppressed", "anything", False),
])  # fmt: skip
def test_an_error_in_the_kernels_log_ends_the_quiet(line: str, device: str, is_rbd: bool) -> None:
    log = errorlog.ErrorLog()
    log.readable = True
    assert log.quiet_for(device, is_rbd, 100.0) == math.inf
    log.note(line, 90.0)
    assert log.quiet_for(device, is_rbd, 100.0) == 10.0


@pytest.mark.parametrize("line", [
    "rbd: rbd0: capacity 1073741824 features 0x3d",
    "libceph: osd1 (1)10.0.0.2:6801 socket closed (con state OPEN)",
    "EXT4-fs (rbd0): mounted filesystem with ordered data mode",
    "I/O error, dev rbd1, sector 2048",
])  # fmt: skip
def test_everyday_lines_and_other_devices_do_not(line: str) -> None:
    log = errorlog.ErrorLog()
    log.readable = True
    log.note(line, 90.0)
    assert log.quiet_for("rbd0", True, 100.0) == math.inf


def test_a_log_that_cannot_be_read_or_was_overwritten_is_not_quiet() -> None:
    log = errorlog.ErrorLog()
    assert log.quiet_for("rbd0", True, 1.0) is None
    log.readable = True
    log.lost(5.0)
    assert log.quiet_for("rbd0", True, 6.0) == 1.0


def test_the_error_log_is_bounded_and_forgets_in_the_safe_direction() -> None:
    log = errorlog.ErrorLog()
    log.readable = True
    for number in range(10_000):
        log.note(f"I/O error, dev rbd{number}, sector 1", float(number))
    assert log.quiet_for("rbd0", False, 10_000.0) < 10_000.0  # type: ignore[operator]


def test_kernel_records_are_told_from_those_of_processes() -> None:
    assert kmsg.parse(b"4,1234,5000000,-;I/O error, dev rbd0\n SUBSYSTEM=block\n") == kmsg.Record(
        5.0, "I/O error, dev rbd0", level=4, sequence=1234
    )
    assert kmsg.parse(b"12,1,1,-;I/O error, dev rbd0 says a process") is None
    assert kmsg.parse(b"nonsense") is None


def test_uevents_of_block_devices_are_parsed_and_others_are_not() -> None:
    raw = b"add@/devices/rbd/0/block/rbd0\0ACTION=add\0SUBSYSTEM=block\0DEVNAME=rbd0\0DEVTYPE=disk"
    assert netlink.parse_uevent(raw) == netlink.Uevent("add", "rbd0", "disk")
    assert netlink.parse_uevent(raw.replace(b"=block", b"=net")) is None
    assert netlink.parse_uevent(b"libudev\0\xff\xff") is None


@pytest.mark.parametrize(("path", "pod", "container"), [
    ("/kubepods/burstable/pod0f8fad5b-d9cb-469f-a165-70867728950e/" + "a" * 64,
     "0f8fad5b-d9cb-469f-a165-70867728950e", "a" * 64),
    ("/kubepods.slice/kubepods-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice/cri-containerd-"
     + "b" * 64 + ".scope", "0f8fad5b-d9cb-469f-a165-70867728950e", "b" * 64),
    ("/system.slice/kubelet.service", "", ""),
])  # fmt: skip
def test_pod_and_container_are_read_from_the_cgroups_path(
    path: str, pod: str, container: str
) -> None:
    assert denials.owner(path) == (pod, container)


def _denial(device: str = "rbd0", program: str = "mkfs.ext4", **more: object) -> denials.Denial:
    values: dict[str, object] = {
        "at": 1.0, "device": device, "volume": "v", "title": "t", "denied": True, "pid": 1,
        "program": program, "parent": "", "command": "", "cgroup": "", "pod": "", "container": "",
    }  # fmt: skip
    return denials.Denial(**{**values, **more})  # type: ignore[arg-type]


def test_a_denial_that_was_followed_by_a_lease_is_no_finding() -> None:
    kept = denials.Denials()
    kept.add(_denial())
    kept.decided("rbd0", "blank_verified", ())
    assert kept.findings(2.0) == [] and kept.delayed == 1


def test_in_dry_run_the_first_mkfs_of_a_new_volume_is_no_finding_and_a_known_ones_is() -> None:
    kept = denials.Denials()
    kept.add(_denial(denied=False, early=True))
    kept.decided("rbd0", "has_fs ext4", ("it is not blank",))
    assert kept.findings(2.0) == []
    kept.add(_denial(denied=False, early=False))
    kept.decided("rbd0", "unreadable", ("it is not blank",))
    assert [f.rule for f in kept.findings(2.0)] == ["format-would-be-denied"]


def test_denials_are_bounded_and_their_findings_end() -> None:
    kept = denials.Denials()
    for number in range(1000):
        kept.add(_denial(f"rbd{number}"))
        kept.decided(f"rbd{number}", "x", ("no",))
        kept.add(_denial("rbd0", at=2.0))
    assert len(kept.last) == denials.KEPT and len(kept.waiting["rbd0"]) == denials.KEPT
    assert len(kept.findings(2.0)) == denials.MOST_GROUPS
    assert kept.findings(2.0 + denials.FINDING_SECONDS + 1) == []


def test_an_event_is_unpacked_as_the_program_lays_it_out() -> None:
    raw = struct.pack("=QQ6I16s16s256s", 5_000_000_000, 25, 7, 6, 252, 0, 2, 12,
                      b"mkfs.ext4", b"csi", b"mkfs\0-F\0/dev\0garbage")  # fmt: skip
    event = layout.Event.unpack(raw + bytes(8))
    assert (event.time, event.number, event.denied) == (5.0, (252, 0), True)
    assert (event.program, event.arguments) == ("mkfs.ext4", ("mkfs", "-F", "/dev"))


def test_the_program_has_the_layouts_that_the_agent_expects() -> None:
    text = layout.OBJECT.with_name("guard.bpf.c").read_text()
    assert "enum { MODE_OFF, MODE_DRY_RUN, MODE_ENFORCE };" in text
    names = ", ".join(name.upper() for name in layout.COUNTERS)
    assert f"enum {{ {names}, COUNTERS }};" in text
    assert len(text.splitlines()) < 150


def test_an_override_is_kept_and_a_damaged_one_is_not_guessed_at(tmp_path: Path) -> None:
    assert override.load(tmp_path) is None
    override.store(tmp_path, layout.Mode.DRY_RUN, "me", "why")
    found = override.load(tmp_path)
    assert found is not None and (found.mode, found.reason) == (layout.Mode.DRY_RUN, "why")
    override.path(tmp_path).write_text("{")
    with pytest.raises(kit.errors.HostError, match="set the mode again"):
        override.load(tmp_path)
    override.clear(tmp_path)
    assert override.load(tmp_path) is None


def test_the_operator_log_is_bounded_and_survives_a_torn_line(tmp_path: Path) -> None:
    journal.append(tmp_path, "detach", "me", "why")
    with journal.path(tmp_path).open("ab") as stream:
        stream.write(b'{"torn')
    assert [e["action"] for e in journal.last(tmp_path)] == ["detach"]
    journal.path(tmp_path).write_bytes(b"x" * (journal.MOST_BYTES + 1))
    journal.append(tmp_path, "accept", "me", "")
    assert journal.path(tmp_path).stat().st_size < 1000


def test_per_device_majors_of_krbd_count_as_rbd(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n\nBlock devices:\n 43 nbd\n252 rbd0\n253 rbd\n259 blkext\n"
    )
    majors = devices.majors(tmp_path)
    assert majors == {43: "nbd", 252: "rbd", 253: "rbd", 259: "blkext"}
    wanted = kernel.wanted(settings.GuardSettings(), layout.Mode.ENFORCE, majors)
    assert wanted.majors == {43, 252, 253}


def _sysfs(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def test_a_krbd_device_is_known_by_fsid_pool_namespace_and_image_id(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("Block devices:\n254 rbd\n")
    sysfs = _sysfs(tmp_path / "sys", {
        "class/block/rbd3/dev": "254:48", "class/block/rbd3/size": "131072",
        "class/block/rbd3/ro": "0", "class/block/rbd3/diskseq": "9",
        "bus/rbd/devices/3/cluster_fsid": "f10a1c15", "bus/rbd/devices/3/pool": "rbd",
        "bus/rbd/devices/3/pool_id": "3", "bus/rbd/devices/3/pool_ns": "team",
        "bus/rbd/devices/3/name": "vol", "bus/rbd/devices/3/image_id": "101db0894ea2",
        "bus/rbd/devices/3/current_snap": "-",
    })  # fmt: skip
    found = devices.identify("rbd3", sysfs, tmp_path)
    assert found is not None
    assert found.volume == "rbd:f10a1c15/3/team/101db0894ea2"
    assert (found.title, found.size, found.number) == ("rbd/team/vol", 2**26, (254, 48))
    _sysfs(sysfs, {"bus/rbd/devices/3/current_snap": "s1"})
    snapshot = devices.identify("rbd3", sysfs, tmp_path)
    assert snapshot is not None and snapshot.volume.endswith("@s1")
    assert devices.identify("rbd4", sysfs, tmp_path) is None


def test_a_path_that_is_no_device_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.NotFoundError):
        devices.by_path(str(tmp_path / "none"))
    with pytest.raises(kit.errors.RefusedError, match="is no block device"):
        devices.by_path("/dev/null")


def test_a_volume_published_as_a_raw_block_device_is_recognised() -> None:
    from linux import mountinfo

    device = devices.BlockDevice("rbd0", (254, 0), "rbd", 1, False, 1)
    line = (b"1 2 0:5 /rbd0 /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc/u"
            b" rw - devtmpfs udev rw")  # fmt: skip
    assert rawblock.published(device, [mountinfo.parse_line(line)])
    other = line.replace(b"/rbd0 ", b"/rbd1 ")
    assert not rawblock.published(device, [mountinfo.parse_line(other)])


def test_the_exec_guard_lets_pass_what_does_not_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execguard, "device_of", lambda tid, word, majors: (
        (254, 0) if "rbd0" in word else None))  # fmt: skip
    config = {"mode": "enforce", "majors": [254], "leases": {}}
    for words, expected in (
        (["mkfs.ext4", "-F", "/dev/rbd0"], (254, 0)),
        (["mkfs.ext4", "-V"], None),
        (["dd", "if=/dev/rbd0", "of=/tmp/x"], None),
        (["dd", "if=/tmp/x", "of=/dev/rbd0"], (254, 0)),
        (["cryptsetup", "luksOpen", "/dev/rbd0", "x"], None),
        (["cryptsetup", "-q", "luksFormat", "/dev/rbd0"], (254, 0)),
        ([], None),
    ):
        assert execguard.refused(1, words, config) == expected, words


@pytest.mark.parametrize(("change", "text"), [
    ({"mode": "on"}, "dry-run"), ({"words": ["cryptsetup"]}, "PROGRAM ARGUMENT"),
    ({"lease": "5m"}, "120"), ({"drivers": []}, "at least 1"), ({"pins": "x"}, "absolute"),
    ({"drivers": ["a b"]}, "plain name"),
])  # fmt: skip
def test_bad_settings_are_refused_and_say_what_is_right(
    change: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        settings.GuardSettings.model_validate(change)
