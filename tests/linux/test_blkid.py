import os
import struct
import subprocess
from pathlib import Path

import pytest

from linux import blkid

MIB = 2**20


def probed(path: Path) -> tuple[int, dict[str, str]]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return blkid.probe(descriptor)
    finally:
        os.close(descriptor)


def empty(folder: Path) -> Path:
    path = folder / "image"
    with path.open("wb") as stream:
        stream.truncate(64 * MIB)
    return path


def test_probe_distinguishes_empty_from_found(tmp_path: Path) -> None:
    image = empty(tmp_path)
    assert probed(image) == (blkid.NOTHING, {})
    subprocess.run(["mkfs.ext4", "-q", "-L", "name", str(image)], check=True)
    result, values = probed(image)
    assert result == blkid.FOUND
    assert (values["TYPE"], values["LABEL"], len(values["UUID"])) == ("ext4", "name", 36)


def test_probe_finds_a_partition_table(tmp_path: Path) -> None:
    image = empty(tmp_path)
    entry = struct.pack("<4xB3xII", 0x83, 2048, 4096)
    with image.open("r+b") as stream:
        stream.seek(446)
        stream.write(entry.ljust(64, b"\0") + b"\x55\xaa")
    result, values = probed(image)
    assert (result, values["PTTYPE"]) == (blkid.FOUND, "dos")


def test_probe_of_what_is_not_a_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        probed(tmp_path)


def test_a_partition_table_says_where_its_magic_lies(tmp_path: Path) -> None:
    """In a LUKS mapping what lies there tells a table from noise."""
    image = empty(tmp_path)
    with image.open("r+b") as stream:
        stream.seek(446)  # one partition of Linux, and the magic
        stream.write(struct.pack("<8sII", b"\0\0\2\0\x83\0\0\0", 2048, 100000))
        stream.seek(510)
        stream.write(b"\x55\xaa")
    result, values = probed(image)
    assert (result, values["PTTYPE"]) == (blkid.FOUND, "dos")
    assert values["PTMAGIC_OFFSET"] == "510"
