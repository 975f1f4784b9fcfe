"""Free loopback ports, chosen at run time."""

import socket


def free(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` ports that nothing listened on a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_range(length: int, host: str = "127.0.0.1") -> tuple[int, int]:
    """First and last of ``length`` consecutive free ports, below the ephemeral range."""
    start = 20000 + (free(1, host)[0] * 7919) % 9000  # different runs begin at different places
    for first in range(start, start + 3000, length):
        try:
            sockets = []
            for port in range(first, first + length):
                sockets.append(socket.socket())
                sockets[-1].bind((host, port))
            return first, first + length - 1
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError(f"no {length} consecutive free ports on {host}")
