"""Whether a file system makes metadata changes durable in the order in which they were made.

A file system with a journal does. Without one, a power cut may keep a later rename and lose an
earlier one, so callers must sync between the two.
"""

import os
from pathlib import Path

from linux import mountinfo

_SYS = Path("/sys")


def keeps_order(descriptor: int) -> bool:
    """True on XFS and on ext4 with a journal; False on others and when unknown."""
    device = os.fstat(descriptor).st_dev
    number = os.major(device), os.minor(device)
    fstype = next((mount.fstype for mount in mountinfo.read() if mount.device == number), "")
    if fstype == "xfs":
        return True
    if fstype != "ext4":
        return False
    try:
        name = os.path.basename(os.readlink(_SYS / "dev/block" / f"{number[0]}:{number[1]}"))
        task = (_SYS / "fs/ext4" / name / "journal_task").read_text()
    except OSError:
        return False
    return task.strip() != "<none>"
