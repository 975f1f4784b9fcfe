"""scripts/test.py on small suites: what is run again, what is green, what is red."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import test as runner
from tests.testbed import judging, waiting

REPO = Path(__file__).parents[2]

HEAD = """\
import pathlib
import pytest
from tests.testbed import grave

def first(name):
    mark = pathlib.Path(name)
    here = mark.exists()
    mark.touch()
    return not here

def test_unit():
    pass

@pytest.mark.gate
@pytest.mark.real
def test_good():
    pass

"""
INI = "[pytest]\nmarkers =\n    gate\n    real\nfilterwarnings = error\n"


def run(folder: Path, body: str) -> tuple[int, str, Any]:
    """The exit code, the output and the report of the gate over one file of tests."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "conftest.py").write_text('pytest_plugins = ("tests.testbed.judging",)\n')
    (folder / "test_sample.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "test.py"), "gate"],
        cwd=folder,
        env={  # this may be a worker, but that run has workers of its own
            **{key: each for key, each in os.environ.items() if "XDIST" not in key},
            "PYTHONPATH": str(REPO),
            "NODEAGENT_TEST_LOCK": str(folder / "lock"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take most of the time
            "PYTEST_ADDOPTS": "-p xdist",
        },
        capture_output=True,
        text=True,
        timeout=waiting.limit(240),
        check=False,
    )
    report = json.loads((folder / "build" / "report" / "unsteady.json").read_text())
    return done.returncode, done.stdout + done.stderr, report


def test_always_red_is_red_after_two_more_looks(tmp_path: Path) -> None:
    code, said, report = run(tmp_path, "def test_bad():\n    assert 1 == 2\n")
    assert code == 1 and "RED: failed again, alone: test_sample.py::test_bad" in said
    assert [len(each["failures"]) for each in report["tests"]] == [3]
    assert (tmp_path / "build" / "report" / "again-2.xml").exists()


def test_red_once_is_green_and_named_with_its_first_failure(tmp_path: Path) -> None:
    body = (
        "@pytest.mark.gate\n@pytest.mark.real\ndef test_odd(tmp_path):\n"
        "    (tmp_path / 'agent.log').write_text('said')\n    assert not first('odd')\n"
    )
    code, said, report = run(tmp_path, body)
    assert code == 0, said
    assert "UNSTEADY: failed, and passed alone: 1" in said and "assert not True" in said
    assert said.splitlines()[-1] == "tests: 3 passed, 0 failed, 0 skipped"
    (told,) = report["tests"]
    assert (told["test"], told["passed_in"]) == ("test_sample.py::test_odd", "look 2")
    logs = Path(told["failures"][0]["logs"])
    assert (logs / "mountinfo").exists()
    assert (logs / "tmp_path" / "agent.log").read_text() == "said"
    assert "assert not True" in (logs / "failure-call").read_text()


def test_wrong_bytes_once_are_red_without_a_second_look(tmp_path: Path) -> None:
    body = (
        "def test_lost():\n    with grave.wrong_bytes():\n        assert not first('lost')\n"
        "def test_open():\n    assert not first('open')\n"
    )
    code, said, _ = run(tmp_path, body)
    assert code == 1 and "RED: bytes were lost or wrong: test_sample.py::test_lost" in said
    assert not (tmp_path / "build" / "report" / "again-1.xml").exists()


def test_shared_fixture_is_one_failure_and_all_its_tests_are_run_again(tmp_path: Path) -> None:
    body = (
        "@pytest.fixture(scope='session')\ndef cluster():\n    assert not first('cluster')\n"
        "@pytest.mark.gate\n@pytest.mark.real\n@pytest.mark.xdist_group('cluster')\n"
        "@pytest.mark.parametrize('n', range(9))\n"
        "def test_many(cluster, n):\n    pass\n"
    )
    code, said, report = run(tmp_path, body)
    assert code == 0, said
    assert len(report["tests"]) == 9
    assert said.splitlines()[-1] == "tests: 11 passed, 0 failed, 0 skipped"


def test_what_the_unit_tests_said_is_told_when_another_run_has_the_machine(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # as good as one that waits in vain
    code, said, report = run(tmp_path, "def test_bad():\n    assert 1 == 2\n")
    assert code == 1 and "RED: no result of the pass 'gate': " in said and "remove it" in said
    assert "unit: 1 passed, 1 failed" in said
    assert [each["test"] for each in report["tests"]] == ["test_sample.py::test_bad"]


FAILED = runner.Failure("t", "m", "")


def passed(name: str, *failures: runner.Failure, number: int = 10, broken: str = "") -> runner.Pass:
    return runner.Pass(name, 1.0, number, 0, failures, broken)


def test_a_look_is_at_what_failed_in_all_passes_and_then_at_what_failed_again() -> None:
    other = runner.Failure("s[a b]", "", "")
    passes = [passed("unit", FAILED), passed("gate", other, FAILED)]
    assert runner.failing(passes) == ("s[a b]", "t")
    assert runner.failing([*passes, passed("again-1", other)]) == ("s[a b]",)


def test_more_than_five_are_no_noise() -> None:
    five = [runner.Failure(str(number), "", "") for number in range(5)]
    assert runner.verdict([passed("gate", *five)]) == ("", True)
    red, again = runner.verdict([passed("unit", FAILED), passed("gate", *five)])
    assert "more than 5" in red and not again


@pytest.mark.parametrize(
    ("passes", "why"),
    [
        ([passed("unit", broken="exit code 3")], "no result of the pass 'unit'"),
        ([passed("unit"), passed("gate", number=0)], "no test was run in the pass 'gate'"),
        ([passed("unit", FAILED), passed("again-1", number=0)], "not at the tests that failed"),
        ([passed("unit", FAILED), passed("again-1", number=7)], "not at the tests that failed"),
    ],
)
def test_what_ran_no_test_is_never_green(passes: list[runner.Pass], why: str) -> None:
    red, again = runner.verdict(passes)
    assert why in red and not again


def test_denial_that_was_missing_in_a_second_look_is_red() -> None:
    grave = runner.Failure("t", "m", "", grave="a denial was missing")
    red, _ = runner.verdict([passed("unit", FAILED), passed("again-1", grave)])
    assert red == "a denial was missing: t"


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("tests/a.py::t@host", "tests/a.py::t"),
        ("tests/a.py::t[x]@/w/a.py", "tests/a.py::t[x]"),
        ("tests/a.py::t[a@host]", "tests/a.py::t[a@host]"),
        ("tests/a.py::t[@/x]@kept", "tests/a.py::t[@/x]"),
    ],
)
def test_group_of_xdist_is_no_part_of_a_tests_id(given: str, plain: str) -> None:
    assert judging.without_group(given) == plain
