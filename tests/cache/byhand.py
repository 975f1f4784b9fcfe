"""A pass without an agent: its task written by hand, its process run to the end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cache.sources import reach


def task(generation: Path, source: Path, **more: Any) -> dict[str, Any]:
    """All that the agent tells a fill, a verify or a withdrawal; ``more`` in the place of that."""
    return {
        "dataset": "a", "generation": str(generation), "source": str(source),
        "stamp": reach.look(str(source))["stamp"], "immutable": False, "native": None, "used": 0,
        "mounted": [], "do": "limits", "workers": 1, "bytes_per_second": 0, "files_per_second": 0,
        "space": {"reserve": 0.01, "budget": 2**30, "others": 0},
        "reachable": True, "against_source": False,
    } | more  # fmt: skip


def run(module: str, given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The end event of a pass of ``cache.fill.<module>``."""
    with subprocess.Popen(
        [sys.executable, "-m", f"cache.fill.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(given | more).encode() + b"\n")
        process.stdin.flush()
        events = [json.loads(line) for line in process.stdout]  # its input open: the agent lives
    end: dict[str, Any] = events[-1]
    return end
