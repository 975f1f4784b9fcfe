"""Prove what the kernel enforces by an attempt, instead of believing what was configured.

A child process joins the guarded cgroup, makes a block device node with a major number that no
driver can have (4095), and opens it for writing. EPERM is the guard's answer; ENXIO means that the
guard let the open through. No device is touched either way. The child imports nothing else of ours.
"""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

DEADLINE_SECONDS = 10.0
PROOFS = ("enforced", "let through")
_MAJOR = 4095  # CANARY_MAJOR in guard.bpf.c


async def prove(cgroup: Path, root: bool, directory: Path) -> str:
    """``enforced``, ``let through``, or ``unknown: why`` for a process in ``cgroup``.

    ``root``: it is the root of the hierarchy, where the child is already.
    """
    # Not at the top: the child imports this module, and starts faster without them.
    import kit.child
    import kit.errors

    joined = "" if root else str(cgroup)
    try:
        proof = await kit.child.call(attempt, joined, str(directory), deadline=DEADLINE_SECONDS)
    except (kit.errors.AgentError, OSError, RuntimeError) as error:
        return f"unknown: {error}"
    return str(proof)


def attempt(cgroup: str, directory: str) -> str:
    """In the child. ``cgroup``: to join first; empty for none."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text("0")
    with contextlib.suppress(OSError):
        os.makedirs(directory, 0o700, exist_ok=True)
    # The state directory's file system may be mounted nodev; /dev never is.
    proof = _attempt(directory)
    return _attempt("/dev") if proof.startswith("unknown") else proof


def _attempt(directory: str) -> str:
    try:
        made = tempfile.TemporaryDirectory(prefix=".guard-", dir=directory)
    except OSError as error:
        return f"unknown: cannot make a directory in {directory} ({error.strerror})"
    with made as folder:
        node = Path(folder) / "canary"
        try:
            os.mknod(node, 0o60600, os.makedev(_MAJOR, 0))
        except OSError as error:
            return f"unknown: cannot make a device node in {directory} ({error.strerror})"
        try:
            os.close(os.open(node, os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EPERM:
                return "enforced"
            if error.errno in (errno.ENXIO, errno.ENODEV):
                return "let through"
            return f"unknown: opening the node in {directory}: {error.strerror}"
        return "unknown: the node could be opened"
