"""patterns.yaml against the exact texts of the programs and near misses; loading patterns. Pure."""

import itertools
from pathlib import Path

import pytest

import kit.errors
from volumes.audit.logs import follower, matcher, patterns
from volumes.settings import LogSource

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


# The format strings of the facts, filled in. Kept apart from the pattern file on purpose: a text
# that is changed there to fit a pattern must still be found here.
EXACT = {
    "libceph: mon2 (1)10.1.2.3:6789 feature set mismatch, my 107b86a842aca < server's "
    "40107b86a842aca, missing 400000000000000": "ceph-feature-mismatch",
    "libceph: osd1 (1)10.1.2.3:6801 protocol version mismatch, my 24 != server's 10": (
        "ceph-protocol-mismatch"
    ),
    "libceph: mon0 (1)10.1.2.3:6789 protocol feature mismatch, my required 800000 > server's 0, "
    "need 800000": "ceph-protocol-mismatch",
    "libceph: no match of type 2 in addrvec": "ceph-messenger-mismatch",
    "libceph: bad fsid, had 00000000-0000-0000-0000-000000000001 got "
    "00000000-0000-0000-0000-000000000002": "ceph-wrong-cluster",
    "libceph: bad authorize reply": "ceph-wrong-cluster",
    "libceph: osd3 (1)10.1.2.3:6801 socket closed (con state OPEN)": "ceph-session-flaps",
    "libceph: mon0 (2)10.1.2.3:3300 socket closed (con state CONNECTING)": "ceph-session-flaps",
    "libceph: mon0 (1)10.1.2.3:6789 session lost, hunting for new mon": "ceph-session-flaps",
    "libceph: osd3 down": "ceph-session-flaps",
    "libceph: read_partial_message bad hdr crc 3735928559 != expected 1": "ceph-corrupt-message",
    "rbd: rbd12: image uses unsupported features: 0x40": "rbd-unsupported-features",
    "rbd: rbd12: encountered watch error: -107": "rbd-watch-lost",
    "rbd: rbd12: failed to reregister watch: -108": "rbd-watch-lost",
    "rbd: rbd12: failed to lock header: -30": "rbd-lock-broken",
    "rbd: rbd12: breaking header lock owned by client4144": "rbd-lock-broken",
    "rbd: rbd12: failed to blocklist client4144: -110": "rbd-lock-broken",
    "rbd: rbd12: blacklist of client4144 failed: -110": "rbd-lock-broken",
    "rbd: rbd12: read at objno 4 593920~4096 result -108": "rbd-io-error",
    "rbd: rbd12: read result -108": "rbd-io-error",
    "blk_update_request: I/O error, dev rbd12": "block-io-error",
    "I/O error, dev rbd12, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2": (
        "block-io-error"
    ),
    "Buffer I/O error on dev rbd12, logical block 9, async page read": "block-io-error",
    "EXT4-fs (rbd12): INFO: recovery required on readonly filesystem": "ext4-recovery-refused",
    "EXT4-fs (rbd12): write access unavailable, cannot proceed (try mounting with noload)": (
        "ext4-recovery-refused"
    ),
    "EXT4-fs error (device rbd12): __ext4_find_entry:1612: inode #2: comm ls: reading directory": (
        "ext4-error"
    ),
    "EXT4-fs (rbd12): Remounting filesystem read-only": "ext4-error",
    "Aborting journal on device rbd12-8.": "journal-aborted",
    "VFS: Can't find ext4 filesystem": "no-file-system",
    "block nbd3: Connection timed out": "nbd-timeout",
    "INFO: task jbd2/rbd12-8:991 blocked for more than 122 seconds.": "hung-task",
    "PID 77 (agent) failed to respond to fanotify queue for more than 30 seconds": (
        "fanotify-silent"
    ),
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
    'Orphaned pod "1c6f2fcb-2a35-4a3c-a1f0-3d2fd3b0f1aa" found, but volume paths are still present '
    "on disk : There were a total of 3 errors similar to this.": "orphaned-pod",
    'UnmountDevice failed for volume "pvc-9" (UniqueName: "x") on node "n"': "unmount-failed",
    "umount: /var/lib/kubelet/x: target is busy.": "target-busy",
    "mount: /m: /dev/rbd12 already mounted or mount point busy.": "mount-point-busy",
    "mount: /m: WARNING: source write-protected, mounted read-only.": "mounted-read-only",
    'I0101 mount_linux.go:589] Disk "/dev/rbd12" appears to be unformatted, attempting to format '
    'as type: "ext4" with options: [-F -m0 /dev/rbd12]': "format-attempt",
    "I01 mount_linux.go:599] Disk successfully formatted (mkfs): ext4 - /dev/rbd12 /s": "formatted",
    'E0101 format of disk "/dev/rbd12" failed: type:("ext4") target:("/s") options:("rw") '
    "errcode:(exit status 1) output:(mke2fs 1.47.0 Operation not permitted while setting up "
    "superblock)": "format-failed",
    "Configured to mount disk /dev/rbd12 as ext4 but current format is xfs, things might break": (
        "format-mismatch"
    ),
    "'fsck' found errors on device /dev/rbd12 but could not correct them": "fsck-uncorrected",
}


@pytest.mark.parametrize(("text", "expected"), EXACT.items(), ids=lambda v: str(v)[:40])
def test_exact_text_matches_one_pattern(text: str, expected: str) -> None:
    source = next(p.source for p in PATTERNS if p.id == expected)
    found = matched(source, text)
    assert [hit.pattern for hit in found] == [expected]
    if "rbd12" in text and expected not in ("journal-aborted", "hung-task"):
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
