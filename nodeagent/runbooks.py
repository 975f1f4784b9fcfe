"""The runbook: what each finding and each alert means, how to look, what to do (runbook.yaml).

It comes with the agent, so that the page can show it on a node that reaches nothing else.
``scripts/runbook_doc.py`` makes docs/runbook.md of it.
"""

import functools
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml

LOG_LINES = "log-line"  # stands for the rules of all log lines (log-...)


@dataclass(frozen=True)
class Entry:
    """``look`` and ``do`` of an alert are those of the finding behind it (``see``).

    ``severity``: of a finding; empty where rules or alerts have it as data.
    """

    name: str
    means: str
    look: str = ""
    do: str = ""
    see: str = ""
    severity: str = ""

    @property
    def is_alert(self) -> bool:
        return self.name[:1].isupper()


@functools.lru_cache(maxsize=1)
def entries() -> Sequence[Entry]:
    """All of them, in the order of the file; read when it is first asked for."""
    file = importlib.resources.files("nodeagent") / "runbook.yaml"
    found = [Entry(**each) for each in yaml.safe_load(file.read_text(encoding="utf-8"))]
    by_name = {each.name: each for each in found}
    return tuple(
        replace(e, look=by_name[e.see].look, do=by_name[e.see].do) if e.see else e for e in found
    )


@functools.lru_cache(maxsize=1)
def _by_name() -> dict[str, Entry]:
    return {each.name: each for each in entries()}


def find(rule: str) -> Entry | None:
    """The entry of a finding's rule or of an alert."""
    return _by_name().get(LOG_LINES if rule.startswith("log-") else rule)
