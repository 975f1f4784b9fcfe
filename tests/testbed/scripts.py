"""The programs in scripts/ as modules: tests compare what they make with what the repo has."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    """``scripts/<name>.py``, with the other scripts that it imports."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
