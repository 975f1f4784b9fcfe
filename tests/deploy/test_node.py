"""The chart on a real kubelet: what pods and operators of a node get from the image that ships."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed import agent, blockdev, cell, image, kubernetes, registry, waiting
from tests.volumes.audit.logs import journald

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

REPO = Path(__file__).parents[2]
CHART = REPO / "deploy" / "chart"
SPACE = "nodeagent"
DATASET = "imagenet"
FILES, FILE_BYTES = 100, 60_000
PODS = "app.kubernetes.io/name=nodeagent"
# One round: every file is there and is what its checksum says.
READ = """\
cd /data/data
round=0
while :; do
  if /bin/busybox sha256sum -c -s SUMS; then round=$((round + 1)); echo round $round
  else echo ERROR after round $round; fi
  sleep 0.1
done
"""


@dataclass
class Node:
    """The agent as installed. ``agent`` speaks to its API."""

    kube: kubernetes.Kubernetes
    agent: agent.Agent
    image: image.Image

    def pod(self) -> dict[str, Any]:
        """The agent's pod once it is ready."""

        def ready() -> dict[str, Any] | None:
            for pod in self.kube.pods(SPACE, PODS):
                for each in pod["status"].get("containerStatuses", []):
                    if each["ready"]:
                        return pod
            return None

        found: dict[str, Any] = waiting.until(
            ready, 90, "the agent's pod to be ready", pause=0.2, detail=self.detail
        )
        return found

    def detail(self) -> str:
        words = ("-n", SPACE, "--tail=20", "-l", PODS)
        return self.kube.kubectl("logs", *words) + self.kube.kubectl(
            "get", "events", "-n", SPACE, "--sort-by=.lastTimestamp"
        )

    def run(self, *words: str) -> str:
        """In the agent's container."""
        name = self.pod()["metadata"]["name"]
        return self.kube.kubectl("exec", "-n", SPACE, name, "-c", "nodeagent", "--", *words)


@pytest.fixture(scope="module")
def node(kube: kubernetes.Kubernetes, run_folder: Path) -> Iterator[Node]:
    built = image.build()
    folder = run_folder / "node"
    client = agent.Agent(folder, {})
    # The pod's socket, on a path of the node; by a link, because a socket's path must be short.
    client.socket.symlink_to(kube.root / "var/lib/nodeagent/admin.sock")
    _dataset(kube.root / "mnt" / DATASET)
    kube.import_image(built.archive)
    layers = [registry.layer(f"fw{n}", 4_000_000, n) for n in range(2)]
    kube.registry.push("test/framework", "1", layers)
    kube.kubectl("label", "node", kubernetes.NODE, "nvidia.com/gpu.present=true")
    with cell.cell(folder) as guarded:
        values = {
            "image": {"repository": image.NAME, "tag": built.tag},
            "port": client.port,
            "settings": {
                "admin": {"socket": "/var/lib/nodeagent/admin.sock"},
                "cache": {"datasets": [_settings_of_dataset()]},
                "preheat": {
                    "images": [{"ref": f"{kubernetes.HOST}/test/framework:1", "pin": "always"}],
                    "spread": "0s",
                },
                # Other tests of the machine are not to meet this guard.
                "volumes": {
                    "guard": {
                        "cgroup": str(guarded.path),
                        "drivers": ["loop"],
                        "names": [blockdev.NAMES],
                    }
                },
            },
        }
        file = folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        done = kube.helm(
            "install", "nodeagent", str(CHART), "--namespace", SPACE, "--create-namespace",
            "--values", str(file),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = Node(kube, client, built)
        try:
            made.pod()
            yield made
        finally:
            kube.helm("uninstall", "nodeagent", "--namespace", SPACE, "--wait")


def _dataset(folder: Path) -> None:
    folder.mkdir()
    contents = {f"f{n}": random.Random(n).randbytes(FILE_BYTES) for n in range(FILES)}
    sums = []
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        sums.append(f"{registry.digest(content).removeprefix('sha256:')}  {name}\n")
    (folder / "SUMS").write_text("".join(sums))


def _settings_of_dataset() -> dict[str, Any]:
    source = {"kind": "dir", "path": f"/mnt/{DATASET}"}
    return {"name": DATASET, "freshness": "frozen", "source": source, "warm": False}


def _pod(name: str, busybox: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": busybox,
        "command": ["/bin/busybox", "sh", "-c", script],
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            **spec,
        },
    }


class Readers:
    """Unprivileged pods that read the whole dataset again and again."""

    def __init__(self, kube: kubernetes.Kubernetes, count: int) -> None:
        self.kube = kube
        self.names = [f"reader-{n}" for n in range(count)]
        view = f"/var/lib/nodeagent/views/{DATASET}"
        mount = {
            "name": "data",
            "mountPath": "/data",
            "readOnly": True,
            "mountPropagation": "HostToContainer",
        }
        security = {
            "runAsUser": 65534,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        kube.apply(
            *(
                _pod(
                    name, kube.busybox, READ,
                    container={"volumeMounts": [mount], "securityContext": security},
                    volumes=[{"name": "data", "hostPath": {"path": view, "type": "Directory"}}],
                )
                for name in self.names
            )
        )  # fmt: skip

    def rounds(self) -> list[int]:
        """Rounds of each reader; AssertionError when one met an error."""
        found = []
        for name in self.names:
            said = self.kube.kubectl("logs", name)
            assert "ERROR" not in said, said[-500:]
            found.append(len(said.splitlines()))
        return found

    def wait_more(self, count: int) -> None:
        """Until each has read ``count`` more whole rounds."""
        before = self._rounds_or_none() or [0] * len(self.names)

        def there() -> bool:
            now = self._rounds_or_none()
            return now is not None and all(a >= b + count for a, b in zip(now, before, strict=True))

        waiting.until(
            there, 90, "the readers to go on", pause=0.3,
            detail=lambda: self.kube.kubectl("describe", "pods"),
        )  # fmt: skip

    def _rounds_or_none(self) -> list[int] | None:
        phases = [
            each["status"]["phase"]
            for each in self.kube.get("pods")["items"]
            if each["metadata"]["name"] in self.names
        ]
        return self.rounds() if phases == ["Running"] * len(self.names) else None


@pytest.fixture(scope="module")
def readers(node: Node) -> Iterator[Readers]:
    made = Readers(node.kube, 2)
    try:
        yield made
    finally:
        node.kube.kubectl("delete", "pod", *made.names, "--force", "--wait=false")


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(("--values", str(each)) for each in sorted(CHART.glob("values-*.yaml"))),
        (
            "--set", "pools.default=null,pools.a.nodeSelector.gpu=a,pools.b.nodeSelector.gpu=b",
            "--set", "secretName=keys,imagePullSecrets[0].name=hub,podLabels.team=ml",
            "--set", "host.paths[0]=/mnt/x,resources.limits.cpu=2",
            "--set", f"image.digest=sha256:{'0' * 64}",
        ),
    ],
    ids=("default", "crio", "k3s", "rke2", "odd"),
)  # fmt: skip
def test_api_server_accepts_the_chart(kube: kubernetes.Kubernetes, words: tuple[str, ...]) -> None:
    rendered = kubernetes.helm(
        "template", "nodeagent", str(CHART), "--namespace", "default", *words
    )
    assert rendered.returncode == 0, rendered.stderr
    kube.kubectl("apply", "--dry-run=server", "-f", "-", given=rendered.stdout)


def test_defaults_with_a_dataset_and_an_image_make_all_rooms_ready(node: Node) -> None:
    waiting.until(
        lambda: node.agent.get("/readyz")["ready"],
        60, "all rooms to be ready", detail=lambda: node.agent.get("/readyz"),
    )  # fmt: skip
    guard = node.agent.get("/v1/volumes/guard")
    assert guard["in_force"] is True
    assert guard["mode"] == "dry-run"
    assert node.agent.dataset(DATASET)["served_by"]

    def pinned() -> bool:
        (row,) = node.agent.get("/v1/images")["images"]
        return row["state"] == "ready" and bool(row["pinned"])

    waiting.until(pinned, 60, "the image to be pinned", detail=lambda: node.agent.get("/v1/images"))
    kept = node.kube.on_node("ctr", "-n", "k8s.io", "leases", "ls").stdout
    assert "nodeagent" in kept


def test_container_runs_the_image_that_was_built(node: Node) -> None:
    assert node.run("nodeagent", "--version").split()[-1] == image.version()
    (container,) = node.pod()["spec"]["containers"]
    assert container["image"] == node.image.reference
    libraries = "import rados, rbd, cephfs, ctypes; ctypes.CDLL('libcephfs.so.2')"
    node.run("/opt/nodeagent/bin/python", "-c", libraries)
    assert "ceph version" in node.run("ceph-fuse", "--version")


def test_settings_lie_on_the_host_for_the_boot_unit(node: Node) -> None:
    shared = (node.kube.root / "var/lib/nodeagent/settings.yaml").read_text()
    configmap = node.kube.get("configmap", "-n", SPACE, "nodeagent")
    assert shared == configmap["data"]["nodeagent.yaml"]


def test_journal_of_the_host_is_read_in_the_container(node: Node, area: Path) -> None:
    with journald.running(area / "journald") as journal:
        journal.write("volumes are well")
        waiting.until(lambda: "volumes are well" in journal.read(), 20, "the line")
        node.kube.on_node("cp", "-r", journal.directory, "/var/log/")
    said = node.run(
        "journalctl", "--directory=/var/log/journal", f"--unit={journald.UNIT}", "--output=cat"
    )
    assert "volumes are well" in said


def test_unprivileged_pods_read_the_dataset_while_it_fills(node: Node, readers: Readers) -> None:
    readers.wait_more(1)
    node.agent.tell(DATASET, "warm")
    readers.wait_more(1)
    node.agent.wait_state(DATASET, "complete")
    readers.wait_more(2)


def test_readers_meet_no_error_while_the_agent_comes_and_goes(node: Node, readers: Readers) -> None:
    readers.wait_more(1)
    for _ in range(3):
        name = node.pod()["metadata"]["name"]
        node.kube.kubectl("delete", "pod", "-n", SPACE, name, "--wait=false")
        waiting.until(
            lambda: node.pod()["metadata"]["name"] != name,  # noqa: B023
            60, "another pod", pause=0.2,
        )  # fmt: skip
        readers.wait_more(1)
    pod = node.pod()
    (status,) = pod["status"]["containerStatuses"]
    identity = status["containerID"].removeprefix("containerd://")
    node.kube.on_node("ctr", "-n", "k8s.io", "task", "kill", "-s", "KILL", identity)
    waiting.until(
        lambda: node.pod()["status"]["containerStatuses"][0]["restartCount"] == 1,
        60, "the container to be restarted", pause=0.2,
    )  # fmt: skip
    readers.wait_more(2)
    assert node.agent.get("/v1/volumes/guard")["in_force"] is True
    assert node.agent.dataset(DATASET)["served_by"] == "store"


def test_leak_by_a_pod_that_copied_the_hosts_mounts_is_found_and_named(
    node: Node, area: Path
) -> None:
    target = "/var/lib/kubelet/plugins/kubernetes.io/csi/volume/globalmount"
    disk = area / "volume.img"
    with disk.open("wb") as stream:
        stream.truncate(64 * blockdev.MiB)
    with blockdev.loop(disk) as device:
        blockdev.run("mkfs.ext4", "-q", device)
        node.kube.on_node("mkdir", "-p", target)
        node.kube.on_node("mount", device, target)
        exporter = _pod(
            "node-exporter", node.kube.busybox, "exec /bin/busybox sleep 1000",
            container={"volumeMounts": [{"name": "root", "mountPath": "/host", "readOnly": True}]},
            volumes=[{"name": "root", "hostPath": {"path": "/"}}],
        )  # fmt: skip
        node.kube.apply(exporter)
        try:
            node.kube.kubectl(
                "wait", "pod/node-exporter", "--for=condition=Ready", "--timeout=60s", seconds=90
            )
            node.kube.on_node("umount", target)

            def found() -> dict[str, Any] | None:
                for each in node.agent.findings():
                    if each["rule"] == "leaked-mount":
                        return dict(each)
                return None

            leak = waiting.until(
                found, 60, "the leak to be found", pause=0.2,
                detail=lambda: json.dumps(node.agent.findings(), indent=1),
            )  # fmt: skip
            assert "default/node-exporter" in json.dumps(leak)
        finally:
            node.kube.kubectl("delete", "pod", "node-exporter", "--force", "--wait=false")
        waiting.until(lambda: not found(), 60, "the finding to clear", pause=0.2)
