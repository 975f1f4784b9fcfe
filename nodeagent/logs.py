"""The log: one event per fact, with fields; JSON in a pod, plain lines on a terminal."""

import logging
import sys
from typing import Any

import structlog

import kit.redact


class _Plain(logging.Formatter):
    """What libraries log, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return kit.redact.text(super().format(record))


def _redact(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: kit.redact.value(said, name) for name, said in event.items()}


def configure() -> None:
    """Log to standard error, from level INFO."""
    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
