"""The set-up installs the Debian packages that a fresh machine lacks."""

import os
import pathlib
import subprocess

from tests.testbed import waiting

REPO = pathlib.Path(__file__).parents[2]

# As Debian's: it prints what it knows and answers 1 when it does not know one of the names.
DPKG_QUERY = """#!/bin/sh
echo 'ii there'
exit "$UNKNOWN"
"""
APT_GET = """#!/bin/sh
echo "$@" >>"$ASKED"
exit "$REFUSED"
"""


def run_packages(
    tmp_path: pathlib.Path, *, unknown: bool, refused: bool = False
) -> tuple[int, str]:
    """The exit code of setup.sh's ``packages there missing`` and what it asked of apt-get."""
    for name, text in (
        ("dpkg-query", DPKG_QUERY),
        ("apt-get", APT_GET),
        ("id", "#!/bin/sh\necho 0\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = (REPO / "scripts/setup.sh").read_text().split("\nstep environment\n")[0]
    asked = tmp_path / "asked"
    names = "there missing" if unknown else "there"
    done = subprocess.run(
        ["bash", "-c", f"{script}\npackages {names}\n", REPO / "scripts/setup.sh"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "UNKNOWN": str(int(unknown)),
            "REFUSED": str(int(refused)),
        },
        capture_output=True,
        text=True,
        timeout=waiting.limit(30),
        check=False,
    )
    return done.returncode, asked.read_text() if asked.exists() else ""


def test_setup_installs_package_that_dpkg_does_not_know(tmp_path: pathlib.Path) -> None:
    code, asked = run_packages(tmp_path, unknown=True)
    assert code == 0
    assert "install" in asked and asked.split()[-1] == "missing"


def test_setup_asks_nothing_when_all_is_there(tmp_path: pathlib.Path) -> None:
    assert run_packages(tmp_path, unknown=False) == (0, "")


def test_setup_fails_when_apt_get_refuses(tmp_path: pathlib.Path) -> None:
    code, _ = run_packages(tmp_path, unknown=True, refused=True)
    assert code != 0
