"""A process that tries to open a device for writing as fast as it can."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from tests.testbed import cell

# Tries to open the device for writing as fast as it can, under a name of its choice, until told to
# stop; says how often it was let in and refused.
_PROGRAM = """
import os, sys
device, name = sys.argv[1:3]
comm = os.open('/proc/self/comm', os.O_WRONLY)
os.write(comm, name.replace('*', '').encode())
opened = refused = 0
print('going', flush=True)
os.set_blocking(0, False)
while True:
    if '*' in name:
        os.write(comm, name.replace('*', str(opened + refused)).encode())
    try:
        os.close(os.open(device, os.O_WRONLY)); opened += 1
    except PermissionError:
        refused += 1
    if (opened + refused) % 64 == 0:
        try:
            if os.read(0, 1) == b'':
                break
        except BlockingIOError:
            pass
print(opened, refused)
"""


@contextlib.contextmanager
def hammer(where: cell.Cell, device: str, name: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """A process of the cell called ``name`` at work (with ``*`` in it: called otherwise at each
    attempt); ends it and returns (opened, refused)."""
    process = subprocess.Popen(
        ["sh", "-c", 'echo 0 > "$CELL/cgroup.procs" && exec "$@"', "sh",
         sys.executable, "-c", _PROGRAM, device, name],
        env={**os.environ, "CELL": str(where.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "going\n"

    def stop() -> tuple[int, int]:
        assert process.stdout is not None and process.stdin is not None
        process.stdin.close()
        opened, refused = process.stdout.read().split()
        return int(opened), int(refused)

    try:
        yield stop
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
