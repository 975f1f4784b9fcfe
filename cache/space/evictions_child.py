"""What child processes look at and delete for an eviction (``evictions``). Imports little: the
process that calls fork from keeps what they load as long as the agent runs.
"""

import os
import time
from pathlib import Path
from typing import Any

from cache.fill import protocol, space
from cache.fill.protocol import Least
from cache.store import image_copy
from linux import in_use, loop, mountinfo, procfs

_LOOKS, _LOOK_SECONDS = 20, 0.1  # the kernel ends a loop device some time after its last mount


def is_beyond(folder: str, limits: dict[str, Any]) -> bool:
    """Whether the copy in ``folder`` takes more than the limits leave it. OSError."""
    allowed = protocol.Limits(**{**limits, "least": Least(**limits["least"])})
    used = image_copy.used(Path(folder))
    left = space.balance(os.statvfs(folder), allowed, used=used, inodes=image_copy.INODES)
    return used > 0 and (left.bytes < 0 or left.inodes < 0)


def discard(folder: str) -> str:
    """Delete the copy in ``folder`` unless a device shows it; that device, or ''. OSError."""
    copy = os.path.realpath(Path(folder) / image_copy.IMAGE)
    for left in reversed(range(_LOOKS)):
        shown = loop.over(copy)
        if not shown:
            break
        if not left:
            return shown[0]
        time.sleep(_LOOK_SECONDS)
    image_copy.discard(Path(folder))
    return ""


def given_to(target: str) -> str:
    """A process in whose mount namespace the view is mounted at another place; '' when none is.

    A pod sees it there, whether or not it has a file open.
    """
    top = mountinfo.top(target)
    seen: set[tuple[int, str]] = set()
    for pid, key in procfs.views() if top is not None else ():
        if key in seen:
            continue
        seen.add(key)
        try:
            for mount in mountinfo.of(pid):
                if top is not None and mount.device == top.device and mount.target != target:
                    return str(in_use.holder(pid, f"sees it at {mount.target}"))
        except OSError:
            continue  # just ended
    return ""
