"""The libraries of a lock, with what their own metadata says of their licences.

locked.py [--check]   write NOTICE, the notice of third parties, from locks/runtime.txt; --check:
                      only say whether it is current
"""

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "locks" / "runtime.txt"
NOTICE = ROOT / "NOTICE"
HEAD = """\
nodeagent
Licensed under the Apache License, Version 2.0 (LICENSE).

Libraries that are installed with it
====================================

Made by scripts/locked.py from locks/runtime.txt and each library's own metadata. None of them is
in this repository. The image has them, each beside its *.dist-info, which has what its authors say.

"""
FOOT = """
Debian packages in the image
============================

Each package's copyright file is in the image: /usr/share/doc/PACKAGE/copyright. The image's list
of contents, /usr/share/nodeagent/sbom.cdx.json, names all of them.

The kernel program of the format guard
======================================

volumes/guard/guard.bpf.c is under GPL-2.0-only OR BSD-2-Clause, as the kernel wants of programs
that call some of its functions.
"""
# Of classifiers and of the older field 'License', which has any text.
_NAMES = {
    "MIT License": "MIT", "Apache Software License": "Apache-2.0", "Apache 2.0": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0", "3-Clause BSD License": "BSD-3-Clause",
}  # fmt: skip


@dataclass(frozen=True)
class Library:
    name: str
    version: str
    hashes: tuple[str, ...]
    licence: str
    home: str


def libraries(lock: Path = LOCK) -> list[Library]:
    """In the lock's order. SystemExit for one that this environment lacks."""
    text = lock.read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if made := re.match(r"([A-Za-z0-9][\w.-]*)==(\S+)", line):
            hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
            found.append(Library(made[1], made[2], hashes, *_said(made[1], made[2])))
    return found


def _said(name: str, version: str) -> tuple[str, str]:
    """Licence and home page."""
    try:
        known = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed here: run 'make setup'")
    if known.version != version:
        sys.exit(f"{name} is {known.version} here and {version} in the lock: run 'make setup'")
    meta = known.metadata
    kinds = [each.rpartition(" :: ")[2] for each in meta.get_all("Classifier") or []
             if each.startswith("License ::")]  # fmt: skip
    given = [meta["License-Expression"], *kinds, meta["License"]]
    licence = next((each.strip() for each in given if each and "\n" not in each.strip()), "")
    if not licence:
        sys.exit(
            f"{name} {version} does not say its licence: look, and add it to scripts/locked.py"
        )
    links = [each.partition(", ")[2] for each in meta.get_all("Project-URL") or []]
    home = meta["Home-page"] or next(iter(links), "")
    return _NAMES.get(licence, licence), home


def document() -> str:
    rows = [f"{each.name} {each.version}: {each.licence}\n" for each in libraries()]
    return HEAD + "".join(rows) + FOOT


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if NOTICE.read_text() != document():
            sys.exit("NOTICE is not current: run scripts/locked.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        NOTICE.write_text(document())


if __name__ == "__main__":
    main()
