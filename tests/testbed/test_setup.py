"""The set-up installs the Debian packages that a fresh machine lacks, and makes roots of others."""

import os
import pathlib
import shutil
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


# A root of another Debian: its folder is the last word but one.
MMDEBSTRAP = """#!/bin/sh
eval "root=\\${$(($# - 1))}"
mkdir -p "$root/etc/apt/apt.conf.d"
echo made >>"$ASKED"
exit "$REFUSED"
"""
INDEXES = """#!/bin/sh
[ -z "$SITE" ] || echo "$SITE bookworm"
"""


def make_root(
    tmp_path: pathlib.Path, *, site: str = "archive", refused: bool = False, user: int = 0
) -> tuple[int, str, str]:
    """The exit code of ceph.sh, what it said, and what it asked of mmdebstrap."""
    folder, programs, asked = tmp_path / "clone", tmp_path / "programs", tmp_path / "asked"
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    programs.mkdir(exist_ok=True)
    for name in ("ceph.sh", "steps.sh"):
        shutil.copy(REPO / "scripts" / name, folder / "scripts" / name)
    for name, text in (
        ("mmdebstrap", MMDEBSTRAP),
        ("apt-get", INDEXES),
        ("apt-config", "#!/bin/sh\n"),
        ("dpkg-query", "#!/bin/sh\necho ceph-mon=18\n"),
        ("id", f"#!/bin/sh\necho {user}\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    asked.write_text("")
    done = subprocess.run(
        [folder / "scripts/ceph.sh", "trixie"],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "NODEAGENT_CACHE": str(tmp_path / "cache"),
            "ASKED": str(asked),
            "SITE": site,
            "REFUSED": str(int(refused)),
        },
        capture_output=True,
        text=True,
        timeout=waiting.limit(30),
        check=False,
    )
    return done.returncode, done.stderr, asked.read_text()


def test_root_of_another_ceph_is_made_once(tmp_path: pathlib.Path) -> None:
    code, said, asked = make_root(tmp_path)
    assert (code, asked) == (0, "made\n"), said
    root = tmp_path / "clone/build/ceph/trixie"
    assert (root / "packages.txt").read_text() == "ceph-mon=18\n"
    assert make_root(tmp_path) == (0, "", "")


def test_root_that_was_not_made_whole_is_made_anew(tmp_path: pathlib.Path) -> None:
    code, said, _ = make_root(tmp_path, refused=True)
    assert code != 0 and "it needs the network" in said
    assert not (tmp_path / "clone/build/ceph/trixie").exists()
    assert make_root(tmp_path)[::2] == (0, "made\n")


def test_root_that_cannot_be_made_says_why(tmp_path: pathlib.Path) -> None:
    code, said, asked = make_root(tmp_path, user=1000)
    assert code != 0 and "only root can make" in said and not asked
    code, said, asked = make_root(tmp_path, site="")
    assert code != 0 and "names no Debian archive" in said and not asked
