"""The image of this checkout: complete, small, honest about what it is, clean of this machine."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.testbed import ceph, image, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(image.BUILD_SECONDS)]

MEGABYTES = 230
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
# In the container, against a real cluster, as the ledger asks: names of the images of a pool.
IMAGES = """
import sys, rados, rbd
with rados.Rados(conffile=sys.argv[1], name="client.admin") as cluster:
    with cluster.open_ioctx(sys.argv[2]) as pool:
        print(*rbd.RBD().list(pool))
"""


# Each Debian that the image can be built on, and the release of Ceph that comes with it.
CEPH = {"bookworm": "16", "trixie": "18"}


@pytest.fixture(scope="module", params=CEPH)
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def container(release: str) -> Iterator[image.Container]:
    made = image.build() if release == image.RELEASE else image.build(release, CEPH[release])
    with image.container(made) as inside:
        yield inside


@pytest.fixture(scope="module")
def contents(container: image.Container) -> Any:
    """The SBOM in the image."""
    return json.loads((container.root / image.SBOM).read_text())


@pytest.mark.parametrize("what", LOADED)
def test_image_has_library(container: image.Container, what: str) -> None:
    container.run("/opt/nodeagent/bin/python", "-c", LOADED[what])


@pytest.mark.parametrize("program", STARTED)
def test_image_has_program(container: image.Container, program: str) -> None:
    assert container.run(program, "--version")


def test_image_has_the_ceph_that_was_asked_for(container: image.Container, release: str) -> None:
    for program in ("ceph-fuse", "rados", "rbd-nbd"):
        assert container.run(program, "--version").startswith(f"ceph version {CEPH[release]}.")


def test_container_lists_the_images_of_a_real_cluster(
    container: image.Container, cluster: ceph.CephCluster
) -> None:
    name = f"image-{os.urandom(3).hex()}"
    cluster.run("rbd", "create", f"rbd/{name}", "--size", "8M")
    python = "/opt/nodeagent/bin/python"
    said = container.run_with(cluster.folder, python, "-c", IMAGES, str(cluster.conf), "rbd")
    assert name in said.split()
    asked = ("rados", "-c", str(cluster.conf), "lspools")
    assert "rbd" in container.run_with(cluster.folder, *asked).split()


def test_container_reads_a_real_cephfs_through_its_own_ceph_fuse(
    container: image.Container, cluster: ceph.CephCluster, area: Path
) -> None:
    content = os.urandom(3_000_000)
    with cluster.mounted(area / "host") as mounted:
        (mounted / "of-the-image-test").write_bytes(content)
    script = (
        f"mkdir /mnt/c && ceph-fuse -c {cluster.conf} -n client.admin /mnt/c >&2 && "
        "sha256sum /mnt/c/of-the-image-test; umount /mnt/c"
    )
    said = container.run_with(cluster.folder, "sh", "-c", script)
    assert said.split()[0] == hashlib.sha256(content).hexdigest()


def test_label_command_and_sbom_name_one_version(container: image.Container, contents: Any) -> None:
    labels = container.config()["Labels"]
    said = container.run("nodeagent", "--version").split()[-1]
    described = contents["metadata"]["component"]
    assert labels["org.opencontainers.image.version"] == said == image.version()
    assert (described["name"], described["version"]) == ("nodeagent", said)
    assert labels["org.opencontainers.image.revision"] == container.image.tag
    assert contents["metadata"]["properties"] == [
        {"name": "nodeagent:revision", "value": container.image.tag}
    ]


def test_sbom_is_valid_and_lies_beside_the_image(container: image.Container) -> None:
    text = (container.root / image.SBOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert container.image.sbom.read_text() == text


def test_sbom_has_all_that_is_in_the_image_and_nothing_else(
    container: image.Container, contents: Any
) -> None:
    listed: dict[str, set[str]] = {"deb": set(), "pypi": set()}
    for each in (contents["metadata"]["component"], *contents["components"]):
        kind = each["purl"].removeprefix("pkg:").partition("/")[0]
        listed[kind].add(f"{each['name']}={each['version']}")
    assert listed["deb"] == container.packages() | container.single_files()
    found = {
        (dist := metadata.Distribution.at(path)).metadata["Name"] + "=" + dist.version
        for path in (container.root / "opt").rglob("*.dist-info")
    }
    assert "grpcio" in str(found) and listed["pypi"] == found


def test_image_has_the_packages_of_the_lock(container: image.Container, release: str) -> None:
    file = image.REPO / "locks" / f"debian-{release}.txt"
    lock = {line for line in file.read_text().splitlines() if not line.startswith("#")}
    there = container.packages() | container.single_files()
    gone = container.root / "usr/share/nodeagent/not-locked.txt"
    if gone.exists():  # the archive has newer ones; the build says so, and how to go on
        assert set(gone.read_text().split()) <= lock
        lock, there = ({line.partition("=")[0] for line in each} for each in (lock, there))
    assert lock <= there


def test_image_is_small(container: image.Container) -> None:
    done = subprocess.run(
        ["du", "-sx", "--block-size=1M", "--apparent-size", str(container.root)],
        capture_output=True, text=True, check=True, timeout=waiting.limit(60),
    )  # fmt: skip
    assert int(done.stdout.split()[0]) <= MEGABYTES


def test_image_holds_nothing_of_the_build_and_of_this_machine(container: image.Container) -> None:
    root = container.root
    for name in ("var/lib/apt/lists", "var/cache/apt", "tmp", "root/.cache", "var/log"):
        assert not [p for p in (root / name).rglob("*") if p.is_file()], name
    for name in ("opt/pip", "src", "wheel", "image", "usr/bin/clang", "etc/pip.conf"):
        assert not (root / name).exists(), name
    files = [p for p in (root / "etc/apt").rglob("*") if p.is_file()]
    assert not [p for p in files if "://" in p.read_text(errors="replace")]
    assert not (root / "etc/apt/machine").exists()


def test_package_sources_stay_out_of_the_image_and_its_history(
    container: image.Container,
) -> None:
    """They may hold a login. The build had them: /etc/apt names no mirror."""
    said = container.inspected()
    assert "apt_sources" in said  # the history does show how each layer was made
    assert image.SOURCES_CANARY not in said
    found = subprocess.run(
        ["grep", "-rlF", image.SOURCES_CANARY, str(container.root)],
        capture_output=True, text=True, check=False, timeout=waiting.limit(300),
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (1, "")  # 1: read all, nothing found
