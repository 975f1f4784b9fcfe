"""What calls load: the process that they fork from keeps it as long as the agent runs."""

import subprocess
import sys

from tests.testbed import waiting

OF_AN_IDLE_NODE = (
    "cache.views.by_id",
    "cache.dataset.kept",
    "cache.sources.roots",
    "cache.store.generations",
    "cache.store.sample",
    "cache.views.users",
    "cache.views.view",
    "kit.formats",
)
OF_THE_AGENT = {"aiohttp", "asyncio", "pydantic", "structlog", "yaml"}


def test_calls_of_an_idle_node_load_nothing_that_only_the_agent_needs() -> None:
    """18 MB more for each node."""
    code = f"import sys, {', '.join(OF_AN_IDLE_NODE)}; print(*{OF_THE_AGENT} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=waiting.limit(60),
    )
    assert done.stdout.split() == []


def test_what_calls_load_starts_no_thread() -> None:
    """Calls fork from the process that has loaded it; other threads would not be in the fork."""
    modules = ", ".join((*OF_AN_IDLE_NODE, "ceph.objects", "ceph.whereabouts", "ceph.image"))
    code = f"import os, {modules}; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=waiting.limit(60),
    )
    assert done.stdout.split() == ["1"]
