"""Damage files the way a bad disk does: the bytes change, times and size do not."""

import os
from pathlib import Path


def flip(path: Path, offset: int | None = None) -> bytes:
    """Invert the byte at ``offset`` (default: in the middle); returns the right content."""
    right = path.read_bytes()
    status = path.stat()
    wrong = bytearray(right)
    wrong[len(wrong) // 2 if offset is None else offset] ^= 0xFF
    path.write_bytes(wrong)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return right
