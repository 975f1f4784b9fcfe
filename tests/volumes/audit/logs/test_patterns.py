"""patterns.yaml against the exact texts of the programs and near misses; loading patterns. Pure."""

import itertools
import math
import re
from pathlib import Path

import pytest

import kit.errors
from volumes.audit.logs import follower, matcher, patterns
from volumes.guard import lease
from volumes.settings import LogSettings, LogSource

PATTERNS = patterns.built_in()
DEVICES = follower.device_names(("rbd", "nbd"))


def matched(
    source: str,
    line: str,
    own: tuple[patterns.Pattern, ...] = PATTERNS,
    devices: str = DEVICES,
) -> list[matcher.Hit]:
    each = matcher.Matcher(
        "test", [p for p in patterns.expressions(own) if p.source == source], devices, 1000
    )
    each.feed(line.encode() + b"\n")
    return list(each.flush())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(p, text) for p in PATTERNS for text in p.examples],
    ids=lambda v: str(v)[:40],
)
def test_pattern_matches_its_examples(pattern: patterns.Pattern, text: str) -> None:
    assert pattern.id in [hit.pattern for hit in matched(pattern.source, text)]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(p, text) for p in PATTERNS for text in p.near_misses],
    ids=lambda v: str(v)[:40],
)
def test_pattern_ignores_its_near_misses(pattern: patterns.Pattern, text: str) -> None:
    assert pattern.id not in [hit.pattern for hit in matched(pattern.source, text)]


def test_built_in_patterns_have_examples_and_near_misses() -> None:
    for pattern in PATTERNS:
        assert pattern.examples, pattern.id
        assert pattern.near_misses, pattern.id


# The texts of the programs' sources, filled in. Kept apart from the pattern file on purpose:
# a text that is changed there to fit a pattern must still be found here.
UID = "1c6f2fcb-2a35-4a3c-a1f0-3d2fd3b0f1aa"
OF_CSI = '(UniqueName: "kubernetes.io/csi/rbd.csi.ceph.com^0001-9")'
EXACT = {
    # Linux 6.1 and 6.12, net/ceph
    "libceph: mon2 (1)10.1.2.3:6789 feature set mismatch, my 107b86a842aca < server's "
    "40107b86a842aca, missing 400000000000000": "ceph-feature-mismatch",
    "libceph: msgr2 feature set mismatch: my required > server's supported 0x1, need 0x3": (
        "ceph-feature-mismatch"
    ),
    "libceph: RADOS feature set mismatch: server's required > my supported 0x3f01cfbffffdffff, "
    "missing 0x4000": "ceph-feature-mismatch",
    "libceph: osd1 (1)10.1.2.3:6801 protocol version mismatch, my 24 != server's 10": (
        "ceph-protocol-mismatch"
    ),
    "libceph: mon0 (1)10.1.2.3:6789 protocol feature mismatch, my required 800000 > server's 0, "
    "need 800000": "ceph-protocol-mismatch",
    "libceph: no match of type 2 in addrvec": "ceph-messenger-mismatch",
    "libceph: mon0 (2)10.1.2.3:3300 server is speaking msgr1 protocol": "ceph-messenger-mismatch",
    "libceph: bad fsid, had 00000000-0000-0000-0000-000000000001 got "
    "00000000-0000-0000-0000-000000000002": "ceph-wrong-cluster",
    "libceph: mon0 (1)10.1.2.3:6789 bad authorize reply": "ceph-key-refused",
    "libceph: mon0 (1)10.1.2.3:6789 connect authorization failure": "ceph-key-refused",
    "libceph: osd3 (1)10.1.2.3:6801 socket closed (con state OPEN)": "ceph-session-flaps",
    "libceph: mon0 (2)10.1.2.3:3300 socket closed (con state CONNECTING)": "ceph-session-flaps",
    "libceph: mon0 (1)10.1.2.3:6789 session lost, hunting for new mon": "ceph-session-flaps",
    "libceph: osd3 down": "ceph-session-flaps",
    "libceph: read_partial_message bad hdr crc 3735928559 != expected 1": "ceph-corrupt-message",
    "libceph: read_partial_message 00000000deadbeef data crc 1 != exp. 2": "ceph-corrupt-message",
    "libceph: read_partial_message 00000000deadbeef middle crc 1 != exp 2": "ceph-corrupt-message",
    "libceph: bad front crc, calculated 1, expected 2": "ceph-corrupt-message",
    # drivers/block/rbd.c
    "rbd: rbd12: image uses unsupported features: 0x40": "rbd-unsupported-features",
    "rbd: rbd12: encountered watch error: -107": "rbd-watch-lost",
    "rbd: rbd12: failed to reregister watch: -108": "rbd-watch-lost",
    "rbd: rbd12: failed to lock header: -30": "rbd-lock-broken",
    "rbd: rbd12: breaking header lock owned by client4144": "rbd-lock-broken",
    "rbd: rbd12: failed to blocklist client4144: -110": "rbd-lock-broken",
    "rbd: rbd12: read at objno 4 593920~4096 result -108": "rbd-io-error",
    "rbd: rbd12: child read result -108": "rbd-io-error",
    "rbd: rbd12: write 1000 at 7ffff000 result -5": "rbd-io-error",
    # block/blk-core.c, block/blk-mq.c (5.15: with the function's name), fs/buffer.c
    "blk_update_request: I/O error, dev rbd12, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 "
    "prio class 0": "block-io-error",
    "Buffer I/O error on dev rbd12, logical block 9, async page read": "block-io-error",
    "Buffer I/O error on dev rbd12, logical block 9, lost sync page write": "block-io-error",
    "Buffer I/O error on device rbd12, logical block 9": "block-io-error",  # fs/ext4/page-io.c
    "mkfs.ext4: attempt to access beyond end of device\\x0arbd12: rw=0, sector=8, nr_sectors = 8 "
    "limit=0": "beyond-end-of-device",  # /dev/kmsg writes a new line so
    # fs/ext4
    "EXT4-fs (rbd12): INFO: recovery required on readonly filesystem": "ext4-recovery-refused",
    "EXT4-fs (rbd12): write access unavailable, cannot proceed (try mounting with noload)": (
        "ext4-recovery-refused"
    ),
    "EXT4-fs error (device rbd12): __ext4_find_entry:1612: inode #2: comm ls: reading directory": (
        "ext4-error"
    ),
    "EXT4-fs error (device rbd12) in ext4_reserve_inode_write:5730: IO failure": "ext4-error",
    "EXT4-fs (rbd12): Remounting filesystem read-only": "ext4-error",
    "EXT4-fs (rbd12): error loading journal": "ext4-io-error",
    "EXT4-fs (rbd12): I/O error while writing superblock": "ext4-io-error",
    "EXT4-fs (rbd12): Delayed block allocation failed for inode 13 at logical offset 0 with max "
    "blocks 8 with error 28": "ext4-io-error",
    "EXT4-fs warning (device rbd12): ext4_end_bio:353: I/O error 10 writing to inode 13 starting "
    "block 35328)": "ext4-io-error",
    "EXT4-fs (rbd12): bad geometry: block count 524288 exceeds size of device (262144 blocks)": (
        "ext4-larger-than-device"
    ),
    "EXT4-fs (rbd12): VFS: Can't find ext4 filesystem": "no-file-system",
    # fs/jbd2/journal.c
    "Aborting journal on device rbd12-8.": "journal-aborted",
    "JBD2: I/O error when updating journal superblock for rbd12-8.": "journal-aborted",
    "JBD2: previous I/O error detected for journal superblock update for rbd12-8.": (
        "journal-io-error"
    ),
    # fs/xfs
    "XFS (rbd12): Metadata I/O Error (0x1) detected at xfs_trans_read_buf_map+0x1a/0x2b0 [xfs] "
    "(fs/xfs/xfs_trans_buf.c:296).  Shutting down filesystem.": "xfs-shutdown",
    "XFS (rbd12): Filesystem has been shut down due to log error (0x2).": "xfs-shutdown",
    'XFS (rbd12): metadata I/O error in "xfs_da_read_buf+0x1/0x2 [xfs]" at daddr 0x8 len 8 '
    "error 5": "xfs-error",
    "XFS (rbd12): log I/O error -5": "xfs-error",
    "XFS (rbd12): Corruption detected. Unmount and run xfs_repair": "xfs-corruption",
    # fs/btrfs/messages.c
    "BTRFS: error (device rbd12: state A) in btrfs_commit_transaction:2418: errno=-5 IO failure "
    "(Error while writing out transaction)": "btrfs-error",
    "BTRFS: error (device rbd12) in __btrfs_free_extent:3069: errno=-5 IO failure": "btrfs-error",
    "BTRFS info (device rbd12: state EA): forced readonly": "btrfs-error",
    # drivers/block/nbd.c
    "block nbd3: Connection timed out": "nbd-timeout",
    "block nbd3: Connection timed out, retrying (1/2 alive)": "nbd-timeout",
    "block nbd3: Possible stuck request 00000000deadbeef: control (read@0,4096B). Runtime 30 "
    "seconds": "nbd-timeout",
    "block nbd3: Dead connection, failed to find a fallback": "nbd-lost",
    "block nbd3: Send control failed (result -32)": "nbd-lost",
    "block nbd3: Receive data failed (result -104)": "nbd-lost",
    "block nbd3: Other side returned error (5)": "nbd-lost",
    # drivers/md/dm-thin.c
    "device-mapper: thin: 253:2: switching pool to out-of-data-space (queue IO) mode": (
        "thin-pool-stopped"
    ),
    "device-mapper: thin: 253:2: switching pool to read-only mode": "thin-pool-stopped",
    "device-mapper: thin: 253:2: switching pool to fail mode": "thin-pool-stopped",
    # kernel/hung_task.c (since 7.1 the second), fs/notify
    "INFO: task jbd2/rbd12-8:991 blocked for more than 122 seconds.": "hung-task",
    "INFO: task umount:991 blocked in I/O wait for more than 122 seconds.": "hung-task",
    "PID 77 (agent) failed to respond to fanotify queue for more than 30 seconds": (
        "fanotify-silent"
    ),
    # the command rbd, ceph-csi 3.12: internal/rbd/rbd_attach.go, internal/util/idlocker.go
    "rbd: unmap failed: (16) Device or resource busy": "unmap-failed",
    "rbd: unmap for spec (replicapool/csi-vol-9) failed (exit 16): (rbd: sysfs write failed)": (
        "unmap-failed"
    ),
    "rbd: unmap for spec (/dev/rbd12) failed (an error (exit status 16) occurred while running rbd "
    "args: [unmap /dev/rbd12]): (rbd: unmap failed)": "unmap-failed",
    "error unmapping volume (0001-0009-rook-ceph-01) from staging path (/s/globalmount): (busy)": (
        "unmap-failed"
    ),
    "rbd image replicapool/csi-vol-9 is still being used": "rbd-in-use",
    "an operation with the given Volume ID 0001-0009-rook-ceph-01 already exists": (
        "csi-operation-stuck"
    ),
    "rbd: map failed: (110) Connection timed out": "map-failed",
    "rbd: map failed: (5) Input/output error": "map-failed",
    "rbd: map failed: (6) No such device or address": "map-failed",
    # kubelet 1.27 to 1.35: kubelet_volumes.go
    'E1127 x.go:263] "There were many similar errors. Turn up verbosity to see them." '
    f'err="orphaned pod \\"{UID}\\" found, but failed to rmdir() volume at path '
    f'/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~csi/pvc-9: directory not empty" '
    "numErrs=2": "orphaned-pod",
    f'err="orphaned pod \\"{UID}\\" found, but error occurred when trying to remove the volumes '
    'dir: unlinkat /v: device or resource busy" numErrs=1': "orphaned-pod",
    'E1127 kubelet_volumes.go:244] "Failed to remove orphaned pod subdir" err="unlinkat /v: busy" '
    f'podUID="{UID}" path="/var/lib/kubelet/pods/{UID}/volume-subpaths"': "orphaned-pod",
    f'"Orphaned pod found, but volumes are not cleaned up" podUID="{UID}"': "orphaned-pod",
    # kubelet 1.27 to 1.35: operation_generator.go, volume/util/util.go, reconstruct.go
    f'Error: UnmountDevice failed for volume "pvc-9" {OF_CSI} on node "n" : rpc error: busy': (
        "unmount-failed"
    ),
    f'Error: UnmountVolume.TearDown failed for volume "pvc-9" {OF_CSI} pod "p" (UID: "{UID}") : '
    "kubernetes.io/csi: Unmounter.TearDownAt failed: rpc error": "unmount-failed",
    f'Error: GetDeviceMountRefs check failed for volume "pvc-9" {OF_CSI} on node "n" : the device '
    "mount path is still mounted by other references [/mnt]": "unmount-failed",
    f'Error: UnmapVolume.UnmapBlockVolume failed for volume "pvc-9" {OF_CSI} pod "p" (UID: '
    f'"{UID}") : blkUtil.DetachFileDevice failed. globalUnmapPath:/v, podUID: {UID}: '
    "GetLoopDevice failed for path /v: losetup -j /v failed: exit status 1": "raw-unmap-failed",
    f'Error: UnmapDevice.TearDownDevice failed for volume "pvc-9" {OF_CSI} on node "n" : rpc '
    "error": "raw-unmap-failed",
    f'Error: UnmapDevice failed for volume "pvc-9" {OF_CSI} on node "n" : the device is in use '
    "when it was no longer expected to be in use": "raw-unmap-failed",
    f'"Could not construct volume information, cleaning up mounts" podName="{UID}" '
    'volumeSpecName="pvc-9" err="no volume plugin matched"': "reconstruction-failed",
    f'"Cleaning up mounts for volume that could not be reconstructed" podName="{UID}" '
    'volumeSpecName="pvc-9"': "reconstruction-failed",
    # kube-controller-manager 1.27 to 1.34: attachdetach/reconciler/reconciler.go
    'Multi-Attach error for volume "pvc-9" Volume is already exclusively attached to one node and '
    "can't be attached to another": "multi-attach",
    '"Multi-Attach error: volume is already used by pods" pods=["default/a"] attachedTo=["n1"] '
    'volume="{volumeName: pvc-9}"': "multi-attach",
    # util-linux 2.30 to 2.42: libmount/src/context_mount.c, context_umount.c
    "umount: /var/lib/kubelet/x: target is busy.": "target-busy",
    "mount: /m: /dev/rbd12 already mounted or mount point busy.": "mount-point-busy",
    "mount: /m: /dev/rbd12 already mounted on /mnt.": "mount-point-busy",
    "mount: /m: WARNING: source write-protected, mounted read-only.": "mounted-read-only",
    "mount: /m: wrong fs type, bad option, bad superblock on /dev/rbd12, missing codepage or "
    "helper program, or other error.": "mount-refused",
    "mount: /m: can't read superblock on /dev/rbd12.": "mount-refused",
    "mount: /m: mount(2) system call failed: Structure needs cleaning.": "mount-refused",
    # mount-utils 0.27 to 0.35: mount_linux.go
    'I0101 mount_linux.go:589] Disk "/dev/rbd12" appears to be unformatted, attempting to format '
    'as type: "ext4" with options: [-F -m0 /dev/rbd12]': "format-attempt",
    "I01 mount_linux.go:599] Disk successfully formatted (mkfs): ext4 - /dev/rbd12 /s": "formatted",
    'E0101 format of disk "/dev/rbd12" failed: type:("ext4") target:("/s") options:("rw") '
    "errcode:(exit status 1) output:(mke2fs 1.47.0 Operation not permitted while setting up "
    "superblock)": "format-failed",
    "Configured to mount disk /dev/rbd12 as ext4 but current format is xfs, things might break": (
        "format-mismatch"
    ),
    "'fsck' found errors on device /dev/rbd12 but could not correct them: /dev/rbd12: UNEXPECTED "
    "INCONSISTENCY; RUN fsck MANUALLY.": "fsck-uncorrected",
}
# block/blk-core.c of Linux 5.15 to 6.12: the first word of "... error, dev rbd0, sector 8 op ...".
BLK_ERRORS = (
    "I/O", "timeout", "critical space allocation", "recoverable transport", "critical target",
    "critical nexus", "reservation conflict", "critical medium", "protection", "kernel resource",
    "device resource", "nonblocking retry", "device offline", "dm internal retry",
    "open zones exceeded", "active zones exceeded", "duration limit exceeded", "invalid",
)  # fmt: skip
BLK_LINE = "{} error, dev {}, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2"


@pytest.mark.parametrize("kind", BLK_ERRORS)
@pytest.mark.parametrize("name", ["rbd12", "dm-0", "nvme0n1p2"])
def test_audit_and_guard_know_every_error_of_the_block_layer(kind: str, name: str) -> None:
    """longhorn#14042: a failing disk said 'critical medium error'."""
    line = BLK_LINE.format(kind, name)
    hits = matched("kernel", line, devices=r"[\w-]+")
    assert [(hit.pattern, hit.groups) for hit in hits] == [("block-io-error", {"device": name})]
    log = lease.ErrorLog()
    log.readable = True
    log.note(line, 90.0)
    assert log.quiet_for(name, None, 100.0) == 10.0


def test_what_a_device_cannot_do_is_no_error_of_it() -> None:
    """mkfs asks every device whether it can discard and write zeros."""
    line = BLK_LINE.format("operation not supported", "rbd12")
    log = lease.ErrorLog()
    log.readable = True
    log.note(line, 90.0)
    assert matched("kernel", line) == [] and log.quiet_for("rbd12", None, 100.0) == math.inf


@pytest.mark.parametrize(
    "text",
    [text for text, name in EXACT.items() if name in ("block-io-error", "beyond-end-of-device")],
    ids=lambda v: str(v)[:40],
)
def test_guard_counts_what_the_audit_finds(text: str) -> None:
    log = lease.ErrorLog()
    log.readable = True
    log.note(text.replace("rbd12", "dm-0"), 90.0)
    assert log.quiet_for("dm-0", None, 100.0) == 10.0
    assert log.quiet_for("dm", None, 100.0) == math.inf


def test_patterns_say_who_prints_them() -> None:
    """A text is somebody's: with the program and the versions whose source has it."""
    assert [p.id for p in PATTERNS if not re.search(r"\d", p.printed_by)] == []


# What earlier versions of the file matched, and no supported program prints.
NEVER_PRINTED = (
    f'Orphaned pod "{UID}" found, but volume paths are still present on disk',  # kubelet 1.17
    "WARNING: source write-protected, mounted read-only.",
    "VFS: Can't find ext4 filesystem",
    "libceph: bad authorize reply",
    "'xfs_repair' found errors on device /dev/rbd12 but could not correct them",  # 1.18 only
    "lost async page write due to error on rbd12",
)


@pytest.mark.parametrize("text", NEVER_PRINTED)
def test_what_nobody_prints_is_no_pattern(text: str) -> None:
    assert matched("kernel", text) == [] and matched("userspace", text) == []


@pytest.mark.parametrize(("text", "expected"), EXACT.items(), ids=lambda v: str(v)[:40])
def test_exact_text_matches_one_pattern(text: str, expected: str) -> None:
    source = next(p.source for p in PATTERNS if p.id == expected)
    found = matched(source, text)
    assert [hit.pattern for hit in found] == [expected]
    if "rbd12" in text and expected not in ("journal-aborted", "journal-io-error", "hung-task"):
        assert found[0].groups["device"] == "rbd12"


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("/dev/rbd0", {"device": "rbd0"}),
        ("/dev/nbd3", {"device": "nbd3"}),
        ("/dev/rbd/replicapool/csi-vol-9", {"image": "replicapool/csi-vol-9"}),
        ("replicapool/csi-vol-9", {"image": "replicapool/csi-vol-9"}),
        ("pool/ns/csi-vol-9", {"image": "pool/ns/csi-vol-9"}),
    ],
)
def test_unmap_failed_names_a_device_or_an_image(spec: str, groups: dict[str, str]) -> None:
    """ceph-csi unmaps by the device's path where it knows it (rbd_attach.go)."""
    text = f"rbd: unmap for spec ({spec}) failed (an error (exit status 16)): (sysfs write failed)"
    assert [hit.groups for hit in matched("userspace", text)] == [groups]


def test_exact_texts_cover_all_patterns() -> None:
    assert {p.id for p in PATTERNS} == set(EXACT.values())


def test_lines_last_that_are_true_until_an_unmount() -> None:
    """An I/O error may be over: XFS and ext4 try again, and a full pool is extended."""
    assert {p.id for p in PATTERNS if p.lasts} == {
        "ext4-error", "journal-aborted", "xfs-shutdown", "xfs-corruption", "btrfs-error",
    }  # fmt: skip


def test_what_every_healthy_node_prints_now_and_then_is_no_trouble_at_once() -> None:
    """A ticket that expired is refused once; after a reboot kubelet finds directories of volumes
    that are not mounted."""
    often = {p.id: p.at_least for p in PATTERNS}
    assert often["ceph-key-refused"] == (3, 60.0) and often["ceph-wrong-cluster"][0] == 1
    assert matched("userspace", (
        f'I0101 reconstruct.go:74] "Could not construct volume information" podName="{UID}" '
        'volumeSpecName="pvc-9" err="volume pvc-9 is not mounted"'
    )) == []  # fmt: skip


ABOUT_A_DEVICE = (
    "I/O error, dev {}, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
    "Buffer I/O error on dev {}, logical block 9, async page read",
    "EXT4-fs ({}): INFO: recovery required on readonly filesystem",
    "EXT4-fs ({}): Remounting filesystem read-only",
    "EXT4-fs error (device {}): ext4_find_entry:1682: inode #2: comm ls: reading directory",
    "EXT4-fs ({}): VFS: Can't find ext4 filesystem",
    "Aborting journal on device {}-8.",
)


@pytest.mark.parametrize(
    ("driver", "name", "another"),
    [
        ("sd", "sdb", "sr0"),
        ("sd", "sdaa3", "vda"),
        ("virtblk", "vda", "sda"),
        ("device-mapper", "dm-3", "sda"),
        ("blkext", "nvme0n1", "sda"),
        ("loop", "loop4", "dm-4"),
        ("nbd", "nbd0p1", "rbd0"),
    ],
)
@pytest.mark.parametrize("text", ABOUT_A_DEVICE)
def test_device_patterns_match_watched_drivers_only(
    text: str, driver: str, name: str, another: str
) -> None:
    devices = follower.device_names((driver,))
    hits = matched("kernel", text.format(name), devices=devices)
    assert [hit.groups["device"] for hit in hits] == [name]
    assert matched("kernel", text.format(another), devices=devices) == []


def test_ordinary_lines_match_nothing() -> None:
    lines = (
        'I1121 kubelet.go:2463] "SyncLoop UPDATE" source="api" pods=["default/web-0"]',
        'MountVolume.SetUp succeeded for volume "pvc-9"',
        "libceph: client4144 fsid 6e9f0c4c-1111-2222-3333-0123456789ab",
        "libceph: mon0 (1)10.0.0.1:6789 session established",
        "rbd: rbd0: capacity 2147483648 features 0x3d",
        "EXT4-fs (rbd0): mounted filesystem with ordered data mode. Opts: (null)",
        "I/O error, dev sda, sector 1",
        "EXT4-fs error (device sda1): ext4_lookup:1",
    )
    for line, source in itertools.product(lines, ("kernel", "userspace")):
        assert matched(source, line) == []


def test_load_adds_and_replaces_operator_patterns(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "- {id: my-line, source: userspace, anchor: teapot, regex: 'a teapot (?P<device>\\w+)',\n"
        "   severity: critical, meaning: m, advice: a}\n"
        "- {id: rbd-in-use, source: userspace, anchor: never, regex: never, severity: info,\n"
        "   meaning: m, advice: a}\n"
    )
    loaded = patterns.load(own)
    assert len(loaded) == len(PATTERNS) + 1
    assert [h.pattern for h in matched("userspace", "a teapot rbd3", loaded)] == ["my-line"]
    assert matched("userspace", "rbd image rbd/x is still being used", loaded) == []


MISFIT = """
- {id: x, source: kernel, anchor: abc, regex: abc, severity: info, meaning: m, advice: a,
   examples: [xyz]}
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- {id: x, regex: '(', anchor: abc, source: kernel}", "x"),
        ("- {id: x}", "x"),
        ("a: b", "list"),
        ("- [", "YAML"),
        (MISFIT, "own example"),
        (MISFIT.replace("examples: [xyz]", "at_least: [0, 1]"), r"at_least\.0"),
    ],
)
def test_load_names_the_bad_pattern(tmp_path: Path, text: str, named: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(kit.errors.SettingsError, match=named) as caught:
        patterns.load(own)
    assert str(own) in str(caught.value)


def test_log_source_needs_one_valid_origin() -> None:
    with pytest.raises(ValueError, match="last two"):
        LogSource(name="x", files="/var/*/pods/a/b.log")
    with pytest.raises(ValueError, match="either"):
        LogSource(name="x")


def test_lines_about_mappings_are_read_whatever_is_watched() -> None:
    """An encrypted volume's file system lies on one."""
    made = follower.configuration(LogSettings(), PATTERNS, ("rbd",))
    assert re.fullmatch(made.devices, "dm-3") and re.fullmatch(made.devices, "rbd0")
    assert not re.fullmatch(made.devices, "sda1")
