"""The image of this checkout: complete, small, honest about its version, clean of this machine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import image

pytestmark = [pytest.mark.real, pytest.mark.timeout(image.BUILD_SECONDS)]

MEGABYTES = 300
# What the rooms load and start; the command fails where something is missing.
LOADED = {
    "bindings": "import rados, rbd, cephfs; rados.Rados()",
    "libcephfs": "import ctypes; ctypes.CDLL('libcephfs.so.2').ceph_create",
    "libbpf": "import ctypes; ctypes.CDLL('libbpf.so.1').bpf_object__open_file",
    "libblkid": "import ctypes; ctypes.CDLL('libblkid.so.1').blkid_new_probe",
    "certificates": "import ssl; assert ssl.create_default_context().cert_store_stats()['x509_ca']",
    "guard": "import pathlib, volumes; p = pathlib.Path(volumes.__file__).parent;"
    "assert list(p.glob('guard/**/*.bpf.o'))",
    "runtime": "import grpc",
}
STARTED = ("ceph-fuse", "rados", "rbd-nbd", "journalctl", "modprobe")


@pytest.fixture(scope="module")
def container() -> Iterator[image.Container]:
    with image.container(image.build()) as made:
        yield made


@pytest.mark.parametrize("what", LOADED)
def test_image_has_library(container: image.Container, what: str) -> None:
    container.run("/opt/nodeagent/bin/python", "-c", LOADED[what])


@pytest.mark.parametrize("program", STARTED)
def test_image_has_program(container: image.Container, program: str) -> None:
    assert container.run(program, "--version")


def test_label_says_what_the_command_says(container: image.Container) -> None:
    labels = container.config()["Labels"]
    said = container.run("nodeagent", "--version").split()[-1]
    assert labels["org.opencontainers.image.version"] == said == image.version()
    assert labels["org.opencontainers.image.revision"] == container.image.tag


def test_image_is_small(container: image.Container) -> None:
    done = subprocess.run(
        ["du", "-sx", "--block-size=1M", "--apparent-size", str(container.root)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert int(done.stdout.split()[0]) <= MEGABYTES


def test_image_holds_nothing_of_the_build_and_of_this_machine(container: image.Container) -> None:
    root = container.root
    for name in ("var/lib/apt/lists", "var/cache/apt", "tmp", "root/.cache", "var/log"):
        assert not [p for p in (root / name).rglob("*") if p.is_file()], name
    for name in ("opt/pip", "src", "wheel", "usr/bin/clang", "etc/pip.conf", "etc/apt/machine"):
        assert not (root / name).exists(), name
    sites = {line.split()[1] for line in _sources(root)}
    assert sites == {"http://deb.debian.org/debian"}
    assert not any((root / "etc/apt/apt.conf.d").glob("machine*"))


def _sources(root: Path) -> list[str]:
    files = [root / "etc/apt/sources.list", *(root / "etc/apt/sources.list.d").iterdir()]
    return [line for each in files for line in each.read_text().splitlines() if line]
