"""Python imports this by itself in processes that a test started.

See ``tests.testbed.starts`` and, for agents, ``tests.testbed.held`` and ``constants``.
"""

import contextlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType


def beside(name: str) -> ModuleType:
    """A module of the testbed, by its path: a process of a test need not have the tests on its
    module path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folder = Path(os.environ.get("NODEAGENT_TEST_STARTS", ""))
if folder.is_dir() and folder.name:
    beside("starts").record(folder)

if os.environ.get("NODEAGENT_TEST_CONSTANTS"):
    beside("constants").install()

if os.environ.get("NODEAGENT_TEST_HELD"):
    # What cannot import them is another program that the agent started.
    with contextlib.suppress(ImportError):
        from tests.testbed import holding

        holding.install()
