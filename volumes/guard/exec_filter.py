"""The exec guard: a process that is asked before a formatter runs. Weaker than the kernel program.

Run as a script. Standard input: JSON lines {"mode", "majors", "cgroup", "leases": {"7:0": until}},
the last one counts. Standard output: a JSON line for each refusal. Dies with its parent, and then
nothing is guarded (fail-open); it does not see programs that format by themselves, copies under
other names, or files written by redirection.
"""

import json
import os
import re
import select
import stat
import sys
import time
from pathlib import Path
from typing import Any

_FORMATTERS = re.compile(
    r"(mkfs(\..+)?|mke2fs|mkswap|wipefs|blkdiscard|parted|sfdisk|fdisk|sgdisk|cryptsetup|dd|pvcreate"
    r"|mdadm|mkntfs|mkdosfs)"
)
_FOLDERS = ("sbin", "usr/sbin", "bin", "usr/bin", "usr/local/sbin")
_SAFE_CRYPTSETUP = frozenset(
    {"luksOpen", "open", "luksClose", "close", "luksDump", "isLuks", "status"}
)
_RESCAN_SECONDS = 10.0
_MOST_MARKS = 8192


def formatters(proc: Path = Path("/proc")) -> list[str]:
    """Formatter programs in the root directory of every mount namespace, one process of each."""
    found, seen = [], set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = os.stat(entry / "root/.")
            key = (os.readlink(entry / "ns/mnt"), status.st_dev, status.st_ino)
        except OSError:
            continue
        if key in seen:
            continue
        seen.add(key)
        for folder in _FOLDERS:
            try:
                names = os.listdir(entry / "root" / folder)
            except OSError:
                continue
            found += [str(entry / "root" / folder / n) for n in names if _FORMATTERS.fullmatch(n)]
    return found[:_MOST_MARKS]


def device_of(tid: int, word: str, majors: set[int]) -> tuple[int, int] | None:
    """The guarded device that an argument names, as the task sees it."""
    path = word.partition("=")[2] if word.startswith("of=") else word
    if not path or path.startswith("-"):
        return None
    base = f"/proc/{tid}/root" if path.startswith("/") else f"/proc/{tid}/cwd"
    try:
        status = os.stat(f"{base}/{path.lstrip('/')}")
    except (OSError, ValueError):
        return None
    number = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return number if stat.S_ISBLK(status.st_mode) and number[0] in majors else None


def inside(tid: int, cgroup: str) -> bool:
    """Whether the task is in the guarded cgroup, named from the root of cgroup v2."""
    if cgroup in ("", "/"):
        return True
    try:
        lines = Path(f"/proc/{tid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    mine = next((line[3:] for line in lines if line.startswith("0::")), "")
    return mine == cgroup or mine.startswith(cgroup + "/")


def refused(tid: int, words: list[str], config: dict[str, Any]) -> tuple[int, int] | None:
    """The device on whose account the program may not run."""
    name = os.path.basename(words[0]) if words else ""
    if not inside(tid, config.get("cgroup", "")):
        return None
    if name == "cryptsetup" and _SAFE_CRYPTSETUP & set(words):
        return None
    if name == "dd":  # it may read from any device
        words = [word for word in words if word.startswith("of=")]
    majors = set(config.get("majors", ()))
    for word in words[1:] if name != "dd" else words:
        number = device_of(tid, word, majors)
        if number is not None:
            until = config.get("leases", {}).get(f"{number[0]}:{number[1]}", 0)
            if time.monotonic() >= until:
                return number
    return None


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from linux import fanotify

    guard = fanotify.ExecPermission()
    config: dict[str, Any] = {"mode": "dry-run"}
    pending = b""
    scanned = -1e9
    while True:
        if time.monotonic() - scanned > _RESCAN_SECONDS:
            scanned = time.monotonic()
            for path in formatters():
                try:
                    guard.mark(path)
                except OSError:
                    continue  # a file system that cannot be marked, or gone
            print(json.dumps({"ready": True}), flush=True)  # noqa: T201
        ready, _, _ = select.select([guard.fd, 0], [], [], _RESCAN_SECONDS)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            if lines:
                config = json.loads(lines[-1])
        for request in guard.read() if guard.fd in ready else ():
            allow = True
            try:
                words = fanotify.exec_arguments(request.tid)
                number = refused(request.tid, words, config)
                if number is not None:
                    allow = config["mode"] != "enforce"
                    told = {"number": number, "tid": request.tid, "words": words[:32],
                            "denied": not allow}  # fmt: skip
                    print(json.dumps(told), flush=True)  # noqa: T201
            finally:
                guard.answer(request, allow)


if __name__ == "__main__":
    main()
