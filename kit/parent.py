"""A process that must not outlive the one that started it (prctl(2), PR_SET_PDEATHSIG).

In kit and not in linux, as the child of ``kit.child`` needs it; imports as little as may be.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with() -> None:
    """Be killed (SIGKILL) when the thread that started this process ends, however it ends.

    OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")
