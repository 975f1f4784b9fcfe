"""Loopback ports for servers of tests.

They lie below the ephemeral range, where no outgoing connection takes one, and are handed out in
turn to all test processes of this user on the machine: a server that is killed and started again
finds its port free, also with other runs beside it.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 12_000, 31_999
_NEXT = Path(tempfile.gettempdir()) / f"nodeagent-test-ports-{os.getuid()}"


def free(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` ports that nothing listens on."""
    return [free_range(1, host)[0] for _ in range(count)]


def free_range(length: int, host: str = "127.0.0.1") -> tuple[int, int]:
    """First and last of ``length`` consecutive ports that nothing listens on."""
    with _NEXT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        first = int(file.read() or _FIRST)
        for _ in range(_FIRST, _LAST, length):
            if first + length > _LAST:
                first = _FIRST
            if all(_is_free(port, host) for port in range(first, first + length)):
                file.truncate(0)
                file.write(str(first + length))
                return first, first + length - 1
            first += length
    raise RuntimeError(f"no {length} consecutive free ports on {host}")


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
