"""Whether a build can follow a lock of Debian packages: deploy/image/locked.sh."""

import subprocess
from pathlib import Path

from tests.testbed import waiting

SCRIPT = Path(__file__).parents[2] / "deploy/image/locked.sh"


def run(lock: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", SCRIPT, lock], capture_output=True, text=True, timeout=waiting.limit(30)
    )


def installed(name: str) -> str:
    words = ["dpkg-query", "-W", "-f", "${Package}=${Version}", name]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_lock_of_what_is_there_is_followed(tmp_path: Path) -> None:
    lock = tmp_path / "debian-x.txt"
    lock.write_text(f"# a comment\n{installed('bash')}\n{installed('dpkg')}\n")
    done = run(lock)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_versions_that_are_gone_are_named_with_what_to_do(tmp_path: Path) -> None:
    lock = tmp_path / "debian-x.txt"
    lock.write_text(f"{installed('bash')}\ndpkg=0.0\nno-such-package=1\n")
    done = run(lock)
    assert done.returncode == 1
    assert done.stdout.split() == ["dpkg=0.0", "no-such-package=1"]
    for words in ("dpkg=0.0", "debian-x.txt", "make image-lock", "apt_sources", "DEBIAN_LOCK"):
        assert words in done.stderr
    assert "bash" not in done.stderr


def test_debian_without_a_lock_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "debian-other.txt")
    assert done.returncode == 1
    assert "debian-other.txt" in done.stderr and "make image-lock" in done.stderr
