"""Python imports this by itself in processes that a test started.

See ``tests.testbed.starts`` and, for agents, ``tests.testbed.held``.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

folder = Path(os.environ.get("NODEAGENT_TEST_STARTS", ""))
if folder.is_dir() and folder.name:
    # By its path: a process of a test need not have the tests on its module path.
    spec = importlib.util.spec_from_file_location("starts", Path(__file__).parents[1] / "starts.py")
    assert spec is not None and spec.loader is not None
    starts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starts)
    starts.record(folder)

if os.environ.get("NODEAGENT_TEST_HELD"):
    # What cannot import them is another program that the agent started.
    with contextlib.suppress(ImportError):
        from tests.testbed import holding

        holding.install()
