"""Datasets of the soak on a real Ceph: a CephFS directory that is followed, and an RBD image."""

import contextlib
import random
import time
from pathlib import Path

from tests.deploy.field_sources import Source, Sources
from tests.testbed import installed, rbdimage
from tests.testbed.blockdev import MiB
from tests.testbed.ceph import CephCluster, running

FOLLOW, IMAGE = "follow-a", "rbd-a"
KEPT_SNAPSHOTS = 3


class CephSources:
    """``cluster``: answers from the machine's loopback, as the kubelet's node has it, too."""

    def __init__(self, sources: Sources, folder: Path, stack: contextlib.ExitStack) -> None:
        self.sources, self.folder = sources, folder
        self.number = 0
        folder.mkdir()
        self.cluster: CephCluster = stack.enter_context(running(folder / "ceph"))
        self.place = folder / "cephfs"
        self.place.mkdir()
        self.top = self.place / FOLLOW
        key = sources.kube.root / installed.STATE / "ceph.key"
        key.write_text(self.cluster.secret())
        key.chmod(0o600)
        self.login = {
            "monitors": [self.cluster.monitor],
            "user": "admin",
            "secret_file": f"/{installed.STATE}/ceph.key",
        }
        self._follow()
        self._image()

    def _add(self, name: str, place: Path, freshness: str, **source: object) -> Source:
        made = Source(name, place, self.sources.folder / f"{name}.json")
        made.settings = {"freshness": freshness, "source": {**self.login, **source}}
        self.sources.all[name] = made
        return made

    def _follow(self) -> None:
        made = self._add(FOLLOW, self.top, "follow", kind="cephfs", path=f"/{FOLLOW}")
        with self.cluster.mounted(self.place):
            self.top.mkdir()
            made.fill(200, 4, FOLLOW)
        self._snapshot()
        made.say()

    def _snapshot(self) -> None:
        """Make a snapshot by another client: the one that wrote the files has ended."""
        time.sleep(11)  # docs/cache.md: after the last write
        self.number += 1
        with self.cluster.mounted(self.place):
            folder = self.top / ".snap"
            (folder / f"s{self.number:03}").mkdir()
            for each in sorted(folder.iterdir())[:-KEPT_SNAPSHOTS]:
                each.rmdir()

    def followed(self, generator: random.Random) -> str:
        """Changes, and a snapshot of them."""
        with self.cluster.mounted(self.place):
            said = self.sources.all[FOLLOW].change(generator)
        self._snapshot()
        return f"{said}, snapshot s{self.number:03}"

    def _image(self) -> None:
        """The place of its files is a folder beside; the image gets a copy."""
        made = self._add(IMAGE, self.folder / "image-files", "snapshot", kind="rbd", pool="rbd",
                         image=IMAGE, snapshot="v1", client="none")  # fmt: skip
        made.fill(120, 3, IMAGE)
        self.file = self.folder / "image"
        rbdimage.file_system(self.file, "ext4", 24 * MiB, self._copy)
        rbdimage.imported(self.cluster, self.file, IMAGE)
        made.say()
        self.version = 1

    def _copy(self, target: Path) -> None:
        rbdimage.sh("rm", "-rf", target / "d0", target / "d1", target / "d2", target / "d3")
        rbdimage.sh("cp", "-a", f"{self.folder}/image-files/.", target)

    def updated(self, generator: random.Random) -> str:
        """The name of a snapshot of the image with changes."""
        self.sources.all[IMAGE].change(generator)
        self.version += 1
        rbdimage.changed(self.file, self._copy)
        rbdimage.updated(self.cluster, self.file, IMAGE, f"v{self.version}")
        return f"v{self.version}"
