"""What of ours is on a node: a room finds its traces and removes them for ``nodeagent uninstall``.

Both run in a child process: what they look at may hang. A trace that has gone meanwhile is no
error, so an uninstall that was interrupted can be run again.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kit.errors
import kit.files


@dataclass(frozen=True)
class Trace:
    """``kind`` and ``name`` say what it is; ``users``: who uses it now, a line each; ``stays``: why
    it is only listed; ``memory``: what no later agent can learn again, which
    goes only when somebody asks for that."""

    kind: str
    name: str
    users: tuple[str, ...] = ()
    stays: str = ""
    memory: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def without_agent(state_dir: Path) -> Iterator[None]:
    """RefusedError while an agent runs with this state directory."""
    if not state_dir.is_dir():
        yield
        return
    try:
        descriptor = kit.files.lock(state_dir / "lock", 0)
    except OSError as error:
        raise kit.errors.RefusedError(
            f"state_dir {state_dir}",
            f"an agent runs with it ({error.strerror})",
            "stop it first: systemctl disable --now nodeagent, or delete the DaemonSet",
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)
