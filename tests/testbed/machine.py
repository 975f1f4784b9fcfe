"""One run of real tests at a time on a machine.

Real tests look at the whole machine and change it: mounts, loop devices, the kernel's log, caches.
So a run has a lock on a file that all users and all clones of the machine share. The kernel frees
it when the run dies. Workers of one run, and tests that its tests start, share it: they have the
name of the run from the environment. Unit tests do not ask for it.

    python -m tests.testbed.machine COMMAND...   the command while nobody else has the machine
"""

import contextlib
import fcntl
import os
import pwd
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

RUN = "NODEAGENT_TEST_RUN"
# Not of TMPDIR and not of the clone: all runs have to find the same one. Tests of the tests name
# another one.
_FOLDER = "/run/lock" if Path("/run/lock").is_dir() else "/tmp"
FILE = Path(os.environ.get("NODEAGENT_TEST_LOCK", f"{_FOLDER}/nodeagent-real-tests"))
WAIT_SECONDS = 12 * 3600.0  # the long set may take eight hours
_TELL_SECONDS = 600.0
_SILENT_SECONDS = 3.0  # another worker of the same run may be about to say whose the machine is
_PAUSE = 1.0


class BusyError(Exception):
    """Another run did not end in time, or the file of the lock cannot be used."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def held(
    file: Path = FILE, seconds: float = WAIT_SECONDS, say: Callable[[str], None] = tell
) -> Iterator[None]:
    """Wait for the run that has the machine, at most ``seconds``, and then have it."""
    of_workers = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # the same one in all of them
    run = os.environ.setdefault(RUN, of_workers or uuid.uuid4().hex)
    begin = time.monotonic()
    tell_at = begin + _SILENT_SECONDS
    while (descriptor := _taken(file, run)) is None:
        now = time.monotonic()
        if now - begin > seconds:
            raise BusyError(
                f"{_holder(file)} has the machine for longer than {seconds / 3600:.3g} h. Is it "
                f"stuck? End it, its lock goes with it; 'lslocks' and 'fuser {file}' show who "
                "holds that. Then start again"
            )
        if now >= tell_at:
            tell_at = now + _TELL_SECONDS
            say(
                f"real tests wait for {_holder(file)}, at most {seconds / 3600:.3g} h: one run of "
                f"them at a time on a machine ({file}). Unit tests do not wait: -m 'not real'"
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        os.close(descriptor)


def _taken(file: Path, run: str) -> int | None:
    """The descriptor that has the lock; None while another run has it.

    A run first has the lock alone, writes who it is, and then shares it with those of its name.
    """
    descriptor = _opened(file)
    try:
        if _locked(descriptor, fcntl.LOCK_EX):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{run} {_ourselves()}\n".encode(), 0)
        # Between the two locks another run may have it for a moment: whose it is, is read again.
        if _locked(descriptor, fcntl.LOCK_SH) and _is_of(descriptor, file, run):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _opened(file: Path) -> int:
    """Everybody may make files in its folder: it must be a plain file under this one name."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(file, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                made = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(made, 0o666)  # whatever the umask: runs of all users write who they are
                os.close(made)
            descriptor = os.open(file, flags)
    except OSError as error:
        raise BusyError(f"{file}: {error.strerror}; remove it, real tests lock it") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise BusyError(f"{file}: not a plain file of its own; remove it, real tests lock it")
    return descriptor


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_of(descriptor: int, file: Path, run: str) -> bool:
    """Whether the file is this run's, and still the one that others find."""
    with contextlib.suppress(OSError):
        same = os.path.samestat(os.fstat(descriptor), os.stat(file, follow_symlinks=False))
        return same and os.pread(descriptor, 4096, 0).startswith(f"{run} ".encode())
    return False


def _ourselves() -> str:
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
        since = time.strftime("%F %T UTC", time.gmtime())
        return f"pid {os.getpid()} of {user} in {Path.cwd()}, since {since}"
    return f"pid {os.getpid()}"


def _holder(file: Path) -> str:
    with contextlib.suppress(OSError):
        if said := file.read_text(errors="replace").partition(" ")[2].strip():
            return f"the run of {said}"
    return "another run"


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    try:
        with held():
            sys.exit(subprocess.call(sys.argv[1:]))
    except BusyError as error:
        sys.exit(str(error))
