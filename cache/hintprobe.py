"""Listens in short windows to what is opened through one view, and prints it.

A process of its own: taking an event opens the file once more, which hangs when the source does.
One JSON list of paths a line, relative to the dataset; ends when its standard output is closed.
"""

import json
import os
import stat
import sys
import time
from pathlib import Path

from kit import child_main
from linux import fanotify, mountinfo

MOST_IN_A_WINDOW = 512


def window(view: str, seconds: float) -> list[str]:
    """What was opened through ``view`` in so many seconds, each once. OSError."""
    found: dict[str, None] = {}
    targets: dict[int, list[str]] = {}
    mount = mountinfo.at(view, mountinfo.read())[-1]
    with fanotify.OpenWatch() as group:
        group.watch_filesystem(view)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(found) < MOST_IN_A_WINDOW:
            for descriptor, pid in group.events():
                try:
                    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                    path = os.readlink(f"/proc/self/fd/{descriptor}") if is_file else ""
                finally:
                    os.close(descriptor)
                if pid == os.getpid() or not path:
                    continue
                if pid not in targets:
                    targets[pid] = [view, *_targets(pid, mount)]
                for target in targets[pid]:
                    if path.startswith(target + "/"):
                        found[path[len(target) + 1 :]] = None
                        break
                if len(found) >= MOST_IN_A_WINDOW:
                    break
            time.sleep(0.01)
    return list(found)


def _targets(pid: int, mount: mountinfo.Mount) -> list[str]:
    """Where a process has the view mounted: a pod sees it somewhere else than we do."""
    try:
        theirs = mountinfo.read(Path(f"/proc/{pid}/mountinfo"))
    except OSError:
        return []  # it has ended
    return [each.target for each in theirs if each.device == mount.device]


def main() -> None:
    """``python -m cache.hintprobe VIEW WINDOW EVERY`` (seconds)."""
    child_main.die_with_parent()
    view, length, every = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    while True:
        if paths := window(view, length):
            sys.stdout.write(json.dumps(paths) + "\n")
            sys.stdout.flush()
        time.sleep(max(0.0, every - length))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        pass  # the agent has gone
    except (OSError, IndexError) as error:
        # The view has just been swapped, or this kernel cannot watch it: only hints are lost.
        sys.stderr.write(f"hints: {error}\n")
