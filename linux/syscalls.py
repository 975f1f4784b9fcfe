"""The C library by ctypes: one handle, errors as OSError."""

import ctypes
import os
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """``result`` of a call that returns -1 on error; OSError naming ``what`` then."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def syscall(number: int, what: str, *arguments: Any) -> int:
    """A system call without a wrapper in the C library. Integers are passed as C longs."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(int(libc.syscall(ctypes.c_long(number), *passed)), what)
