"""The log: one event per fact, with fields; JSON in a pod, plain lines on a terminal.

A thread writes it. Whoever should read standard error may stand still (a full disk of the container
runtime, a stopped terminal), and then only this thread does. What does not fit into its queue is
lost; how many lines, the next line that is written says.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import threading
import time
from typing import Any, TextIO, cast

import structlog

import kit.redact
from kit import terminal

MOST_WAITING_LINES = 4096
CLOSE_SECONDS = 2.0  # for the lines that wait when the process ends


class Drain:
    """A text file for lines, whose ``write`` never waits."""

    def __init__(self, descriptor: int, most: int = MOST_WAITING_LINES) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(most)
        self._lost = 0
        self._lock = threading.Lock()  # of the count
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Of one call all is written, or nothing."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            with self._lock:
                self._lost += 1
        return len(text)

    def flush(self) -> None:
        """Does not wait: the thread writes every line at once."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits until what was written has left, at most ``seconds``."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            text = self._lines.get()
            with self._lock:
                lost, self._lost = self._lost, 0
            if lost:
                event = {"event": "log lines lost: nobody read them", "lines": lost}
                text = json.dumps({**event, "level": "warning"}) + "\n" + text
            rest = text.encode("utf-8", "backslashreplace")
            with contextlib.suppress(OSError):  # nobody can be told
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            self._lines.task_done()


class _Plain(logging.Formatter):
    """What libraries log, without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return _lines(kit.redact.text(super().format(record)))


def _lines(text: str) -> str:
    """Its lines, without control characters of others: they would steer a terminal."""
    return "\n".join(map(terminal.plain, text.split("\n")))


def _escape(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What a console shows as it is; it quotes all other fields."""
    return {**event, **{k: _lines(event[k]) for k in ("event", "exception") if k in event}}


def _redact(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: kit.redact.value(said, name) for name, said in event.items()}


def configure(descriptor: int = 2) -> Drain:
    """Log from level INFO, to standard error unless told otherwise."""
    renderers: tuple[structlog.typing.Processor, ...] = (structlog.processors.JSONRenderer(),)
    if os.isatty(descriptor):
        renderers = _escape, structlog.dev.ConsoleRenderer()
    drain = Drain(descriptor)
    atexit.register(drain.close)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, drain)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(drain)
    handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return drain
