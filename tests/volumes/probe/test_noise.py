"""A LUKS mapping that was never written reads as noise, and noise may look like anything
(topolvm#1126): what libblkid finds there counts only where something lies below it. On files."""

import os
from pathlib import Path

import pytest

from linux import blkid
from volumes.probe import examine
from volumes.probe.examine import Kind

MiB = 2**20
SIZE = 64 * MiB
START = 16 * MiB
HFSPLUS = {"TYPE": "hfsplus", "USAGE": "filesystem", "SBMAGIC": "H+", "SBMAGIC_OFFSET": "1024"}
JMICRON = {
    "TYPE": "jmicron_raid_member", "USAGE": "raid", "SBMAGIC": "JM",
    "SBMAGIC_OFFSET": str(SIZE - 512),
}  # fmt: skip
DOS = {"PTTYPE": "dos", "PTMAGIC_OFFSET": "510"}
EXT4 = {"TYPE": "ext4", "USAGE": "filesystem", "SBMAGIC_OFFSET": "1080"}
NO_PLACE = {"TYPE": "hfsplus", "USAGE": "filesystem"}


def test_a_mapping_whose_header_lies_elsewhere_holds_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of LUKS with dm-integrity the device below has no header."""
    mapping, below = tmp_path / "mapping", tmp_path / "below"
    for path in (mapping, below):
        with path.open("wb") as stream:
            stream.truncate(SIZE)
    monkeypatch.setattr(blkid, "probe", lambda descriptor: (blkid.FOUND, EXT4))
    descriptor = os.open(mapping, os.O_RDONLY | os.O_DIRECT)
    try:
        for lower in (str(below), str(tmp_path / "gone")):
            seen = examine._content(str(mapping), descriptor, SIZE, 1, lower)
            assert seen.verdict is Kind.HAS_FS
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("found", "written", "kind"), [
    (HFSPLUS, None, Kind.BLANK_VERIFIED),
    (JMICRON, None, Kind.BLANK_VERIFIED),
    (DOS, None, Kind.BLANK_VERIFIED),
    (NO_PLACE, None, Kind.HAS_FS),  # nobody knows where: it counts
    (EXT4, 1024, Kind.HAS_FS),
    (EXT4, 4095, Kind.HAS_FS),
    (JMICRON, SIZE - 4096, Kind.HAS_FS),
    (HFSPLUS, 2 * MiB, Kind.UNKNOWN_CONTENT),  # not what it looks like, but not blank
])  # fmt: skip
def test_what_is_found_in_a_mapping_needs_something_below_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, str],
    written: int | None,
    kind: Kind,
) -> None:
    mapping, below = tmp_path / "mapping", tmp_path / "below"
    for path, size in ((mapping, SIZE), (below, START + SIZE)):
        with path.open("wb") as stream:
            stream.truncate(size)
    if written is not None:
        with below.open("r+b") as stream:
            stream.seek(START + written)
            stream.write(b"x")
    monkeypatch.setattr(blkid, "probe", lambda descriptor: (blkid.FOUND, found))
    monkeypatch.setattr(blkid, "luks_data_offset", lambda descriptor: START)
    descriptor = os.open(mapping, os.O_RDONLY | os.O_DIRECT)
    try:
        seen = examine._content(str(mapping), descriptor, SIZE, 1, str(below))
        plain = examine._content(str(mapping), descriptor, SIZE, 1, "")
    finally:
        os.close(descriptor)
    assert seen.verdict is kind
    assert plain.has_content, "of a device that is no mapping it always counts"
