"""One run of real tests at a time, with processes that stand for runs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import machine, waiting

ROOT = Path(__file__).parents[2]
_RUN = """
import sys
from pathlib import Path
from tests.testbed import machine
with machine.held(Path(sys.argv[1]), say=lambda text: print(text, flush=True)):
    print("has it", flush=True)
    sys.stdin.read()
print("gave it back", flush=True)
"""


@contextlib.contextmanager
def started(file: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """A run of that name."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, machine.RUN: name},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(machine.RUN, "ours")
    return tmp_path / "lock"


def test_a_second_run_waits_and_says_for_whom(file: Path) -> None:
    with started(file, "one") as one:
        assert says(one) == "has it"
        with started(file, "two") as two:
            told = says(two)
            assert f"pid {one.pid} of " in told and f"in {ROOT}, since 20" in told
            one.communicate("")
            assert says(two) == "has it"


def test_a_run_that_is_killed_frees_the_machine(file: Path) -> None:
    with started(file, "one") as one:
        assert says(one) == "has it"
        one.kill()
        one.wait(waiting.limit(20))
        with machine.held(file, 60.0):
            assert file.read_text().startswith("ours pid ")


def test_workers_of_one_run_share_the_machine_until_the_last_has_ended(file: Path) -> None:
    with started(file, "one") as one, contextlib.ExitStack() as later:
        assert says(one) == "has it"
        worker = later.enter_context(started(file, "one"))
        assert says(worker) == "has it"
        one.communicate("")
        with pytest.raises(machine.BusyError), machine.held(file, 0.0, say=lambda _: None):
            pass
        worker.communicate("")
        with machine.held(file, 60.0):
            pass


def test_waiting_ends_with_what_to_do(file: Path) -> None:
    said: list[str] = []
    with started(file, "one") as one:
        assert says(one) == "has it"
        with pytest.raises(machine.BusyError) as raised, machine.held(file, 0.0, say=said.append):
            pass
        assert f"pid {one.pid}" in str(raised.value) and "End it" in str(raised.value)
    assert said == []  # it did not wait at all


@pytest.mark.parametrize("what", ["link", "second name", "fifo", "folder"])
def test_a_trap_in_the_shared_folder_is_not_written_to(file: Path, what: str) -> None:
    precious = file.with_name("precious")
    precious.write_text("precious")
    if what == "link":
        file.symlink_to(precious)
    elif what == "second name":
        file.hardlink_to(precious)
    elif what == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(machine.BusyError, match="remove it"), machine.held(file, 0.0):
        pass
    assert precious.read_text() == "precious"


def test_the_file_is_for_all_users(file: Path) -> None:
    before = os.umask(0o077)
    try:
        with machine.held(file):
            assert file.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


def test_a_file_that_somebody_replaced_is_no_lock(file: Path) -> None:
    """Else two runs would each have a lock, on two files of one name."""
    with machine.held(file):
        file.unlink()
        with machine.held(file, 0.0):
            descriptor = os.open(file, os.O_RDWR)
            assert machine._is_of(descriptor, file, "ours")
            file.rename(file.with_name("away"))
            file.write_text("ours pid 1")
            assert not machine._is_of(descriptor, file, "ours")
            os.close(descriptor)


@pytest.mark.parametrize(("test", "waits"), [
    ("tests/linux/test_procfs.py", True), ("tests/testbed/test_machine.py", False),
])  # fmt: skip
def test_real_tests_have_the_machine_first_and_unit_tests_never(test: str, waits: bool) -> None:
    command = [sys.executable, "-m", "pytest", "--setup-plan", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=waiting.limit(60), check=True
    )
    setups = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("SETUP")]
    assert ("one_run" in setups) is waits
    if waits:
        assert setups.index("one_run") < setups.index("run_folder")
