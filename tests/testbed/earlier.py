"""An image of the release before: what an upgrade comes from and a rollback returns to.

It is this checkout's image with one more layer: another version, and a guard program with other
maps, so that each upgrade has to replace what is attached in the kernel.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from tests.testbed import image, waiting

VERSION = "0.0.9"
_SITE = "opt/nodeagent/lib/python3.11/site-packages"
_CHANGED = ("struct lease, 4096", "struct lease, 2048")


def build(of: image.Image) -> image.Image:
    """From the cache when it was built before."""
    made = image.Image(f"{of.tag}-earlier", VERSION, of.archive.with_name(f"{of.tag}-earlier.tar"))
    with image.locked(of.archive.parent / "lock"):  # another run of this checkout builds it, too
        if not made.archive.exists():
            with image.container(of) as container:
                _change(container, of)
                container.commit(made)
        image.keep(made)
    return made


def _change(container: image.Container, of: image.Image) -> None:
    site = container.root / _SITE
    (info,) = site.glob("nodeagent-*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text()
    assert f"\nVersion: {of.version}\n" in text
    metadata.write_text(text.replace(f"\nVersion: {of.version}\n", f"\nVersion: {VERSION}\n"))
    _other_guard(site / "volumes" / "guard" / "guard.bpf.o")


def _other_guard(target: Path) -> None:
    text = (image.REPO / "volumes" / "guard" / "guard.bpf.c").read_text()
    assert _CHANGED[0] in text
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "guard.c"
        source.write_text(text.replace(*_CHANGED))
        include = f"-I/usr/include/{os.uname().machine}-linux-gnu"
        words = ("clang", "-O2", "-g", "-target", "bpf", include, "-c", source, "-o", target)
        subprocess.run(words, check=True, timeout=waiting.limit(120))
