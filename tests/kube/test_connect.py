"""The pages about Ceph, block by block in a real shell: what they set up fills a dataset.

What differs from a reader's cluster is what the pages leave to the reader: variables. Of Rook and
ceph-csi only the objects are there. ``helm`` is one that renders the chart and hands the rights
in it to the API server: no kubelet runs here.
"""

import json
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube import agents, rendered
from tests.kube.test_claims import CSI, FILES, Site, read, wait_complete, write
from tests.testbed import agent, docpages, kubernetes, rbdimage
from tests.testbed.ceph import CephCluster
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique

DOCS = docpages.ROOT / "docs"
STEP_SECONDS = 120.0
PAGES = ("connect-ceph.md", "connect-rook.md", "connect-ceph-csi.md")

pytestmark = pytest.mark.timeout(300)

# The agent's own helm: it keeps the words, for ``Reader`` to render.
HELM = """\
#!/bin/sh
printf '%s\\n' "$@" >"$HOME/helm.words"
"""
# What the toolbox's pod would run is run here.
KUBECTL = """\
#!/bin/bash
if [[ " $* " == *" exec deploy/rook-ceph-tools -- "* ]]; then
  while [ "$1" != -- ]; do shift; done
  shift
  exec "$@"
fi
exec {kubectl} "$@"
"""
MAY_NOT_WRITE = {
    "cephfs": (
        "import sys, cephfs\n"
        "fs = cephfs.LibCephFS(conffile=sys.argv[1], auth_id=sys.argv[2])\n"
        "fs.conf_set('key', sys.argv[3])\n"
        "fs.mount(mount_root=sys.argv[4].encode(), filesystem_name=b'cephfs')\n"
        "print(fs.read(fs.open('/SUMS', 'r', 0), 0, 100))\n"
        "for refused in (lambda: fs.open('/new', 'w', 0o644),\n"
        "                lambda: fs.mkdir('/.snap/mine', 0o755),\n"
        "                lambda: fs.unlink('/SUMS')):\n"
        "    try:\n"
        "        refused()\n"
        "        sys.exit('it could write')\n"
        "    except cephfs.Error as error:\n"
        "        print(error)\n"
    ),
    "rbd": (
        "import sys, rados, rbd\n"
        "with rados.Rados(conffile=sys.argv[1], name='client.' + sys.argv[2],\n"
        "                 conf={'key': sys.argv[3]}) as c, c.open_ioctx('rbd') as pool:\n"
        "    with rbd.Image(pool, sys.argv[4], snapshot='v1', read_only=True) as image:\n"
        "        print(len(image.read(0, 4096)))\n"
        "    for refused in (lambda: rbd.Image(pool, sys.argv[4]).write(b'x' * 512, 0),\n"
        "                    lambda: rbd.RBD().create(pool, 'mine', 2**22),\n"
        "                    lambda: pool.write_full('mine', b'x')):\n"
        "        try:\n"
        "            refused()\n"
        "            sys.exit('it could write')\n"
        "        except (rbd.Error, rados.Error) as error:\n"
        "            print(error)\n"
    ),
}


class Reader:
    """Who pastes the blocks of a page into one shell."""

    def __init__(
        self, page: str, folder: Path, plane: ControlPlane, cluster: CephCluster, **said: str
    ) -> None:
        self.page, self.plane, self._home = DOCS / page, plane, folder
        folder.mkdir(exist_ok=True)
        (folder / "bin").mkdir()
        (folder / "deploy").symlink_to(docpages.ROOT / "deploy")
        programs = {"helm": HELM, "kubectl": KUBECTL.format(kubectl=kubernetes.BIN / "kubectl")}
        for name, text in programs.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.shell = docpages.Shell(
            folder,
            {
                "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder),
                "KUBECONFIG": str(plane._kubeconfig("admin")), "CEPH_CONF": str(cluster.conf),
                **said,
            },
        )  # fmt: skip

    def paste(self, after: Callable[[str], None] = lambda text: None) -> None:
        """Every block; ``after``: what somebody else does after each."""
        pasted = [block for block in docpages.blocks(self.page) if block.is_shell]
        assert len(pasted) >= 5, "the blocks are not found"
        for block in pasted:
            self.shell.begin(block.text)
            print(f"--- {block.page}:{block.line}\n{self.shell.finish(STEP_SECONDS)}")
            self._render()
            after(block.text)

    def _render(self) -> None:
        """What ``helm upgrade`` would have changed of the rights."""
        file = self._home / "helm.words"
        if not file.exists():
            return
        words = file.read_text().splitlines()
        file.unlink()
        assert words[:3] == ["upgrade", "nodeagent", "deploy/chart"], words
        assert "--reset-then-reuse-values" in words
        sets = [
            word
            for at, word in enumerate(words)
            if word.startswith("--set") or words[at - 1].startswith("--set")
        ]
        found = rendered.chart(*sets)
        roles = [e for e in rendered.of_kind(found, "Role") if "secrets" in json.dumps(e["rules"])]
        assert roles, f"{shlex.join(words)} lets agents read no Secret"
        self.plane.apply(
            *rendered.of_kind(found, "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        )


def keys_of(cluster: CephCluster, *users: str) -> None:
    """No user is left of another test."""
    for user in users:
        cluster.run("ceph", "auth", "rm", f"client.{user}")


def may_read_and_not_write(cluster: CephCluster, kind: str, user: str, place: str) -> None:
    key = cluster.run("ceph", "auth", "print-key", f"client.{user}").strip()
    words = (str(cluster.conf), user, key, place)
    cluster.run("/usr/bin/python3", "-c", MAY_NOT_WRITE[kind], *words)


@pytest.fixture
def node(plane: ControlPlane, area: Path) -> Iterator[agent.Agent]:
    with agents.made(plane, area / "agent", unique("node")) as made:
        made.cache.update({"budget": "2GiB", "reserve": "1%", "source_check": "1s"})
        made.start()
        yield made


@pytest.fixture
def space(plane: ControlPlane) -> Iterator[None]:
    """No Secret is left of another page."""
    plane.kubectl("delete", "secret", "ceph", "-n", NAMESPACE, "--ignore-not-found")
    yield
    plane.kubectl("delete", "secret", "ceph", "-n", NAMESPACE, "--ignore-not-found")


@pytest.fixture
def reader(
    area: Path, plane: ControlPlane, cluster: CephCluster, space: None
) -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(page: str, **said: str) -> Reader:
        made.append(Reader(page, area / "reader", plane, cluster, **said))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.shell.end()
        keys_of(cluster, "nodeagent", "nodeagent-speech", "nodeagent-rbd")
        run = cluster.run
        if "speech" in run("ceph", "fs", "subvolume", "ls", "cephfs"):
            run("ceph", "fs", "subvolume", "snapshot", "rm", "cephfs", "speech", "v1", "--force")
            run("ceph", "fs", "subvolume", "rm", "cephfs", "speech")


def filled(top: Path) -> dict[str, bytes]:
    files = FILES | {"SUMS": b"of all"}
    write(top, files)
    CephCluster.wait_until_not_recent()
    return files


@pytest.mark.parametrize("page", PAGES)
def test_pages_give_nodes_no_key_of_an_administrator(page: str) -> None:
    blocks = docpages.blocks(DOCS / page)
    shells = [block for block in blocks if block.is_shell]
    assert shells, page
    for block in blocks:
        assert "admin" not in block.text, f"{page}:{block.line}"
    # What a block takes over is what an earlier one has set.
    known: set[str] = set()
    for block in shells:
        known |= set(re.findall(r"export (\w+)=", block.text))
        used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", block.text))
        assert used <= known, f"{page}:{block.line}: {used - known} is nowhere set"


@pytest.mark.real
def test_plain_ceph(
    area: Path, cluster: CephCluster, node: agent.Agent, reader: Callable[..., Reader]
) -> None:
    folder, image = unique("datasets"), unique("imagenet")
    disk = area / "image"
    rbdimage.file_system(disk, "ext4", 64 * 2**20, lambda top: write(top, FILES))
    cluster.run("rbd", "import", "--no-progress", str(disk), f"rbd/{image}")
    with cluster.mounted(area / "mount") as mount:
        files = filled(mount / folder / "coco")
        reader(
            "connect-ceph.md", DATASETS=f"/{folder}", MOUNT=str(mount), IMAGE=image,
            MONITORS=cluster.monitor,
        ).paste()  # fmt: skip
    assert read(node.view("coco")) == files
    assert read(node.view("imagenet")) == FILES
    assert node.dataset("coco")["state"] == node.dataset("imagenet")["state"] == "complete"
    assert "files were read past the mount" in node.said()
    may_read_and_not_write(cluster, "cephfs", "nodeagent", f"/{folder}/coco")
    may_read_and_not_write(cluster, "rbd", "nodeagent-rbd", image)


@pytest.mark.real
def test_rook(
    area: Path, plane: ControlPlane, cluster: CephCluster, node: agent.Agent,
    reader: Callable[..., Reader],
) -> None:  # fmt: skip
    folder, space = unique("datasets"), unique("rook")
    plane.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}},
        {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "rook-ceph-mon-endpoints", "namespace": space},
            "data": {"data": f"a={cluster.monitor}", "maxMonId": "0"},
        },
    )  # fmt: skip
    with cluster.mounted(area / "mount") as mount:
        files = filled(mount / folder / "coco")
        (mount / folder / "coco/.snap/v1").mkdir()
    reader("connect-rook.md", ROOK=space, FS="cephfs", DATASETS=f"/{folder}").paste()
    assert read(node.view("coco")) == files
    may_read_and_not_write(cluster, "cephfs", "nodeagent", f"/{folder}/coco")


@pytest.mark.real
def test_ceph_csi(
    area: Path, plane: ControlPlane, cluster: CephCluster, node: agent.Agent,
    reader: Callable[..., Reader],
) -> None:  # fmt: skip
    site = Site(plane, cluster)
    site.prepare()
    plane.kubectl("delete", "clusterrole,clusterrolebinding", "nodeagent-nodeagent-claims",
                  "--ignore-not-found")  # fmt: skip
    claim = unique("imagenet")
    path = site.subvolume(claim)
    plane.kubectl("annotate", "pvc", claim, "-n", site.space, "nodeagent.io/cache-")
    with cluster.mounted(area / "writer") as top:
        files = filled(Path(f"{top}{path}"))

    def snapshot(text: str) -> None:
        """What ceph-csi and the snapshot controller do once a VolumeSnapshot is made."""
        if "kind: VolumeSnapshot\n" not in text:
            return
        uid, name = str(uuid.uuid4()), f"{claim}-v1"
        cluster.run(
            *("ceph", "fs", "subvolume", "snapshot", "create", "cephfs"),
            *(path.split("/")[-2], f"csi-snap-{uid}", "--group_name", "csi"),
        )
        site.snapshot(name, claim, uid)
        ready: dict[str, Any] = {"status": {"readyToUse": True}}
        plane.kubectl(
            "patch", "volumesnapshot", name, "-n", site.space, "--type=merge",
            "-p", json.dumps(ready),
        )  # fmt: skip

    reader("connect-ceph-csi.md", TEAM=site.space, CLAIM=claim, CLASS="csi").paste(snapshot)
    wait_complete(node, claim)
    assert read(node.view(claim)) == files
    assert CSI in plane._ask("get", "role", "-A")
