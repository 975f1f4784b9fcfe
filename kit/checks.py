"""What a node must have: a room names its checks, ``nodeagent doctor`` makes them.

Each check runs in a child process with a deadline, because what it looks at may hang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """``look(*arguments)``: a public function of a module; plain JSON goes in, a line on what works
    comes out. AgentError or OSError says what is missing. ``cost``: what does not work without it.
    ``wanted``: the settings ask for it."""

    name: str
    look: Callable[..., str]
    arguments: tuple[Any, ...]
    cost: str
    wanted: bool = True
    deadline: float = 20.0  # the child of a look starts in seconds on a busy node
