"""On which nodes a dataset with ``spread`` is kept. Pure: rendezvous hashing.

Each node has a place of its own in the order of each dataset, so a node that comes or goes moves
only its own share.
"""

import hashlib
from collections.abc import Iterable


def choose(dataset: str, nodes: Iterable[str], most: int) -> tuple[str, ...]:
    """``most`` of ``nodes``, or all if they are fewer; by name."""
    ordered = sorted(set(nodes), key=lambda node: (_place(dataset, node), node))
    return tuple(sorted(ordered[:most]))


def _place(dataset: str, node: str) -> bytes:
    return hashlib.sha256(f"{dataset}/{node}".encode()).digest()
