"""Assertions that no second look excuses: bytes were lost or wrong, or a denial was missing.

    with grave.wrong_bytes():
        assert seen == expected

scripts/test.py is red at once when one of them fails (tests/testbed/judging.py).
"""

import contextlib
from collections.abc import Iterator

import pytest

PREFIX = "grave: "


@contextlib.contextmanager
def _grave(what: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        error.add_note(PREFIX + what)
        raise


def wrong_bytes() -> contextlib.AbstractContextManager[None]:
    """An AssertionError in here means that bytes were lost or wrong."""
    return _grave("bytes were lost or wrong")


def missing_denial() -> contextlib.AbstractContextManager[None]:
    """An AssertionError in here means that the guard allowed what it must deny."""
    return _grave("a denial was missing")


def notes(error: BaseException | None, prefix: str) -> Iterator[str]:
    """Notes of an error, of those it came from and of those in its group, that begin so."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        for note in getattr(each, "__notes__", ()):
            if note.startswith(prefix):
                yield note.removeprefix(prefix)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
