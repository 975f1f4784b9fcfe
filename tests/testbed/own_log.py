"""A test configures logging as a process does; afterwards it is as it was."""

import contextlib
import logging
from collections.abc import Iterator

import structlog


@contextlib.contextmanager
def own_log() -> Iterator[None]:
    """Around the configuration and not as a fixture: pytest adds handlers after the fixtures."""
    root, kept = logging.getLogger(), structlog.get_config()
    before = root.handlers[:]
    root.handlers.clear()
    try:
        yield
    finally:
        structlog.configure(**kept)
        root.handlers[:] = before
