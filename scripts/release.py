"""Make a release of this checkout: every file that is published, in one folder, with checksums.

release.py [--out FOLDER] [--to oci://HOST/PATH] [--no-image]

The version is that of pyproject.toml, and the checkout has to be clean and at the tag vVERSION.
--to pushes the chart there. The image is made where its tools are (docs/upgrade.md).
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

sys.path.insert(0, str(Path(__file__).parent))

import locked

ROOT = Path(__file__).parents[1]
COPIED = (
    "LICENSE", "NOTICE", "deploy/manifests/crds.yaml", "locks/runtime.txt", "locks/gpu.txt",
    "deploy/install.sh", "deploy/nodeagent.service",
)  # fmt: skip
IMAGE_TOOLS = ("buildah", "mmdebstrap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--to", default="", help="oci://HOST/PATH of a registry for the chart")
    parser.add_argument("--plain-http", action="store_true", help="of that registry")
    parser.add_argument("--no-image", action="store_true")
    given = parser.parse_args()
    if given.to and not re.fullmatch(r"oci://[\w.:-]+(/[\w./-]+)?", given.to):
        sys.exit(f"release: --to {given.to}: write it like oci://registry.example/charts")
    version = checked_version()
    out = (given.out or ROOT / "build" / "release" / version).absolute()
    if out.exists() and any(out.iterdir()):
        sys.exit(f"release: {out} is not empty: remove it, or name another folder with --out")
    notes = section(version)
    out.mkdir(parents=True, exist_ok=True)
    (out / "NOTES.md").write_text(notes)
    for name in COPIED:
        shutil.copy(ROOT / name, out)
    wheel(out)
    (out / f"nodeagent-{version}.cdx.json").write_text(contents(version))
    chart = chart_archive(out, version)
    if not given.no_image:
        image(out, version)
    sums(out)
    if given.to:
        helm("push", str(chart), given.to, *(["--plain-http"] if given.plain_http else []))
    for file in sorted(out.iterdir()):
        print(file)


def said(*words: str, **environment: str) -> str:
    """What a program prints; SystemExit with its error when it fails."""
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"release: {words[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def checked_version() -> str:
    """SystemExit unless this is a clean checkout of the version's tag."""
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    if changed := said("git", "status", "--porcelain"):
        some = ", ".join(line[3:] for line in changed.splitlines()[:3])
        sys.exit(f"release: the checkout has changes ({some}): commit or remove them")
    tags = said("git", "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        at = f"the tag here is {', '.join(tags)}" if tags else "no tag is here"
        sys.exit(
            f"release: pyproject.toml has version {version} and {at}: 'git tag -s v{version}', or "
            "check out that tag"
        )
    chart = (ROOT / "deploy/chart/Chart.yaml").read_text()
    if f"\nversion: {version}\n" not in chart or f"\nappVersion: {version}\n" not in chart:
        sys.exit(f"release: deploy/chart/Chart.yaml has another version than {version}")
    return version


def section(version: str) -> str:
    """What the change log says of a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}(.*)\n([\s\S]*?)(?=^## |\Z)", text, re.MULTILINE)
    if found is None:
        sys.exit(f"release: CHANGELOG.md has no section '## {version}'")
    if "not released" in found[1]:
        sys.exit(f"release: CHANGELOG.md says that {version} is not released: write the date there")
    if not found[2].strip():
        sys.exit(f"release: CHANGELOG.md says nothing about {version}")
    return found[0].strip() + "\n"


def wheel(out: Path) -> None:
    """Built by what locks/build.txt names, with its hashes."""
    uv = Path(sys.executable).parent / "uv"
    said(
        str(uv), "build", "--wheel", "--quiet", "--build-constraints", "locks/build.txt",
        "--require-hashes", "--out-dir", str(out),
        SOURCE_DATE_EPOCH=said("git", "log", "-1", "--format=%ct"),
    )  # fmt: skip
    (out / ".gitignore").unlink(missing_ok=True)  # uv's
    if len(list(out.glob("nodeagent-*.whl"))) != 1:
        sys.exit("release: uv made no wheel")


def contents(version: str) -> str:
    """The wheel and its libraries as CycloneDX; of the image deploy/image/sbom.py writes it."""
    own = Component(
        name="nodeagent", version=version, type=ComponentType.APPLICATION,
        bom_ref=f"nodeagent=={version}",
    )  # fmt: skip
    bom = Bom()
    bom.metadata.component = own
    for each in locked.libraries():
        home = [ExternalReference(type=ExternalReferenceType.WEBSITE, url=XsUri(each.home))]
        bom.components.add(
            Component(
                name=each.name, version=each.version, type=ComponentType.LIBRARY,
                bom_ref=f"pypi:{each.name}=={each.version}",
                purl=PackageURL("pypi", None, each.name, each.version),
                external_references=home if each.home else [],
            )
        )  # fmt: skip
    bom.register_dependency(own, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def helm(*words: str) -> str:
    """By PATH, else as the tests have built it (scripts/kubernetes.sh)."""
    cache = Path(os.environ.get("NODEAGENT_CACHE", "~/.cache/nodeagent")).expanduser()
    built = sorted(cache.glob("kubernetes/*/bin/helm"))
    program = shutil.which("helm") or (str(built[-1]) if built else "")
    if not program:
        sys.exit("release: helm is missing: install it, or run scripts/kubernetes.sh")
    return said(program, *words)


def chart_archive(out: Path, version: str) -> Path:
    helm("package", "deploy/chart", "--destination", str(out))
    return out / f"nodeagent-{version}.tgz"


def image(out: Path, version: str) -> None:
    """The archive and its list of contents; left out, and said, where it cannot be built."""
    missing = [tool for tool in IMAGE_TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        why = f"{' and '.join(missing)} missing" if missing else "only root can build it"
        print(f"release: no image, {why}; 'docker build .' makes one", file=sys.stderr)
        return
    lines = said(sys.executable, "scripts/image.py", "build").splitlines()
    archive, listed = lines[-2:]
    _named(Path(archive), out / f"nodeagent-{version}-image.tar", f"localhost/nodeagent:{version}")
    shutil.copy(listed, out / f"nodeagent-{version}-image.cdx.json")


def _named(archive: Path, to: Path, name: str) -> None:
    """A copy of an OCI archive whose image has another name: the build's names are digests."""
    with tarfile.open(archive) as old, tarfile.open(to, "w") as new:
        for member in old:
            content = old.extractfile(member)
            if content is not None and member.name == "index.json":
                index = json.load(content)
                (manifest,) = index["manifests"]
                manifest["annotations"]["org.opencontainers.image.ref.name"] = name
                text = json.dumps(index).encode()
                member.size, content = len(text), io.BytesIO(text)
            new.addfile(member, content)


def sums(out: Path) -> None:
    rows = []
    for file in sorted(out.iterdir()):
        with file.open("rb") as stream:
            rows.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.name}\n")
    (out / "SHA256SUMS").write_text("".join(rows))


if __name__ == "__main__":
    main()
