"""What the agent's pod needs on a real kubelet: CPU and memory of its container, by what it does.

``make soak-node`` runs it; figures go to build/bench/node.json. The chart's requests and limits
come from them (docs/deploy.md). Needs root and about five minutes.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.testbed import blockdev, installed, kubernetes, leftovers, machine

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
FILES = 20_000
DEVICES = 20
RESULT = installed.REPO / "build" / "bench" / "node.json"

SAMPLE_SECONDS = 0.5


@dataclass
class Sampler:
    """Usage of the agent's container, twice a second."""

    node: installed.Node
    memory: list[int] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        cgroups = self.node.cgroups()
        while not self._end.wait(SAMPLE_SECONDS):
            used = installed.usage_of(cgroups)
            self.memory.append(used.memory)
            self.cpu.append((time.monotonic(), used.cpu))

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def figures(self) -> dict[str, float]:
        """CPU in cores. ``cpu_most``: over any five seconds."""
        (began, first), (ended, last) = self.cpu[0], self.cpu[-1]
        pairs = list(zip(self.cpu, self.cpu[10:], strict=False)) or [(self.cpu[0], self.cpu[-1])]
        most = max((b - a) / (t - s) for (s, a), (t, b) in pairs)
        return {
            "seconds": round(ended - began, 1),
            "cpu_mean": round((last - first) / (ended - began), 3),
            "cpu_most": round(most, 3),
            "memory_mean_mib": round(sum(self.memory) / len(self.memory) / 2**20, 1),
            "memory_most_mib": round(max(self.memory) / 2**20, 1),
        }


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    with machine.held(), leftovers.run_folder(installed.REPO / "build") as folder:
        kube = kubernetes.Kubernetes(folder / "kube")
        try:
            kube.start()
            with installed.installed(kube, folder / "node", files=FILES) as node:
                node.all_ready()
                for name, work in (("idle", idle), ("filling", filling), ("auditing", auditing)):
                    sampler = Sampler(node)
                    with sampler.sampling():
                        work(node, folder)
                    found[name] = sampler.figures()
                    print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
        finally:
            kube.stop()
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {RESULT.relative_to(installed.REPO)}")


def idle(node: installed.Node, folder: Path) -> None:
    """Three rooms, one dataset that is not warm, one image pinned."""
    time.sleep(SECONDS)


def filling(node: installed.Node, folder: Path) -> None:
    node.agent.tell(installed.DATASET, "warm")
    node.agent.wait_state(installed.DATASET, "complete", seconds=600)


def auditing(node: installed.Node, folder: Path) -> None:
    """Devices with file systems are mounted on the node and unmounted, and a pass is asked for each
    second, while a pod has a private copy of all mounts."""
    kube = node.kube
    exporter = installed.exporter(kube.busybox)
    with contextlib.ExitStack() as stack:
        devices = []
        for number in range(DEVICES):
            file = blockdev.blank(folder / f"audit{number}", 64 * blockdev.MiB)
            devices.append(stack.enter_context(blockdev.loop(file)))
            blockdev.run("mkfs.ext4", "-q", devices[-1])
        targets = {
            device: f"/var/lib/kubelet/plugins/soak/{Path(device).name}" for device in devices
        }
        each = _each(node, targets)
        each("mkdir -p $target; mount $device $target")
        kube.apply(exporter)
        kube.kubectl("wait", "pod/node-exporter", "--for=condition=Ready", "--timeout=60s")
        each("umount $target")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            each("mount $device $target")
            node.agent.post("/v1/audit/pass")
            each("umount $target")
            time.sleep(1)
        kube.kubectl("delete", "pod", "node-exporter", "--force")


def _each(node: installed.Node, targets: dict[str, str]) -> Callable[[str], None]:
    def run(script: str) -> None:
        pairs = " ".join(f"{device}:{target}" for device, target in targets.items())
        loop = f"for each in {pairs}; do device=${{each%%:*}} target=${{each##*:}}; {script}; done"
        node.kube.on_node("sh", "-euc", loop)

    return run


if __name__ == "__main__":
    main()
