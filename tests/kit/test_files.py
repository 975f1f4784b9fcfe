import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import errors, files


def test_a_saved_file_holds_the_new_bytes_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.save(path, b"old")
    files.save(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_when_saving_fails_the_old_file_stays_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()  # a directory cannot be replaced by a file
    (path / "in").touch()
    with pytest.raises(OSError, match="irectory"):
        files.save(path, b"new")
    assert (path / "in").exists()
    assert os.listdir(tmp_path) == ["state"]


def test_a_save_that_was_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    files.save(path, b"old")
    script = (
        "import os, sys, pathlib, kit.files\n"
        "os.replace = lambda *a: os.kill(os.getpid(), 9)\n"
        "kit.files.save(pathlib.Path(sys.argv[1]), b'new')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=30)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    files.save(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["state"]


def test_each_class_of_error_has_an_exit_code_of_its_own() -> None:
    classes: list[type[errors.AgentError]] = errors.AgentError.__subclasses__()
    ours = [c for c in classes if c.__module__ == "kit.errors"]
    codes = [errors.AgentError.exit_code, *(c.exit_code for c in ours)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    assert 2 not in codes  # click's for bad usage


def test_an_error_says_thing_cause_and_remedy_in_one_line() -> None:
    error = errors.SourceError("dataset a", "it does not answer", "look at it")
    assert str(error) == "dataset a: it does not answer; look at it"
    assert str(errors.AgentError("a", "b", "")) == "a: b"
