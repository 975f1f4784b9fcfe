"""A node in the middle of its work, as a person on call may meet it, held there.

One dataset is complete and one warms; one image is pinned and one is pulled; the guard watches a
volume (dry-run); a finding stands, because an image does not fit the pin budget. The parts are
real: containerd, a registry, a loop device with ext4. ``hold`` stops the pull and makes the fill so
slow that what they show stands still for a while; ``let_go`` lets them end.
"""

import contextlib
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, cell, kubelet_files, proxy, pulling, registry, trees
from tests.testbed.agent import Agent

MB = 1_000_000
HOST = "registry.example"
COMPLETE, WARMING = "coco-2017", "imagenet-1k"
PINNED, PULLING, LARGE = (
    f"{HOST}/ml/{name}" for name in ("pytorch:2.9", "megatron:26.10", "triton:nightly")
)
_FILES = 1800
_IMAGE, _IMAGE_PART, _TOO_LARGE = 12 * MB, 4 * MB, 48 * MB
_PIN_BUDGET = 64 * MB
HISTORY_SECONDS = 300.0  # a point a minute
# Opens all files of a view again and again, under a name of its own.
_TRAIN = """
import os, pathlib, sys, time
pathlib.Path("/proc/self/comm").write_text("train.py")
while True:
    for folder, _, names in os.walk(sys.argv[1]):
        held = os.open(folder, os.O_RDONLY)
        for name in names:
            open(os.path.join(folder, name), "rb").close()
            time.sleep(0.0005)
        os.close(held)
"""


@dataclass
class BusyNode:
    agent: Agent
    gate: proxy.Proxy
    source: Path
    device: str  # the guarded one

    def hold(self) -> None:
        """A part of the dataset and of the image are there, and hardly more comes."""
        node = self.agent
        self.gate.pause_at = _IMAGE_PART
        node.settings["cache"]["fill"] = {"files_per_second": _FILES // 30}
        node.add_dir(WARMING, self.source)
        node.settings["preheat"]["images"].append({"ref": PULLING})
        node.write()
        node.wait_for(lambda: self._files() >= _FILES // 4, 60, "a part of the dataset")
        node.settings["cache"]["fill"] = {"files_per_second": 1}
        node.write()
        node.wait_for(lambda: self.image(PULLING)["bytes_done"] >= _IMAGE_PART // 2, 60, "a part")

    def add(self, name: str) -> None:
        """One more dataset in the settings, to see it come."""
        self.agent.add_dir(name, self.source.parent / COMPLETE)
        self.agent.write()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A job reads the dataset that warms while the block runs."""
        view = self.agent.dataset(WARMING)["view"]
        with subprocess.Popen([sys.executable, "-c", _TRAIN, view]) as job:
            try:
                yield
            finally:
                job.kill()

    @contextlib.contextmanager
    def trained_on(self) -> Iterator[None]:
        """The same, begun so long ago that its hits have a history."""
        with self.reading():
            self.agent.wait_for(self._hits_moved, HISTORY_SECONDS, "a history of hits")
            yield

    def _hits_moved(self) -> bool:
        shown = self.agent.dataset(WARMING)
        return bool(shown["used_by"]) and len(set(shown["hits_history"])) > 2

    def let_go(self, **fill: int) -> None:
        """Both go on to their end. ``fill``: settings of the fill."""
        self.gate.pause_at = 0
        self.agent.settings["cache"]["fill"] = fill
        self.agent.write()

    def _files(self) -> int:
        try:
            return int(self.agent.dataset(WARMING)["files"]["done"])
        except Exception:  # the settings are not read yet
            return 0

    def image(self, ref: str) -> dict[str, Any]:
        """As the API has it, or an empty one."""
        found = {each["ref"]: each for each in self.agent.get("/v1/images")["images"]}
        return dict(found.get(ref, {"state": "", "bytes_done": 0, "pinned": False}))

    def ready(self) -> None:
        """Wait until what was there from the beginning is done."""
        self.agent.wait_state(COMPLETE, "complete")
        self.agent.wait_for(lambda: self.image(PINNED)["pinned"], 60, "the image to be pinned")
        self.agent.wait_for(self.agent.findings, 60, "a finding")
        self.agent.wait_for(lambda: self.agent.guarded(self.device), 30, "the volume to be seen")


@contextlib.contextmanager
def busy(folder: Path, name: str = "gpu-node-07") -> Iterator[BusyNode]:
    """Started and held in the middle. ``name``: the node's own; the agent has a UTS namespace."""
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(pulling.pulling(folder, "trixie", HOST))
        for ref, size in ((PINNED, MB), (PULLING, _IMAGE), (LARGE, _TOO_LARGE)):
            repository, _, tag = ref.removeprefix(f"{HOST}/").rpartition(":")
            runtime.images.push(
                repository, tag, [registry.layer(tag, size, zlib.crc32(ref.encode()))]
            )
        guarded = stack.enter_context(cell.cell(folder / "cell"))
        disk = blockdev.blank(folder / "disk", 64 * 2**20)
        blockdev.run("mkfs.ext4", "-q", str(disk))
        trees.plain(folder / "sources" / COMPLETE, 300)
        trees.plain(folder / "sources" / WARMING, _FILES, seed=2)
        made = Agent(folder / "node")
        made.settings |= {
            # The disk that tests run on may be fuller than a node's.
            "kubelet": kubelet_files.written(folder / "node"),
            "preheat": {
                "socket": str(runtime.daemon.socket),
                "hosts_dir": str(runtime.daemon.certs),
                "spread": 0,
                "pin_budget": _PIN_BUDGET,
                "stall_timeout": "3600s",
                "images": [{"ref": PINNED}, {"ref": LARGE, "priority": -1}],
            },
            # What the audit finds is that of the whole machine, other tests included.
            "volumes": {
                "audit": {"enabled": False},
                "guard": cell.settings(guarded, mode="dry-run"),
            },
        }
        made.add_dir(COMPLETE, folder / "sources" / COMPLETE)
        stack.callback(made.end)
        made.start("unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh")
        device = stack.enter_context(blockdev.loop(disk))
        node = BusyNode(made, runtime.gate, folder / "sources" / WARMING, device)
        node.ready()
        node.hold()
        yield node
