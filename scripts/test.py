"""Run a set of tests, give what failed a second look, and say which tests are unsteady.

test.py gate [PYTEST ARGUMENT...]   all unit tests, then the real ones that tests/gate.txt names
test.py long [PYTEST ARGUMENT...]   the other real ones, and at full size those that gate has small;
                                    unit tests that draw examples, with new and more of them

A test that failed is run again, alone, after all others, at most twice. When it passes, the run is
green, and the test is named at its end and in build/report/unsteady.json. The run is red when a
test fails each time, when more than MOST needed a second look, and without one when a test found
bytes that are lost or wrong or a denial that is missing (tests/testbed/grave.py).

Limits and waits are stretched by how slow the machine is when the run starts, or by TEST_PATIENCE.

In build/report: JUnit of each pass, and a folder for each failed test with its logs.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.testbed import examples, gate, machine, patience

MOST = 5
LOOKS = 2
LOOK = "again-"  # and its number
REPORT = Path("build/report")
NO_TESTS = 5  # of pytest's exit codes; 1: tests failed
PASS_SECONDS = {"gate": 60 * 60, "long": 8 * 60 * 60}
# The groups of tests/conftest.py in its order: the longest first, and not the one with most tests.
IN_TWO = ("--numprocesses", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
UNIT = ("-m", gate.UNIT, *IN_TWO)
DRAWN = ("-m", f"(hypothesis or random) and {gate.UNIT}", *IN_TWO)
LARGE = ("tests/e2e/test_promises.py", "tests/deploy/test_node_rounds.py")
# Others are not even read. In order: a fixture of a folder is made once.
NAMED = sorted(each for each in gate.files() if Path(each).exists())
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "gate": {"unit": UNIT, "gate": ("-m", "gate", *IN_TWO, *NAMED)},
    "long": {"fresh": DRAWN, "long": ("-m", "real and not gate", *IN_TWO), "large": LARGE},
}
SIZES: dict[str, dict[str, str]] = {
    "gate": {},
    "long": {
        "PROMISE_FILES": "50000",
        "PROMISE_KILLS": "10",
        "PROMISE_FROZEN": "60",
        "SOAK_CYCLES": "5",
    },
}


@dataclass(frozen=True)
class Failure:
    """How a test failed in one pass. ``fixture``: a shared one that failed, "" for the test."""

    test: str
    message: str
    text: str
    logs: str = ""
    fixture: str = ""
    grave: str = ""

    @property
    def cause(self) -> str:
        """All tests that wanted the same broken fixture are one failure."""
        return self.fixture or self.test


@dataclass(frozen=True)
class Pass:
    """``broken``: why there is no result."""

    name: str
    seconds: float
    passed: int
    skipped: int
    failures: tuple[Failure, ...]
    broken: str = ""

    @property
    def is_look(self) -> bool:
        """At what failed before."""
        return self.name.startswith(LOOK)


def read(junit: Path) -> tuple[int, int, tuple[Failure, ...]]:
    """Tests that passed and were skipped, and the failures, of a JUnit file."""
    passed = skipped = 0
    failures: dict[str, Failure] = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        bad = [*case.iter("failure"), *case.iter("error")]
        if not bad:
            passed += case.find("skipped") is None
            skipped += case.find("skipped") is not None
            continue
        noted = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        named = f"{case.get('classname', '')}::{case.get('name', '')}"
        test = noted.get("nodeid") or named
        known = failures.get(test)
        failures[test] = Failure(
            test,
            known.message if known else bad[0].get("message", ""),
            known.text if known else (bad[0].text or "")[-8000:],
            noted.get("logs", ""),
            noted.get("fixture", "") or (known.fixture if known else ""),
            noted.get("grave", "") or (known.grave if known else ""),
        )
    return passed, skipped, tuple(failures.values())


def verdict(passes: Sequence[Pass], *, picked: bool = False) -> tuple[str, bool]:
    """Why the run is red, "" while it is not; and whether a second look is due.

    ``picked``: by arguments of the caller, so that a pass may have nothing to run.
    """
    for each in passes:
        if each.broken:
            return f"no result of the pass '{each.name}': {each.broken}", False
    first = [each for each in passes if not each.is_look]
    again = [each for each in passes if each.is_look]
    failures = [failure for each in first for failure in each.failures]
    if bad := [failure for each in passes for failure in each.failures if failure.grave]:
        return f"{bad[0].grave}: {bad[0].test}", False
    if not picked and (idle := [p.name for p in first if not p.passed and not p.failures]):
        return f"no test was run in the pass '{idle[0]}'", False
    if len({failure.cause for failure in failures}) > MOST:
        return f"more than {MOST} tests failed: that is no noise", False
    left = tuple(failures)
    for each in again:
        if each.passed + len(each.failures) != len(left):  # a test that is skipped has not passed
            return "a second look was not at the tests that failed", False
        left = each.failures
    if left and len(again) >= LOOKS:
        return f"failed again, alone: {', '.join(sorted(f.test for f in left))}", False
    return "", bool(left)


def run(name: str, words: Sequence[str], seconds: float) -> Pass:
    """One pass of pytest with these words, and with what it prints."""
    junit = REPORT / f"{name}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-ra", "--durations", "30"),
        *("--junit-xml", str(junit), "-o", f"cache_dir={REPORT / 'cache'}", *words),
    ]
    print(f"\n=== {name}: {' '.join(command[3:])}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds)
    except BaseException as error:  # the limit, or Ctrl-C: its tests end what they started
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            pass  # it is killed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Pass(name, seconds, 0, 0, (), f"it did not end within {seconds / 60:.0f} minutes")
    took = time.monotonic() - begin
    if code not in (0, 1, NO_TESTS) or not junit.exists():
        return Pass(name, took, 0, 0, (), f"exit code {code}")
    passed, skipped, failures = read(junit)
    if code == 1 and not failures:
        return Pass(name, took, passed, skipped, (), "exit code 1 without a failed test")
    return Pass(name, took, passed, skipped, failures)


def failing(passes: Sequence[Pass]) -> tuple[str, ...]:
    """The tests that failed each time: those of the last look, or of all passes before the first.
    By name: 'those that failed last' are all tests when none of them is found again."""
    of = passes[-1:] if passes[-1].is_look else passes
    return tuple(sorted({failure.test for each in of for failure in each.failures}))


def unsteady(passes: Iterable[Pass]) -> dict[str, list[Failure]]:
    """Of each test that failed once: how, in each pass."""
    found: dict[str, list[Failure]] = {}
    for each in passes:
        for failure in each.failures:
            found.setdefault(failure.test, []).append(failure)
    return found


def tell(passes: Sequence[Pass], red: str) -> None:
    """The end of the run, for people and for build/report/unsteady.json."""
    found = unsteady(passes)
    records = [
        {
            "test": test,
            "passed_in": "" if red else f"look {len(failures) + 1}",
            "failures": [asdict(failure) for failure in failures],
        }
        for test, failures in found.items()
    ]
    text = json.dumps({"red": red, "load": os.getloadavg(), "tests": records}, indent=1)
    (REPORT / "unsteady.json").write_text(text)
    if seed := os.environ.get(examples.NAME):
        print(f"\nThe examples were drawn with {examples.NAME}={seed}.")
    strangers = REPORT / "strangers.txt"
    if strangers.exists():
        print("\nWARNING: this machine has what a fresh one lacks ('make test-fresh' judges):")
        print("\n".join(sorted(set(strangers.read_text().splitlines()))))
    if found:
        print(f"\n{'FAILED' if red else 'UNSTEADY: failed, and passed alone'}: {len(found)}")
    for test, failures in found.items():
        print(f"\n  {test}")
        for number, failure in enumerate(failures, 1):
            shared = f" ({failure.fixture})" if failure.fixture else ""
            message = failure.message.replace("\n", "\n       ")[:600]
            print(f"    {number}. {message}{shared}\n       logs: {failure.logs}")
    print()
    for each in passes:
        print(
            f"{each.name}: {each.passed} passed, {len(each.failures)} failed, {each.seconds:.0f} s"
        )
    first = [each for each in passes if not each.is_look]
    passed = sum(each.passed for each in first) + (0 if red else len(found))
    failed = len(found) if red else 0
    print(f"\n{'RED: ' + red if red else 'green'}")
    print(f"tests: {passed} passed, {failed} failed, {sum(e.skipped for e in first)} skipped")


def new_seed() -> str:
    return str(random.randrange(2**32))


def main(chosen: str, *words: str) -> int:
    shutil.rmtree(REPORT, ignore_errors=True)
    REPORT.mkdir(parents=True)
    slow = patience.ensure(REPORT)
    limit = PASS_SECONDS[chosen] * slow
    print(f"limits are stretched by {slow:g}, as slow as this machine is; {patience.NAME} says it")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each worker would compile every file again
    os.environ.update({name: os.environ.get(name, size) for name, size in SIZES[chosen].items()})
    # A shell has its background ignore Ctrl-C; pytest does not inherit that from us then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    if chosen == "long":  # a second look has the same examples
        seed = os.environ.setdefault(examples.NAME, new_seed())
        print(f"seed of drawn examples: {examples.NAME}={seed}")
    passes: list[Pass] = []
    # A caller who names files means these, and not those of the gate.
    named = any(Path(word.partition("::")[0]).exists() for word in words)
    left_out = set(NAMED) if named else set()
    with contextlib.ExitStack() as stack:
        for name, of in SETS[chosen].items():
            if of not in (UNIT, DRAWN):
                try:  # to the end, second looks included; the limit of a pass is not for waiting
                    stack.enter_context(machine.held())
                except machine.BusyError as error:
                    passes.append(Pass(name, 0.0, 0, 0, (), str(error)))
                    break
            kept = [each for each in of if each not in left_out]
            passes.append(run(name, [*kept, *words], limit))
            if passes[-1].broken:
                break
        red, again = verdict(passes, picked=bool(words))
        while again:
            name = f"{LOOK}{sum(each.is_look for each in passes) + 1}"
            passes.append(run(name, failing(passes), limit))
            red, again = verdict(passes, picked=bool(words))
    tell(passes, red)
    return 1 if red else 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SETS:
        sys.exit(main(*sys.argv[1:]))
    sys.exit(__doc__)
