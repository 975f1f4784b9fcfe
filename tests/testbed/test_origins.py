"""What a run starts and loads is on a fresh machine, too: the decision, the record, the scripts."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import origins, shell, starts
from tests.testbed.origins import Package

REPO = origins.REPO
INSTALLED = {
    "coreutils": Package(required=True, needs=(("libc6",),)),
    "libc6": Package(),
    "ceph-fuse": Package(needs=(("libfuse2",), ("awk",))),
    "mawk": Package(provides=("awk",)),
    "libfuse2": Package(needs=(("ceph-fuse", "libc6"),)),  # a circle
    "rbd-fuse": Package(needs=(("no-such", "libfuse2"),)),
}


def test_machine_has_what_is_required_and_what_is_listed_with_its_needs() -> None:
    assert origins.brought(INSTALLED, []) == {"coreutils", "libc6"}
    every = set(INSTALLED) - {"rbd-fuse"}
    assert origins.brought(INSTALLED, ["ceph-fuse", "not-installed"]) == every
    assert origins.brought(INSTALLED, ["rbd-fuse", "ceph-fuse"]) == set(INSTALLED)


def test_package_that_is_not_listed_is_complained_about() -> None:
    brought = origins.brought(INSTALLED, ["ceph-fuse"])
    assert origins.complaint("/usr/bin/ceph-fuse", "ceph-fuse", brought) == ""
    said = origins.complaint("/usr/bin/rbd-fuse", "rbd-fuse", brought)
    assert "rbd-fuse" in said and "scripts/packages.txt" in said
    assert "no Debian package" in origins.complaint("/opt/x", "", brought)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a Python process that a test starts writes what it starts."""
    monkeypatch.setenv(starts.RECORD, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(starts.HOOK))
    return tmp_path


def test_record_has_what_a_started_python_starts_and_loads(record: Path) -> None:
    script = (
        "import subprocess, ctypes; ctypes.CDLL('libc.so.6');"
        "subprocess.run(['env', 'A=1', 'nice', '-n', '1', 'true']);"
        "subprocess.run(['sh', '-c', 'x=1; date | sort'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    found = starts.found(record)
    for program in ("env", "nice", "true"):
        assert any(line.endswith(f"/{program}") for line in found), found
    assert "library libc.so.6" in found
    assert "shell 'x=1; date | sort'" in found


@pytest.mark.real
def test_real_program_is_complained_about_once_its_package_is_not_listed() -> None:
    """rbd-fuse: tests of the volumes start it, and once no list had it."""
    found = {"program /usr/bin/rbd-fuse", "shell 'rbd-fuse x'", "program /usr/bin/env"}
    listed = origins.listed()
    assert origins.complaints(found, listed) == []
    listed.remove("rbd-fuse")
    (said,) = origins.complaints(found, listed)
    assert "/usr/bin/rbd-fuse is of Debian's rbd-fuse" in said


def test_hook_is_on_in_this_run() -> None:
    from tests import conftest

    ctypes.CDLL("libm.so.6")
    subprocess.run(["true"], check=True)
    found = starts.found(conftest.STARTS)
    assert "library libm.so.6" in found
    assert any(line.endswith("/true") for line in found)


@pytest.mark.parametrize(
    ("text", "programs"),
    [
        ("a b | c && d; e", "a c d e"),
        ('x="$(a "b $(c)")" d', "a c d"),
        ("if ! a; then b >c 2>&1; else d; fi", "a b d"),
        ("f() { a; }\nf 'b; c'", "a"),
        ("x=(a b)\nc <<E\nd e\nE\nf # g", "c f"),
        ('"$a" b; $c d; ./e', "./e"),
        ("while read -r x; do a; done < <(b)", "a b"),
        ("for x in a b; do nice c; done; echo $((1 + 2))", "nice c"),
        ("case x in a) b ;; esac; command -v d; A=1 exec e", "b d e"),
    ],
)
def test_programs_of_a_shell_script_are_read_from_its_text(text: str, programs: str) -> None:
    assert shell.commands(text) - {"a)"} == set(programs.split())


SCRIPTS = [*REPO.glob("scripts/*.sh"), *REPO.glob("deploy/**/*.sh")]


@pytest.mark.real  # after the whole set-up
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_start_what_a_fresh_machine_has(script: Path) -> None:
    text = script.read_text()
    if "steps.sh" in text:  # what it sources
        text = (REPO / "scripts" / "steps.sh").read_text() + text
    assert origins.complaints({f"shell {text!r}"}, origins.listed()) == []
    assert not shell.unknown(text) - origins.TOOLCHAINS


def test_a_script_with_a_program_of_another_package_is_complained_about() -> None:
    said = origins.complaints({"shell 'git status'"}, [])
    assert len(said) == 1 and "git" in said[0]
