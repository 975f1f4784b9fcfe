"""Whether a file system makes changes of metadata durable in the order they were made."""

import os
from pathlib import Path

from linux import mountinfo

_SYS = Path("/sys")


def keeps_order(descriptor: int) -> bool:
    """True where a journal does (ext4 with one, XFS); False when it cannot be told.

    Without, a power cut may keep a later change and lose an earlier one.
    """
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
