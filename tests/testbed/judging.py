"""What a failed test leaves for ``scripts/test.py``, which decides whether it is run again.

A plugin of pytest. The record is JUnit's, as properties of the test:

* ``grave``: bytes were lost or wrong, or a denial was missing (tests/testbed/grave.py).
* ``fixture``: the fixture of a session, package or module that failed; all tests that wanted it are
  one failure.
* ``logs``: the folder below build/report that has the logs of the test's own processes and, at
  once, why it failed.
"""

import re
from collections.abc import Generator
from typing import Any

import pytest

from tests.testbed import grave, kept

_FIXTURE = "shared fixture: "


def without_group(nodeid: str) -> str:
    """As pytest takes it: xdist adds ``@GROUP``."""
    found = re.fullmatch(r"(.*(?:\]|::\w+))@[^\]]+", nodeid, re.DOTALL)
    return found[1] if found else nodeid


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """pytest keeps the error of a fixture and raises it for each test that wants it."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if fixturedef.scope != "function" and not any(grave.notes(error, _FIXTURE)):
            error.add_note(f"{_FIXTURE}{fixturedef.argname} ({fixturedef.scope})")
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    error = None if call.excinfo is None else call.excinfo.value
    if error is not None and not isinstance(error, pytest.skip.Exception):
        folder = kept.folder(item)
        item.user_properties += [("nodeid", without_group(item.nodeid)), ("logs", str(folder))]
        item.user_properties += [("grave", each) for each in grave.notes(error, grave.PREFIX)]
        item.user_properties += [("fixture", each) for each in grave.notes(error, _FIXTURE)]
        kept.keep(item, folder)
    report = yield
    if report.failed:
        kept.say_why(kept.folder(item), report)
    return report
