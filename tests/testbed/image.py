"""The agent's image, built from a clean checkout by our own Dockerfile.

buildah builds it on a base made by Debian's mmdebstrap, because a machine of the tests need not
reach a registry. Base, layers and finished images live in the cache folder outside the clone, so a
fresh clone builds only what it changed. A hash of the files it is built from is an image's tag.

The machine's own package settings (proxies, certificate authorities) reach the build as a folder
mounted over /etc/apt, read-only, and its mirrors as the build's secret: nothing of it is in the
image.
scripts/image.py builds it by hand.
"""

import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

REPO = Path(__file__).parents[2]
CACHE = Path(os.environ.get("NODEAGENT_CACHE", "~/.cache/nodeagent")).expanduser()
NAME = "localhost/nodeagent"
RELEASE = "bookworm"
BUILD_SECONDS = 1500.0  # the first time, on a busy machine; a changed version takes half a minute
KEPT = 6  # archives that nobody uses; some tests make a second image of a checkout
_LABEL = "org.opencontainers.image.version"
MOST_LAYERS = 200
# Files of the checkout that no image holds; as in .dockerignore.
_LEFT_OUT = ("tests/", "docs/", "examples/", ".ci/", "deploy/chart/", "deploy/manifests/")
# As Debian's own slim images. usr-is-merged: else perl comes along, 50 MB.
_BASE = (
    "--mode=root", "--variant=minbase", "--include=usr-is-merged",
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    # What mmdebstrap took over from this machine.
    '--customize-hook=cd "$1/etc" && rm -f resolv.conf hostname && : >apt/sources.list',
)  # fmt: skip
SBOM = "usr/share/nodeagent/sbom.cdx.json"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MOUNTED = "/etc/apt"
# In the secret of every build; no image may hold it.
SOURCES_CANARY = "canary-of-the-package-sources-7f3a"
_kept: dict[Path, BinaryIO] = {}  # the archives that this process uses, locked


@dataclass(frozen=True)
class Image:
    """``archive``: an OCI archive that ``ctr images import`` takes; the SBOM lies beside it."""

    tag: str  # hash of what it was built from; its revision label
    version: str
    archive: Path

    @property
    def reference(self) -> str:
        return f"{NAME}:{self.tag}"

    @property
    def sbom(self) -> Path:
        return self.archive.with_suffix(".cdx.json")


@contextlib.contextmanager
def container(image: Image) -> Iterator["Container"]:
    """The image's file system with commands run in it (a chroot), gone afterwards."""
    home = CACHE / "image"
    name = _buildah(home, "from", "--pull-never", image.reference).strip()
    try:
        yield Container(image, home, name, Path(_buildah(home, "mount", name).strip()))
    finally:
        _buildah(home, "rm", name)


@contextlib.contextmanager
def base(release: str = RELEASE) -> Iterator[Path]:
    """The file system of the base that an image was built on."""
    home = CACHE / "image"
    name = _buildah(home, "from", "--pull-never", _base_name(release)).strip()
    try:
        yield Path(_buildah(home, "mount", name).strip())
    finally:
        _buildah(home, "rm", name)


@dataclass(frozen=True)
class Container:
    image: Image
    home: Path
    name: str
    root: Path

    def run(self, *words: str) -> str:
        """What it prints; AssertionError when it fails. Without /dev and /proc."""
        path = "PATH=/opt/nodeagent/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return _run("chroot", str(self.root), "/usr/bin/env", path, *words)

    def commit(self, made: Image) -> None:
        """The file system as it is now becomes an image with its archive."""
        _buildah(self.home, "config", "--label", f"{_LABEL}={made.version}", self.name)
        _buildah(self.home, "commit", "--quiet", self.name, made.reference)
        _push(self.home, made, made.archive.with_suffix(".new"))

    def run_with(self, folder: Path, *words: str) -> str:
        """As ``run``, with /dev, /proc, the host's network, ``folder`` and the right to mount."""
        return _buildah(
            self.home, "run", "--isolation", "chroot", "--network", "host",
            "--cap-add", "CAP_SYS_ADMIN", "--volume", f"{folder}:{folder}", self.name, "--", *words,
        )  # fmt: skip

    def packages(self) -> set[str]:
        """Debian's packages in it, as NAME=VERSION."""
        return set(self.run("dpkg-query", "-W", "-f", "${Package}=${Version}\n").split())

    def single_files(self) -> set[str]:
        """The packages of which it has one file only."""
        listed = self.root / "usr/share/nodeagent/single-files.txt"
        return {line.split()[0] for line in listed.read_text().splitlines()}

    def config(self) -> Any:
        return json.loads(_buildah(self.home, "inspect", self.name))["OCIv1"]["config"]

    def inspected(self) -> str:
        """All that buildah says of the image, its history included."""
        return _buildah(self.home, "inspect", "--type", "image", self.image.reference)


def version() -> str:
    project: dict[str, str] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return project["version"]


def is_built(release: str = RELEASE) -> bool:
    """Whether ``build`` finds the image of this checkout in the cache."""
    return _named(_checkout(), release, _arguments()).archive.exists()


def build(release: str = RELEASE, ceph: str = "", lock: str = "preferred") -> Image:
    """The image of this checkout on a Debian release, from the cache when it was built before.

    The lock is preferred and not required: the archive drops versions on any day, and the suite
    stays green.
    """
    files = _checkout()
    arguments = _arguments(ceph, lock)
    made = _named(files, release, arguments)
    home, archive, tag = made.archive.parent, made.archive, made.tag
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "lock"):
        if archive.exists():
            keep(made)
            return made
        with _folder(home / "work") as work:
            settings = _package_settings(work / "apt")
            (work / "sources.list").write_text(_sources(release))
            arguments |= {
                "BASE": _need_base(home, work, release),
                "PIP_CONFIG_FILE": f"{_MOUNTED}/machine/pip.conf",
                "VERSION": made.version,
                "REVISION": tag,
            }
            context = work / "context"
            for name in files:
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, context / name, follow_symlinks=False)
            _buildah(
                home, "bud", "--layers", "--isolation", "chroot", "--network", "host",
                "--pull-never", "--volume", f"{settings}:{_MOUNTED}:ro",
                "--secret", f"id=apt_sources,src={work / 'sources.list'}",
                *(f"--build-arg={name}={value}" for name, value in arguments.items()),
                "--tag", made.reference, str(context),
            )  # fmt: skip
            with container(made) as inside:
                shutil.copy(inside.root / SBOM, made.sbom)
            _push(home, made, work / "image.tar")
        keep(made)
        _forget_old(home)
    return made


def keep(made: Image) -> None:
    """Of an image that this process uses, no other one deletes the archive until this one ends."""
    os.utime(made.archive)
    if made.archive not in _kept:
        _kept[made.archive] = made.archive.open("rb")
        fcntl.flock(_kept[made.archive], fcntl.LOCK_SH)


def _arguments(ceph: str = "", lock: str = "preferred") -> dict[str, str]:
    return {"DEBIAN_LOCK": lock, "CEPH_RELEASE": ceph}


def _named(files: list[str], release: str, arguments: dict[str, str]) -> Image:
    tag = _hash(files, release, json.dumps(arguments, sort_keys=True))
    return Image(tag, version(), CACHE / "image" / f"{tag}.tar")


def _push(home: Path, made: Image, new: Path) -> None:
    """Write its archive, by way of ``new``. Not compressed: it is read once on this machine."""
    _buildah(
        home, "push", "--disable-compression", made.reference,
        f"oci-archive:{new}:{made.reference}",
    )  # fmt: skip
    new.rename(made.archive)


def _checkout() -> list[str]:
    """What git tracks, as it is in the work tree, without what .dockerignore leaves out."""
    names = _run("git", "-C", str(REPO), "ls-files", "--cached", "--others", "--exclude-standard")
    return sorted(
        name
        for name in names.splitlines()
        if not name.startswith(_LEFT_OUT) and (REPO / name).is_file()
    )


def _hash(files: list[str], *more: str) -> str:
    found = hashlib.sha256("\0".join(more).encode())
    for name in (*files, "tests/testbed/image.py"):
        path = REPO / name
        found.update(f"{name}\0{path.stat().st_mode & 0o111}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def _sources(release: str) -> str:
    """This machine's Debian mirrors, as a sources.list. /etc/apt has none during the build, so it
    works only where the secret is used."""
    lines = [
        f"deb [signed-by={_KEYRING}] {site} {suite.replace(RELEASE, release)} main"
        for site, suite in _archives()
    ]
    return "\n".join([f"# {SOURCES_CANARY}", *dict.fromkeys(lines)]) + "\n"


def _package_settings(folder: Path) -> Path:
    """What replaces /etc/apt during the build: this machine's ways to Debian's mirrors."""
    (folder / "machine").mkdir(parents=True)
    for name in ("apt.conf.d", "sources.list.d", "preferences.d", "trusted.gpg.d"):
        (folder / name).mkdir()
    authority = Path("/etc/ssl/certs/ca-certificates.crt")
    # Which indexes apt fetches is the image's own affair.
    acquire = "".join(
        line + "\n"
        for line in _run("apt-config", "dump", "--no-empty", "Acquire").splitlines()
        if not line.startswith(("Acquire::IndexTargets", "Acquire::Changelogs"))
    )
    pip = configparser.RawConfigParser()
    pip.read(
        ["/etc/pip.conf", *(Path.home() / p for p in (".config/pip/pip.conf", ".pip/pip.conf"))]
    )
    if not pip.has_section("global"):
        pip.add_section("global")
    for name, value in os.environ.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
            pip.set("global", name[4:].lower().replace("_", "-"), value)
    pip.remove_option("global", "find-links")  # a folder of this machine
    if authority.exists():
        shutil.copy(authority, folder / "machine" / "ca.crt")
        acquire += f'Acquire::https::CAInfo "{_MOUNTED}/machine/ca.crt";\n'
        pip.set("global", "cert", f"{_MOUNTED}/machine/ca.crt")
    (folder / "apt.conf.d" / "machine").write_text(acquire)
    with (folder / "machine" / "pip.conf").open("w") as stream:
        pip.write(stream)
    for name in ("auth.conf", "auth.conf.d"):
        source = Path("/etc/apt", name)
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def _archives() -> Iterator[tuple[str, str]]:
    """Address and suite of the Debian archives that this machine's apt uses."""
    targets = _run(
        "apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)",
        "Created-By: Packages", "Origin: Debian",
    )  # fmt: skip
    for line in targets.splitlines():
        site, _, suite = line.partition(" ")
        yield site, suite


def _need_base(home: Path, work: Path, release: str) -> str:
    name = _base_name(release)
    if not _buildah(home, "images", "--quiet", "--filter", f"reference={name}").strip():
        site = next(site for site, suite in _archives() if "-" not in suite)  # no updates pocket
        _run("mmdebstrap", "--quiet", *_BASE, release, str(work / "base.tar"), site)
        container = _buildah(home, "from", "scratch").strip()
        _buildah(home, "add", "--quiet", container, str(work / "base.tar"), "/")
        _buildah(home, "commit", "--quiet", "--rm", container, name)
    return name


def _base_name(release: str) -> str:
    recipe = hashlib.sha256(repr(_BASE).encode()).hexdigest()[:12]
    return f"localhost/nodeagent-base:{release}-{recipe}"


def _forget_old(home: Path) -> None:
    archives = sorted(home.glob("*.tar"), key=lambda path: path.stat().st_mtime)
    for archive in archives[:-KEPT]:
        with archive.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # a run uses it
        archive.unlink()
        archive.with_suffix(".cdx.json").unlink(missing_ok=True)
        _buildah(home, "rmi", f"{NAME}:{archive.stem}", check=False)
    # Layers that the next build starts from, and with time many that no build does.
    if len(_buildah(home, "images", "--all", "--quiet").splitlines()) > MOST_LAYERS:
        _buildah(home, "rmi", "--prune", check=False)


def _buildah(home: Path, *words: str, check: bool = True) -> str:
    return _run(
        "buildah", "--root", str(home / "storage"), "--runroot", str(home / "run"),
        "--storage-driver", "overlay", *words, check=check,
    )  # fmt: skip


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if check and done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise AssertionError(f"{' '.join(words[:8])} … failed with {done.returncode}:\n{said}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
