"""How long tasks of this machine have waited, as the kernel counts it (PSI)."""

from pathlib import Path

FILE = Path("/proc/pressure/io")


def io_stalled(file: Path = FILE) -> float | None:
    """Seconds since boot in which at least one task waited for I/O: a disk, or a network file
    system. None where the kernel does not count it (CONFIG_PSI, psi=1)."""
    try:
        for line in file.read_text(encoding="ascii").splitlines():
            kind, *fields = line.split()
            if kind == "some":
                return int(dict(field.split("=") for field in fields)["total"]) / 1e6
    except (OSError, ValueError, KeyError):
        pass
    return None
