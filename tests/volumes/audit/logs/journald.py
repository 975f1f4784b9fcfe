"""A real journald in a mount namespace of its own, with another machine's id; a unit that logs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.testbed import blockdev, waiting
from tests.volumes.audit.stage import UNIFIED

MACHINE = "0123456789abcdef0123456789abcdef"
# As on a host with persistent storage, after the boot: 'flushed' says that /var can be written.
_SCRIPT = """
mount --bind "$1/run" /run && mount -t tmpfs tmpfs /var/log && mkdir /var/log/journal &&
mount --bind "$1/journal" /var/log/journal && mount --bind "$1/id" /etc/machine-id &&
exec /usr/lib/systemd/systemd-journald
"""
# journald takes the unit from the sender's cgroup while it is there.
_SENDER = """
import socket, sys
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for line in sys.stdin:
    sender.sendto(b'MESSAGE=' + line.rstrip().encode() + b'\\nPRIORITY=6\\n', 'socket')
"""


class Journald:
    def __init__(self, directory: Path, unit: str, sender: "subprocess.Popen[str]") -> None:
        self.directory = str(directory)  # as /var/log/journal
        self.unit = unit
        self._sender = sender

    def write(self, line: str) -> None:
        """Returns before the line is in the journal."""
        assert self._sender.stdin is not None
        self._sender.stdin.write(line.rstrip() + "\n")
        self._sender.stdin.flush()

    def read(self) -> str:
        command = (
            "journalctl",
            f"--directory={self.directory}",
            f"--unit={self.unit}",
            "--output=cat",
        )
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Journald]:
    journal, socket = folder / "journal", folder / "run/systemd/journal"
    (journal / MACHINE).mkdir(parents=True)
    socket.mkdir(parents=True)
    (socket / "flushed").touch()
    (folder / "id").write_text(MACHINE + "\n")
    # A name of its own: a run that was killed leaves its cgroup.
    unit = f"nodeagent-test-{os.urandom(4).hex()}.service"
    cgroup = UNIFIED / "system.slice" / unit
    slice_was_there = cgroup.parent.exists()
    cgroup.mkdir(parents=True)
    apart = ("unshare", "--mount", str(blockdev.APART), str(folder), "--")
    daemon = subprocess.Popen([*apart, "sh", "-c", _SCRIPT, "sh", str(folder)])
    sender: subprocess.Popen[str] | None = None
    try:

        def started() -> bool:
            assert daemon.poll() is None, "journald ended"
            return (socket / "socket").exists() and bool(list(journal.glob("*/*.journal")))

        waiting.until(started, 30, "journald to start", pause=0.05)
        sender = subprocess.Popen(
            [sys.executable, "-c", _SENDER], stdin=subprocess.PIPE, text=True, cwd=socket
        )
        (cgroup / "cgroup.procs").write_text(str(sender.pid))
        running = Journald(journal, unit, sender)
        running.write("a line from before the test")
        waiting.until(lambda: "before the test" in running.read(), 30, "a line", pause=0.05)
        yield running
    finally:
        for process in (sender, daemon):
            if process is not None:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=waiting.limit(20))
        if sender is not None and sender.stdin is not None:
            sender.stdin.close()
        _remove(cgroup)
        if not slice_was_there:
            _remove(cgroup.parent)


def _remove(cgroup: Path) -> None:
    """A cgroup can be removed a moment after its last process has been waited for."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.05)
