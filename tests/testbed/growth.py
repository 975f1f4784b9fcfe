"""How much work something is, without a clock: the lines of Python that it runs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(work: Callable[[], object], *modules: str) -> int:
    """Lines that run while ``work`` does, of functions in files whose paths end so."""
    count = 0

    def line(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, _: str, __: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(modules) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
