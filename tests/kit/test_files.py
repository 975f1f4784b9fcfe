import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import files
from tests.testbed import waiting


def test_save_replaces_file_readable_by_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.save(path, b"old")
    files.save(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_failed_save_leaves_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()  # a directory cannot be replaced by a file
    (path / "in").touch()
    with pytest.raises(OSError, match="irectory"):
        files.save(path, b"new")
    assert (path / "in").exists()
    assert os.listdir(tmp_path) == ["state"]


def test_killed_save_leaves_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    files.save(path, b"old")
    script = (
        "import os, sys, pathlib, kit.files\n"
        "os.replace = lambda *a: os.kill(os.getpid(), 9)\n"
        "kit.files.save(pathlib.Path(sys.argv[1]), b'new')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, timeout=waiting.limit(30)
    )
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    files.save(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["state"]


def test_append_keeps_two_bounded_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_LOG", 1000)
    path = tmp_path / "made" / "operator.log"
    for number in range(100):
        files.append(path, {"number": number})
    assert files.last_entries(path, 3) == [{"number": n} for n in (97, 98, 99)]
    assert sorted(os.listdir(path.parent)) == ["operator.log", "operator.log.1"]
    assert all(each.stat().st_size < 1100 for each in path.parent.iterdir())
    assert path.stat().st_mode & 0o777 == 0o600


def test_last_entries_leaves_torn_line_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    files.append(path, {"a": 1})
    with path.open("ab") as stream:
        stream.write(b'{"a": ')
    assert files.last_entries(path, 10) == [{"a": 1}]
    assert files.last_entries(tmp_path / "missing", 10) == []


def test_lock_refuses_while_another_holds_it(tmp_path: Path) -> None:
    first = files.lock(tmp_path / "lock", 0)
    with pytest.raises(OSError, match="another process holds the lock"):
        files.lock(tmp_path / "lock", 0.05)
    os.close(first)
    os.close(files.lock(tmp_path / "lock", 0))
    os.close(files.lock(tmp_path, 0))
