"""The chart installed on the node of the tests, with the image that ships, and pods that read.

The guard is attached to a cgroup of its own (``cell``), so that other tests of the machine do not
meet it.
"""

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.testbed import agent, blockdev, cell, grave, image, kubernetes, registry, waiting

REPO = Path(__file__).parents[2]
CHART = REPO / "deploy" / "chart"
SPACE = "nodeagent"
PODS = "app.kubernetes.io/name=nodeagent"
DATASET = "imagenet"
PINNED = f"{kubernetes.HOST}/test/framework:1"
STATE = "var/lib/nodeagent"  # below the node's root
FILES, FILE_BYTES = 100, 60_000
# One round: every file is there and is what its checksum says.
_READ = """\
until [ -e /data/data/SUMS ]; do sleep 0.1; done
cd /data/data
round=0
while :; do
  if /bin/busybox sha256sum -c -s SUMS; then round=$((round + 1)); echo round $round
  else echo ERROR after round $round; fi
  sleep {pause}
done
"""


def read(pause: float = 0.4) -> str:
    """The script of a job. ``pause``: seconds between two rounds; many that never pause would
    measure the machine."""
    return _READ.format(pause=pause)


@dataclass
class Node:
    """The agent as installed. ``agent`` speaks to its API."""

    kube: kubernetes.Kubernetes
    agent: agent.Agent
    image: image.Image
    cell: cell.Cell
    values: dict[str, Any]
    folder: Path

    def reach(self) -> None:
        """The API's socket is the pod's, on a path of the node, so another one after a reboot."""
        self.agent.socket.unlink(missing_ok=True)
        self.agent.socket.symlink_to(self.kube.root / STATE / "admin.sock")

    def helm(self, verb: str, tag: str, *words: str) -> None:
        """Install or upgrade to the image with this tag."""
        self.values["image"]["tag"] = tag
        file = self.folder / "values.yaml"
        file.write_text(yaml.safe_dump(self.values))
        done = self.kube.helm(
            verb, "nodeagent", str(CHART), "--namespace", SPACE, "--values", str(file), *words
        )
        assert done.returncode == 0, done.stderr

    def pod(self, another_than: str = "", tag: str = "") -> dict[str, Any]:
        """The agent's pod once it is ready; ``tag``: once it is of this image."""

        def ready() -> dict[str, Any] | None:
            for pod in self.kube.pods(SPACE, PODS):
                (spec,) = pod["spec"]["containers"]
                ours = pod["metadata"]["name"] != another_than and spec["image"].endswith(tag)
                if ours and any(e["ready"] for e in pod["status"].get("containerStatuses", [])):
                    return pod
            return None

        found: dict[str, Any] = waiting.until(
            ready, 90, "the agent's pod to be ready", pause=0.2, detail=self.detail
        )
        return found

    def all_ready(self) -> None:
        """Until every room says so."""

        def ready() -> bool:
            with contextlib.suppress(OSError):
                return bool(self.agent.get("/readyz")["ready"])
            return False

        waiting.until(ready, 90, "all rooms to be ready", pause=0.2, detail=self.detail)

    def pinned_image(self) -> dict[str, Any]:
        """Its only image, once that is ready and pinned."""

        def pinned() -> dict[str, Any] | None:
            (row,) = self.agent.get("/v1/images")["images"]
            return row if row["state"] == "ready" and row["pinned"] else None

        found: dict[str, Any] = waiting.until(
            pinned, 60, "the image to be pinned", detail=lambda: self.agent.get("/v1/images")
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

    def delete(self) -> None:
        name = self.pod()["metadata"]["name"]
        self.kube.kubectl("delete", "pod", "-n", SPACE, name, "--wait=false")
        self.pod(another_than=name)

    def kill(self) -> None:
        """SIGKILL to the agent; its container is started again."""
        (before,) = self.pod()["status"]["containerStatuses"]
        identity = before["containerID"].removeprefix("containerd://")
        self.kube.on_node("ctr", "-n", "k8s.io", "task", "kill", "-s", "KILL", identity)

        def again() -> bool:
            (now,) = self.pod()["status"]["containerStatuses"]
            return bool(now["containerID"] != before["containerID"])

        waiting.until(again, 120, "the container to be restarted", pause=0.2, detail=self.detail)

    def set_mode(self, mode: str) -> None:
        body = {"mode": mode, "by": "a test", "reason": "a test"}
        self.agent.call("PUT", "/v1/volumes/guard/mode", body)

    def heals(self) -> str:
        """How often a pinned image was put back."""
        lines = self.agent.get("/metrics").splitlines()
        (found,) = (each for each in lines if each.startswith("nodeagent_preheat_heals_total"))
        return str(found)

    def usage(self) -> "Usage":
        """What the agent's container has used, as the kernel accounts for it."""
        return usage_of(self.cgroups())

    def cgroups(self) -> list[Path]:
        (status,) = self.pod()["status"]["containerStatuses"]
        return self.kube.cgroups(status["containerID"].removeprefix("containerd://"))

    def leases(self) -> list[str]:
        """containerd's leases that are ours: the pins."""
        listed = self.kube.on_node("ctr", "-n", "k8s.io", "leases", "ls").stdout
        return sorted(line for line in listed.splitlines() if "nodeagent" in line)


@dataclass(frozen=True)
class Usage:
    """``memory``: bytes that reclaim cannot free, as kubelet counts them. ``cpu``: seconds."""

    memory: int
    cpu: float


def usage_of(cgroups: Sequence[Path]) -> Usage:
    """Of a container, by its directories in the hierarchies of v1, or in that of v2."""
    memory, cpu = 0, 0.0
    for folder in cgroups:
        stat = folder / "memory.stat"
        if stat.exists():
            fields = dict(line.split() for line in stat.read_text().splitlines())
            one = folder / "memory.current"
            total = one if one.exists() else folder / "memory.usage_in_bytes"
            cold = fields.get("total_inactive_file", fields["inactive_file"])
            memory = int(total.read_text()) - int(cold)
        if (folder / "cpuacct.usage").exists():
            cpu = int((folder / "cpuacct.usage").read_text()) / 1e9
        elif "usage_usec" in (text := _text(folder / "cpu.stat")):
            cpu = int(text.split("usage_usec")[1].split()[0]) / 1e6
    return Usage(memory, cpu)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def installed(kube: kubernetes.Kubernetes, folder: Path, *, files: int = FILES) -> Iterator[Node]:
    """Default values with a dataset and an image; ready, and taken off at the end."""
    built = image.build()
    client = agent.Agent(folder, {})
    _dataset(kube.root / "mnt" / DATASET, files)
    kube.import_image(built.archive)
    layers = [registry.layer(f"fw{n}", 4_000_000, n) for n in range(2)]
    kube.registry.push("test/framework", "1", layers)
    kube.kubectl("label", "node", kubernetes.NODE, "nvidia.com/gpu.present=true")
    source = {"kind": "dir", "path": f"/mnt/{DATASET}"}
    dataset = {"name": DATASET, "freshness": "frozen", "source": source, "warm": False}
    with cell.cell(folder) as guarded:
        values = {
            "image": {"repository": image.NAME},
            "port": client.port,
            "settings": {
                "admin": {"socket": f"/{STATE}/admin.sock"},
                "cache": {"datasets": [dataset]},
                # No kube-proxy runs on the node of the tests: the service's address leads nowhere.
                "kubernetes": {
                    "server": f"https://127.0.0.1:{kube.api_port}",
                    "interval": "1s",
                },
                "kubelet": {"config": "/var/lib/kubelet/config.yaml"},
                "preheat": {
                    "images": [{"ref": PINNED, "pin": "always"}],
                    "spread": "0s",
                },
                "volumes": {
                    "guard": {
                        "cgroup": str(guarded.path),
                        "drivers": ["loop"],
                        "names": [blockdev.NAMES],
                        "probe_timeout": f"{cell.ANSWER_SECONDS:g}s",
                    },
                    "audit": {"names": [blockdev.NAMES]},
                },
            },
        }
        made = Node(kube, client, built, guarded, values, folder)
        made.reach()
        made.helm("install", built.tag, "--create-namespace")
        try:
            made.pod()
            yield made
        finally:
            kube.helm("uninstall", "nodeagent", "--namespace", SPACE, "--wait")


def _dataset(folder: Path, files: int) -> None:
    folder.mkdir()
    sums = []
    for number in range(files):
        content = random.Random(number).randbytes(FILE_BYTES)
        (folder / f"f{number}").write_bytes(content)
        sums.append(f"{registry.digest(content).removeprefix('sha256:')}  f{number}\n")
    (folder / "SUMS").write_text("".join(sums))


# --- pods ----------------------------------------------------------------------------------------


def pod_of(name: str, busybox: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": busybox,
        "command": ["/bin/busybox", "sh", "-c", script],
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            **spec,
        },
    }


def exporter(busybox: str) -> dict[str, Any]:
    """Like node-exporter, it has a copy of the host's mounts, which no unmount reaches."""
    return pod_of(
        "node-exporter", busybox, "exec /bin/busybox sleep 100000",
        container={"volumeMounts": [{"name": "root", "mountPath": "/host", "readOnly": True}]},
        volumes=[{"name": "root", "hostPath": {"path": "/"}}],
    )  # fmt: skip


def deployment_of(pod: dict[str, Any]) -> dict[str, Any]:
    """One replica of the pod."""
    name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
    template = {"metadata": {"labels": labels}, "spec": pod["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def reader(name: str, busybox: str, *, unprivileged: bool) -> dict[str, Any]:
    """A pod that reads the whole dataset again and again."""
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
    view = {"path": f"/{STATE}/views/{DATASET}", "type": "Directory"}
    return pod_of(
        name, busybox, read(),
        container={"volumeMounts": [mount], "securityContext": security if unprivileged else {}},
        volumes=[{"name": "data", "hostPath": view}],
    )  # fmt: skip


class Readers:
    """Pods that read, every other one of them unprivileged."""

    def __init__(self, kube: kubernetes.Kubernetes, count: int) -> None:
        self.kube = kube
        # Never the names of earlier ones: kubelet keeps their logs for a while.
        self.names = [f"reader-{os.urandom(3).hex()}-{n}" for n in range(count)]
        kube.apply(
            *(reader(name, kube.busybox, unprivileged=n % 2 == 0)
              for n, name in enumerate(self.names))
        )  # fmt: skip

    def rounds(self) -> list[int]:
        """Rounds of each reader; AssertionError when one met an error."""
        found = []
        for name in self.names:
            said = self.said(name)
            assert "ERROR" not in said, said[-500:]
            found.append(len(said.splitlines()))
        return found

    def said(self, name: str) -> str:
        """All that its containers said, read where kubelet keeps it."""
        logs = sorted(self.kube.root.glob(f"var/log/pods/default_{name}_*/main/*.log"))
        return "".join(each.read_text() for each in logs)

    def wait_more(self, count: int) -> None:
        """Until each has read ``count`` more whole rounds."""
        before = self.rounds()

        def there() -> bool:
            return all(a >= b + count for a, b in zip(self.rounds(), before, strict=True))

        waiting.until(
            there, 90, "the readers to go on", pause=0.1,
            detail=lambda: self.kube.kubectl("describe", "pods"),
        )  # fmt: skip

    def restarts(self) -> int:
        pods = [self.kube.get("pod", name) for name in self.names]
        return sum(s["restartCount"] for e in pods for s in e["status"]["containerStatuses"])

    def end(self) -> None:
        self.kube.kubectl("delete", "pod", *self.names, "--force", "--wait=false")


# --- the guard, tried all the time ----------------------------------------------------------------

_TRY = """\
import json, os, select, sys
outcomes = {}
while not select.select([sys.stdin], [], [], 0.02)[0]:
    try:
        os.close(os.open(sys.argv[1], os.O_WRONLY))
        what = "let through"
    except OSError as error:
        what = error.strerror
    outcomes[what] = outcomes.get(what, 0) + 1
print(json.dumps(outcomes))
"""


@dataclass
class Attempts:
    """``outcomes``: of the write opens of a device in the guarded cgroup, some 50 each second."""

    outcomes: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def attempts(where: cell.Cell, device: str) -> Iterator[Attempts]:
    """Write opens from before the block until after it; the outcomes are there at its end."""
    made = Attempts()
    process = where.popen(sys.executable, "-c", _TRY, device)
    try:
        yield made
    finally:  # whatever else failed: an open that was let through is worse
        try:
            # Its input ends, and so does it.
            out, _ = process.communicate(timeout=waiting.limit(30))
            made.outcomes = json.loads(out)
        finally:
            process.kill()
            process.wait()
        with grave.missing_denial():
            assert "let through" not in made.outcomes, made.outcomes
