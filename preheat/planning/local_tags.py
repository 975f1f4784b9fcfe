"""A tag that names another digest on the node than the registry said last. Pure but for its memory.

A kubelet that pulls a moved tag knows the registry's answer before the next lookup does. From then
until that lookup the node's digest counts: it is what pods use.
"""

from collections.abc import Iterable


class LocalTags:
    """Since when the node has its present digest for each tag; Unix times."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[str, float]] = {}

    def keep(self, refs: Iterable[str]) -> None:
        """Forget all others."""
        wanted = set(refs)
        self._since = {ref: seen for ref, seen in self._since.items() if ref in wanted}

    def saw(self, ref: str, digest: str, now: float) -> bool:
        """Whether it is another digest than before. At first sight the registry is right."""
        known = self._since.get(ref)
        if known is None or known[0] != digest:
            self._since[ref] = digest, 0.0 if known is None else now
        return known is not None and known[0] != digest

    def is_newer(self, ref: str, answered: float) -> bool:
        """Whether the tag moved here after the registry answered; 0: no answer counts."""
        known = self._since.get(ref)
        return known is not None and known[1] > answered
