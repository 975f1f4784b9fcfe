"""Build the agent's image as the tests do, with this machine's package settings, and look at it.

image.py build [RELEASE [CEPH]]   RELEASE: of Debian; CEPH: of Ceph's own packages, not Debian's
image.py prepare RELEASE...   what tests need: these images, and the release before of the first
image.py lock [RELEASE]    write locks/debian-RELEASE.txt: the newest packages
image.py sizes [RELEASE]   what each part of the image costs
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.testbed import earlier, image

HEAD = """\
# Debian packages of the image on this release, its base's too. 'make image-lock' makes this file,
# deploy/image/install.sh uses it. Of ceph-common and systemd the image has one program each.
"""
# The parts, by what a package's name holds; the first that fits counts.
PARTS = {
    "Ceph and what it needs": ("ceph", "rados", "rbd", "boost", "ibverbs", "rdmacm", "fuse", "nl-"),
    "Python of Debian": ("python", "sqlite", "expat", "media-types", "tzdata", "readline"),
    "certificates, kmod, libbpf, journalctl": ("",),
}
AGENT = ("nodeagent", "cache", "preheat", "volumes", "ceph", "kube", "linux", "kit", "fleet")
ENVIRONMENT = "/opt/nodeagent/"


def main() -> None:
    if sys.argv[1:2] == ["prepare"]:
        _prepare(sys.argv[2:])
        return
    command, *words = sys.argv[1:] or ["build"]
    if command not in ("build", "lock", "sizes") or len(words) > (2 if command == "build" else 1):
        sys.exit(__doc__)
    release, ceph = (*words, *(image.RELEASE, "")[len(words) :])
    made = image.build(release, ceph, lock="off" if command == "lock" else "preferred")
    with image.container(made) as inside:
        if command == "lock":
            _lock(inside, release)
        elif command == "sizes":
            _sizes(inside, release)
        else:
            print(f"{made.reference}\n{made.archive}\n{made.sbom}")


def _prepare(releases: list[str]) -> None:
    for release in releases:
        if not image.is_built(release):
            say = "2 to 3 minutes the first time, less than one after a change"
            print(f"setup: building the agent's image on Debian {release} ({say})", file=sys.stderr)
        made = image.build(release)
        if release == image.RELEASE:
            earlier.build(made)


def _lock(inside: image.Container, release: str) -> None:
    path = image.REPO / "locks" / f"debian-{release}.txt"
    listed = sorted(inside.packages() | inside.single_files())
    path.write_text(HEAD + "".join(f"{line}\n" for line in listed))
    print(path)


def _sizes(inside: image.Container, release: str) -> None:
    owner = {}
    for listing in (inside.root / "var/lib/dpkg/info").glob("*.list"):
        for line in listing.read_text().splitlines():
            owner[line] = listing.stem.partition(":")[0]
    with image.base(release) as root:
        in_base = {
            path.stem.partition(":")[0] for path in (root / "var/lib/dpkg/info").glob("*.list")
        }
    sizes: dict[str, int] = {}
    seen = set()
    for path in inside.root.rglob("*"):
        found = path.lstat()
        if path.is_dir() or found.st_ino in seen:
            continue
        seen.add(found.st_ino)
        name = f"/{path.relative_to(inside.root)}"
        part = _part(name, owner.get(name) or owner.get(name.removeprefix("/usr"), ""), in_base)
        sizes[part] = sizes.get(part, 0) + found.st_size
    for part, size in sorted(sizes.items(), key=lambda each: -each[1]):
        print(f"| {part} | {size / 1e6:.0f} |")
    print(f"| in all | {sum(sizes.values()) / 1e6:.0f} |")


def _part(name: str, package: str, in_base: set[str]) -> str:
    if name.startswith(ENVIRONMENT):
        module = name.partition("/site-packages/")[2].partition("/")[0]
        return "the agent" if module in AGENT else "Python libraries, stripped"
    if not package:  # compiled Python modules; certificates; dpkg's and apt's own records
        return "Python of Debian" if name.startswith("/usr/lib/python") else "the base"
    if package in in_base:
        return "the base"
    return next(part for part, words in PARTS.items() if any(word in package for word in words))


main()
