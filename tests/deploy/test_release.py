"""What 'make release' makes of a clone, a chart that a registry takes, and install.sh with it."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.testbed import kubernetes, registry, scripts, waiting

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "deploy" / "install.sh"
VERSION = "0.1.0"
BUILD_SECONDS = 240.0
WHEEL = f"nodeagent-{VERSION}-py3-none-any.whl"


def run(*words: str, seconds: float = 60.0, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=waiting.limit(seconds),
        stdin=subprocess.DEVNULL, env={**os.environ, **more},
    )  # fmt: skip


def git(folder: Path, *words: str) -> None:
    me = ("-c", "user.name=test", "-c", "user.email=test@test.invalid")
    done = run("git", "-C", str(folder), *me, *words)
    assert done.returncode == 0, done.stderr


def release(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = str(clone / "scripts" / "release.py")
    return run(sys.executable, program, *words, seconds=BUILD_SECONDS)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At its tag, with a change log that has a date."""
    folder = tmp_path_factory.mktemp("release") / "clone"
    assert run("git", "clone", "--quiet", str(ROOT), str(folder)).returncode == 0
    log = folder / "CHANGELOG.md"
    log.write_text(log.read_text().replace(f"## {VERSION}, not released", f"## {VERSION}, today"))
    git(folder, "commit", "--quiet", "--all", "--message", "Release")
    git(folder, "tag", f"v{VERSION}")
    return folder


@pytest.fixture(scope="module")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registry.Registry]:
    made = registry.Registry(tmp_path_factory.mktemp("oci"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def released(clone: Path, oci: registry.Registry) -> Path:
    out = clone.parent / "out"
    to = f"oci://127.0.0.1:{oci.port}/charts"
    done = release(clone, "--out", str(out), "--to", to, "--plain-http")
    assert done.returncode == 0, done.stderr
    return out


def test_notice_names_the_libraries_of_the_lock() -> None:
    made = scripts.load("locked")
    assert made.NOTICE.read_text() == made.document(), "run scripts/locked.py"
    lines = (ROOT / "locks" / "runtime.txt").read_text().splitlines()
    assert len(made.libraries()) == sum("==" in line for line in lines) > 20


def test_the_lock_of_the_extra_gpu_is_what_tests_have() -> None:
    lock = (ROOT / "locks" / "gpu.txt").read_text()
    assert lock.startswith("nvidia-ml-py==") and lock.count("==") == 1
    assert "--hash=sha256:" in lock
    assert lock in (ROOT / "locks" / "dev.txt").read_text(), "run 'make lock'"


def test_install_takes_nothing_from_an_index_without_a_hash() -> None:
    """Each of its calls of pip, but that of the wheel that is given."""
    calls = re.findall(r"^.*\bpip install .*$", INSTALL.read_text(), re.MULTILINE)
    assert len(calls) == 3
    for call in calls:
        assert "--require-hashes" in call or "--no-index" in call, call


def test_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190


@pytest.mark.real
@pytest.mark.timeout(BUILD_SECONDS)
def test_release_is_whole_and_a_registry_has_its_chart(
    released: Path, oci: registry.Registry, tmp_path: Path
) -> None:
    names = {file.name for file in released.iterdir()}
    assert names == {
        WHEEL, f"nodeagent-{VERSION}.tgz", f"nodeagent-{VERSION}.cdx.json", "crds.yaml",
        "runtime.txt", "gpu.txt", "install.sh", "nodeagent.service", "NOTES.md", "LICENSE",
        "NOTICE", "SHA256SUMS", f"nodeagent-{VERSION}-image.tar",
        f"nodeagent-{VERSION}-image.cdx.json",
    }  # fmt: skip
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=released)
    assert done.returncode == 0
    assert len((released / "SHA256SUMS").read_text().splitlines()) == len(names) - 1
    with zipfile.ZipFile(released / WHEEL) as wheel:
        inside = wheel.namelist()
        meta = wheel.read(f"nodeagent-{VERSION}.dist-info/METADATA").decode()
    assert "volumes/guard/guard.bpf.o" in inside
    assert {f"nodeagent-{VERSION}.dist-info/licenses/{n}" for n in ("LICENSE", "NOTICE")} <= set(
        inside
    )
    assert "License-Expression: Apache-2.0" in meta
    listed = (released / f"nodeagent-{VERSION}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(listed) is None
    assert "aiohttp" in [each["name"] for each in json.loads(listed)["components"]]
    with tarfile.open(released / f"nodeagent-{VERSION}-image.tar") as archive:
        index = archive.extractfile("index.json")
        assert index is not None
        (manifest,) = json.load(index)["manifests"]
        name = manifest["annotations"]["org.opencontainers.image.ref.name"]
        assert name == f"localhost/nodeagent:{VERSION}"
    notes = (released / "NOTES.md").read_text()
    assert notes.startswith(f"## {VERSION}, today") and "\n## " not in notes

    words = ("pull", f"oci://127.0.0.1:{oci.port}/charts/nodeagent", "--version", VERSION)
    taken = kubernetes.helm(*words, "--plain-http", "--destination", str(tmp_path))
    assert taken.returncode == 0, taken.stderr
    chart = f"nodeagent-{VERSION}.tgz"
    assert (tmp_path / chart).read_bytes() == (released / chart).read_bytes()
    shown = kubernetes.helm("show", "chart", str(tmp_path / chart)).stdout
    assert yaml.safe_load(shown)["appVersion"] == VERSION


@pytest.mark.real
@pytest.mark.timeout(BUILD_SECONDS)
def test_what_is_no_release_is_refused(clone: Path, released: Path, tmp_path: Path) -> None:
    other = tmp_path / "clone"
    assert run("git", "clone", "--quiet", str(clone), str(other)).returncode == 0
    out = ("--out", str(tmp_path / "out"), "--no-image")

    def refused(*words: str) -> str:
        done = release(other, *(words or out))
        assert done.returncode == 1 and not (tmp_path / "out").exists(), done.stdout
        return done.stderr

    assert "is not empty" in refused("--out", str(released))
    assert "write it like oci://" in refused(*out, "--to", "http://x")
    (other / "left").touch()
    assert "the checkout has changes (left)" in refused()
    (other / "left").unlink()
    log = other / "CHANGELOG.md"
    text = log.read_text()
    for changed, said in (
        (text.replace(f"## {VERSION}, today", f"## {VERSION}, not released"), "is not released"),
        (text.replace(f"## {VERSION}, today", "## 9.9.9"), f"no section '## {VERSION}'"),
    ):
        log.write_text(changed)
        git(other, "commit", "--quiet", "--all", "--message", "Change")
        assert "no tag is here" in refused()
        git(other, "tag", "--force", f"v{VERSION}")
        assert said in refused()


@pytest.mark.real
@pytest.mark.timeout(BUILD_SECONDS)
def test_install_makes_an_agent_that_takes_its_settings(released: Path, tmp_path: Path) -> None:
    prefix, root = tmp_path / "opt" / "nodeagent", tmp_path / "root"
    words = (
        "--wheel", str(released / WHEEL), "--prefix", str(prefix), "--root", str(root),
        "--python", sys.executable,
    )  # fmt: skip
    install = str(released / "install.sh")  # the lock and the unit lie beside it
    done = run("bash", install, *words, seconds=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    assert f"version {VERSION} is in {prefix}" in done.stdout
    unit = (root / "etc/systemd/system/nodeagent.service").read_text()
    assert f"ExecStart={prefix}/bin/nodeagent --config" in unit
    settings = root / "etc/nodeagent/nodeagent.yaml"
    assert settings.stat().st_mode & 0o777 == 0o640
    settings.write_text("cache: {reserve: 20%}\n")
    # Debian's bindings, where this machine has them, are the only files of another origin.
    code = "import importlib.util as i, kit; print(kit.__file__, bool(i.find_spec('rados')))"
    where = run(str(prefix / "bin/python"), "-I", "-c", code).stdout
    assert where.startswith(f"{prefix}/lib/")

    again = run("bash", install, *words, seconds=BUILD_SECONDS)
    assert again.returncode == 0, again.stderr
    assert settings.read_text() == "cache: {reserve: 20%}\n", "settings of the operator's"
    settings.write_text("cahce: {}\n")
    wrong = run("bash", install, *words, seconds=BUILD_SECONDS)
    assert wrong.returncode == 1 and "cannot be used" in wrong.stderr and "cahce" in wrong.stderr


@pytest.mark.real
@pytest.mark.timeout(BUILD_SECONDS)
def test_an_upgrade_restarts_a_running_agent(released: Path, tmp_path: Path) -> None:
    """In a mount namespace with an /etc and a /run of its own, and a systemctl that notes."""
    asked, tools, etc = (tmp_path / name for name in ("asked", "tools", "etc"))
    tools.mkdir()
    (tools / "systemctl").write_text(f'#!/bin/sh\necho "$*" >>{asked}\n')
    (tools / "systemctl").chmod(0o755)
    prefix = tmp_path / "opt" / "nodeagent"
    install = (
        f"bash {released}/install.sh --wheel {released / WHEEL} --prefix {prefix} "
        f"--python {sys.executable}"
    )
    alone = (
        f"set -e; cp -a /etc {etc}; mount --bind {etc} /etc; "
        "mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system; "
        f"PATH={tools}:$PATH {install}"
    )
    words = ("unshare", "--mount", "--propagation", "private", "bash", "-c", alone)
    done = run(*words, seconds=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    assert asked.read_text().splitlines() == ["daemon-reload", "try-restart nodeagent"]
    assert (etc / "systemd/system/nodeagent.service").exists()
    asked.unlink()
    done = run(
        *install.split(), "--root", str(tmp_path / "root"), seconds=BUILD_SECONDS,
        PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0 and not asked.exists(), "for an image or a try"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which wheel?"),
        (["--wheel", "nowhere.whl"], "there is no file nowhere.whl"),
        (["--wheel", "{folder}/other-1-py3-none-any.whl"], "is not a wheel of nodeagent"),
        (["--wheel", "{wheel}", "--prefix", "opt"], "an absolute path"),
        (["--wheel", "{wheel}", "--lock", "{folder}/no"], "the libraries' lock is missing"),
        (
            ["--wheel", "{wheel}", "--gpu", "--lock", "{folder}/other-1-py3-none-any.whl"],
            "{folder}/gpu.txt is missing",
        ),
        (["--wheel", "{wheel}", "--python", "/bin/false"], "is not Python 3.11"),
        (["--wheel", "{wheel}", "--prefix", "{folder}"], "is no environment of Python"),
        (["--wheel"], "install.sh --wheel FILE"),
        (["--purge"], "install.sh --wheel FILE"),
    ],
)
def test_install_says_what_is_wrong(tmp_path: Path, words: list[str], said: str) -> None:
    wheel = tmp_path / WHEEL
    wheel.touch()
    (tmp_path / "other-1-py3-none-any.whl").touch()
    given = [each.format(folder=tmp_path, wheel=wheel) for each in words]
    done = run("bash", str(INSTALL), *given)
    assert done.returncode in (1, 2)
    assert said.format(folder=tmp_path) in done.stdout + done.stderr
    assert not (tmp_path / "bin").exists()
