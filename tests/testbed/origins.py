"""Where a program or a library comes from, and whether a fresh machine would have it.

It does when its Debian package is required on every Debian, is in scripts/packages.txt, or is what
one of these depends on; or when it is ours: of the checkout, its environment and its cache folder.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import shell

REPO = Path(__file__).parents[2]
PACKAGES = REPO / "scripts" / "packages.txt"
CACHE = Path(os.environ.get("NODEAGENT_CACHE", "~/.cache/nodeagent")).expanduser()
# What CONTRIBUTING.md asks for before Debian's packages.
TOOLCHAINS = {"go", "make", "python", "python3"}


@dataclass(frozen=True)
class Package:
    """``needs``: a tuple for each dependency, of the packages that fulfil it."""

    required: bool = False
    needs: tuple[tuple[str, ...], ...] = ()
    provides: tuple[str, ...] = ()


def brought(packages: dict[str, Package], listed: Iterable[str]) -> set[str]:
    """The packages that a machine has after set-up: required ones, listed ones, their needs."""
    providers: dict[str, list[str]] = {}
    for name, package in packages.items():
        for each in (name, *package.provides):
            providers.setdefault(each, []).append(name)
    found: set[str] = set()
    todo = [name for name, package in packages.items() if package.required]
    todo += [name for name in listed if name in packages]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            for choices in packages[name].needs:
                fulfil = [p for choice in choices for p in providers.get(choice, [])]
                todo += fulfil[:1]
    return found


def complaint(thing: str, package: str, brought: Collection[str]) -> str:
    """Why a fresh machine lacks ``thing`` of ``package`` ("": of none); "" when it has it."""
    if package in brought:
        return ""
    if not package:
        return f"{thing} belongs to no Debian package and is not built by us"
    return f"{thing} is of Debian's {package}, which scripts/packages.txt does not bring: add it"


def complaints(found: Iterable[str], listed: Iterable[str]) -> list[str]:
    """What a fresh machine lacks of a record of ``tests.testbed.starts``."""
    if not shutil.which("dpkg-query"):
        return []  # unit tests on another system
    programs, libraries = set(), set()
    for line in found:
        kind, _, rest = line.partition(" ")
        if kind == "program":
            programs.add(rest)
        elif kind == "library":
            libraries.add(rest)
        else:
            words = shell.commands(ast.literal_eval(rest))
            programs |= {os.path.realpath(path) for word in words if (path := shutil.which(word))}
    things = {path for path in programs | _files(libraries) if not _ours(path)}
    owners = _owners(things)
    have = brought(_installed(), listed)
    return sorted(filter(None, (complaint(path, owners.get(path, ""), have) for path in things)))


def listed() -> list[str]:
    """The names in scripts/packages.txt."""
    return [line for line in PACKAGES.read_text().split("\n") if line and line[0] != "#"]


def _ours(path: str) -> bool:
    build = REPO / "build"
    homes = (REPO, CACHE, tempfile.gettempdir(), sys.base_prefix, build, build / "runtimes")
    if Path(path).name in TOOLCHAINS:
        return True
    return any(Path(path).is_relative_to(os.path.realpath(home)) for home in homes)


def _files(libraries: Collection[str]) -> set[str]:
    """Where the loader finds them."""
    said = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    known = dict(re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", said, re.MULTILINE))
    paths = {name if "/" in name else known.get(name, "") for name in libraries}
    return {os.path.realpath(path) for path in paths if path and Path(path).exists()}


def _owners(paths: Collection[str]) -> dict[str, str]:
    """The package of each file. dpkg knows files of a merged /usr by the name they had before."""
    if not paths:
        return {}
    names = {name: path for path in paths for name in (path, path.removeprefix("/usr"))}
    said = subprocess.run(
        ["dpkg-query", "-S", *names], capture_output=True, text=True, check=False
    ).stdout
    found = {}
    for line in said.splitlines():
        packages, _, name = line.rpartition(": ")
        if name in names and not packages.startswith("diversion"):
            found[names[name]] = packages.split(",")[0].partition(":")[0]
    return found


def _installed() -> dict[str, Package]:
    fields = ("Package", "Essential", "Priority", "Pre-Depends", "Depends", "Provides")
    form = "\t".join(f"${{{field}}}" for field in fields) + "\n"
    said = subprocess.run(
        ["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in said.splitlines():
        name, essential, priority, before, needs, provides = line.split("\t")
        found[name] = Package(
            essential == "yes" or priority == "required",
            tuple(_names(each, "|") for each in f"{before}, {needs}".split(", ") if each),
            _names(provides, ","),
        )
    return found


def _names(text: str, separator: str) -> tuple[str, ...]:
    words = (each.split() for each in text.split(separator))
    return tuple(word[0].partition(":")[0] for word in words if word)
