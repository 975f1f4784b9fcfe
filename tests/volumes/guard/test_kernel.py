"""The layouts shared with the BPF program, and the settings in its terms."""

import struct
from pathlib import Path

from linux import blockdev
from volumes import settings
from volumes.guard import kernel


def test_event_unpacks_program_layout() -> None:
    raw = struct.pack("=QQ6I16s16s256s", 5_000_000_000, 25, 7, 6, 252, 0, 2, 12,
                      b"mkfs.ext4", b"csi", b"mkfs\0-F\0/dev\0garbage")  # fmt: skip
    event = kernel.Event.unpack(raw + bytes(8))
    assert (event.time, event.number, event.denied) == (5.0, (252, 0), True)
    assert (event.program, event.arguments) == ("mkfs.ext4", ("mkfs", "-F", "/dev"))


def test_layouts_match_program_source() -> None:
    text = kernel.OBJECT.with_name("guard.bpf.c").read_text()
    assert "enum { MODE_OFF, MODE_DRY_RUN, MODE_ENFORCE };" in text
    names = ", ".join(name.upper() for name in kernel.COUNTERS)
    assert f"enum {{ {names}, COUNTERS }};" in text
    assert len(text.splitlines()) < 200


def test_wanted_counts_per_device_majors_as_rbd(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n\nBlock devices:\n 43 nbd\n252 rbd0\n253 rbd\n259 blkext\n"
    )
    majors = blockdev.majors(tmp_path)
    assert majors == {43: "nbd", 252: "rbd", 253: "rbd", 259: "blkext"}
    wanted = kernel.wanted(settings.GuardSettings(), kernel.Mode.ENFORCE, majors)
    assert wanted.majors == {43, 252, 253}
