"""Write what the image holds as CycloneDX JSON: Debian's packages and Python's distributions.

Runs in the build, in the finished file system: nothing is listed that is not there.
    python sbom.py REVISION >sbom.cdx.json
"""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

NAME = "nodeagent"
FIELDS = "${Package}\t${Version}\t${Architecture}\n"
# Packages of which a single file was taken: PACKAGE=VERSION FILE.
SINGLE_FILES = Path("/usr/share/nodeagent/single-files.txt")


def main() -> None:
    (environment,) = Path("/opt/nodeagent/lib").glob("python3.*/site-packages")
    bom = Bom()
    for component in (*_debian(), *_python(environment)):
        if component.name == NAME:
            bom.metadata.component = component
        else:
            bom.components.add(component)
    bom.metadata.properties.add(Property(name="nodeagent:revision", value=sys.argv[1]))
    bom.register_dependency(bom.metadata.component, bom.components)
    sys.stdout.write(JsonV1Dot6(bom).output_as_string(indent=1))


def _debian() -> Iterator[Component]:
    system = platform.freedesktop_os_release()
    more = {"distro": f"{system['ID']}-{system.get('VERSION_ID', system['VERSION_CODENAME'])}"}
    said = subprocess.run(
        ["dpkg-query", "-W", "-f", FIELDS], capture_output=True, text=True, check=True
    ).stdout
    for line in said.splitlines():
        name, version, architecture = line.split("\t")
        yield _package(name, version, more | {"arch": architecture})
    for line in SINGLE_FILES.read_text().splitlines():
        package, _, path = line.partition(" ")
        name, _, version = package.partition("=")
        found = _package(name, version, more)
        found.properties.add(Property(name="nodeagent:only-file", value=path))
        yield found


def _package(name: str, version: str, more: dict[str, str]) -> Component:
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, bom_ref=f"deb:{name}={version}",
        purl=PackageURL("deb", "debian", name, version, more),
    )  # fmt: skip


def _python(folder: Path) -> Iterator[Component]:
    for found in importlib.metadata.distributions(path=[str(folder)]):
        name = found.metadata["Name"]
        kind = ComponentType.APPLICATION if name == NAME else ComponentType.LIBRARY
        yield Component(
            name=name, version=found.version, type=kind, bom_ref=f"pypi:{name}=={found.version}",
            purl=PackageURL("pypi", None, name.lower().replace("_", "-"), found.version),
        )  # fmt: skip


main()
