"""Whether the kernel's clock is kept in step (adjtimex(2))."""

import ctypes
from dataclasses import dataclass

from linux import syscalls

_UNSYNC = 0x40
_ERROR = 5  # TIME_ERROR


@dataclass(frozen=True)
class ClockState:
    synchronised: bool
    max_error_seconds: float  # the kernel's own bound


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def state() -> ClockState:
    """Read only; nothing is adjusted. OSError."""
    timex = _Timex()
    result = syscalls.checked(syscalls.libc.adjtimex(ctypes.byref(timex)), "adjtimex")
    return ClockState(
        synchronised=result != _ERROR and not timex.status & _UNSYNC,
        max_error_seconds=timex.maxerror / 1e6,
    )
