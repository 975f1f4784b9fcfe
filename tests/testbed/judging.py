"""What a failed test leaves for ``scripts/test.py``, which decides whether it is run again.

A plugin of pytest. The record is JUnit's, as properties of the test:

* ``grave``: bytes were lost or wrong, or a denial was missing. No second look excuses that.
* ``fixture``: the fixture of a session, package or module that failed; all tests that wanted it are
  one failure.
* ``logs``: the folder below build/report that has the logs of the test's own processes.

``wrong_bytes`` and ``missing_denial`` mark the assertions that are grave::

    with judging.wrong_bytes():
        assert seen == expected
"""

import contextlib
import re
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.testbed import kept

_GRAVE = "grave: "
_FIXTURE = "shared fixture: "
_GROUP = re.compile(r"@(cluster|guest|host|kube|preheat|/.*\.py)$")


@contextlib.contextmanager
def _grave(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(_GRAVE + what)
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


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """pytest keeps the error of a fixture and raises it for each test that wants it."""
    try:
        return (yield)
    except Exception as error:
        if fixturedef.scope != "function" and not any(notes(error, _FIXTURE)):
            error.add_note(f"{_FIXTURE}{fixturedef.argname} ({fixturedef.scope})")
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    error = None if call.excinfo is None else call.excinfo.value
    if error is not None and not isinstance(error, pytest.skip.Exception):
        folder = kept.folder(item)
        item.user_properties += [("nodeid", _GROUP.sub("", item.nodeid)), ("logs", str(folder))]
        item.user_properties += [("grave", each) for each in notes(error, _GRAVE)]
        item.user_properties += [("fixture", each) for each in notes(error, _FIXTURE)]
        kept.keep(item, folder)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """xdist adds the group to the id; ``--last-failed`` would not find the test under it."""
    report.nodeid = _GROUP.sub("", report.nodeid)
