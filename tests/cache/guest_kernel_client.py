"""Runs inside the guest (see test_guest.py): datasets by the kernel's CephFS client.

    guest_kernel_client.py V1_MONITOR V2_MONITOR SECRET_FILE RECORDS

RECORDS: what the snapshot holds, pickled outside. Says ``check: ...`` lines; the test on the
outside compares them.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from linux import mountinfo
from tests.testbed import agent, trees
from tests.testbed.agent import Agent

V1, V2, SECRET, RECORDS = sys.argv[1:5]
AREA = Path("/tmp/area")
PATIENCE = 120.0
WRONG = "AQBvZQ5nAAAAABAAm0nxLDd6bVYwD0pHGtBmXA=="


def say(text: object) -> None:
    print(f"check: {text}", flush=True)


def dataset(name: str, monitor: str, **more: Any) -> dict[str, Any]:
    source = {
        "kind": "cephfs", "client": "kernel", "monitors": [monitor], "path": "/data",
        "snapshot": "v1", "secret_file": SECRET,
    }  # fmt: skip
    return {"name": name, "freshness": "snapshot", "source": source | more}


def disk() -> None:
    """The node's SSD: ext4 of its own, as the guest's root takes no opaque marks."""
    ssd = AREA / "ssd"
    ssd.mkdir(parents=True)
    image = AREA / "ssd.img"
    with image.open("wb") as stream:
        stream.truncate(300 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(ssd)], check=True)


def sources(node: Agent) -> dict[str, mountinfo.Mount]:
    return {Path(m.target).parent.name: m for m in mountinfo.read() if str(node.state) in m.target}


def main() -> None:
    agent.START_SECONDS = PATIENCE  # everything is emulated here
    disk()
    with open(RECORDS, "rb") as stream:
        truth = pickle.load(stream)
    node = Agent(AREA / "node")
    node.put_store(AREA / "ssd" / "store")
    node.cache["fill"] = {"files_per_second": 4}
    node.cache["datasets"] = [dataset("v1", V1), dataset("v2", V2)]
    node.start()
    # One pass at a time: the second waits behind its source.
    for name, stage in (("v1", "overlay"), ("v2", "source")):
        node.wait_served(name, stage, seconds=PATIENCE)
        mounted = sources(node)[name]
        say(f"{name} {mounted.fstype} {node.dataset(name)['source']['read_by']}")
    secret = Path(SECRET).read_text().strip()
    shown = Path("/proc/self/mountinfo").read_text() + node.said()
    shown += subprocess.run(["ps", "auxwwwe"], capture_output=True, text=True, check=True).stdout
    say(f"secret shown {secret in shown}")

    before = {name: m.mount_id for name, m in sources(node).items()}
    node.kill()
    say(f"without an agent {trees.differences(truth, trees.records(node.view('v1')))}")
    node.start()
    node.wait_state("v1", "filling", seconds=PATIENCE)
    say(f"adopted {({name: m.mount_id for name, m in sources(node).items()}) == before}")
    node.cache["fill"] = {}
    node.write()
    for name in ("v1", "v2"):
        node.wait_state(name, "complete", seconds=PATIENCE)
        say(f"{name} complete {trees.differences(truth, trees.records(node.view(name)))}")
    node.wait_for(lambda: not sources(node), PATIENCE, "the source mounts to go")

    wrong = AREA / "wrong"
    wrong.write_text(WRONG)
    node.cache["datasets"] = [
        dataset("key", V1, secret_file=str(wrong)),
        dataset("path", V1, path="/nowhere"),
        dataset("snapshot", V1, snapshot="nothing"),
    ]
    node.write()
    for name in ("key", "path", "snapshot"):

        def explained(name: str = name) -> str:
            shown = {each["name"]: each for each in node.get("/v1/datasets")["datasets"]}
            why = str(shown[name]["why"]) if name in shown else ""
            return why if "CephFS" in why else ""

        say(f"{name}: {node.wait_for(explained, PATIENCE, f'a reason for {name}')}")
    say(f"left mounted {sorted(sources(node))}")
    node.end()


if __name__ == "__main__":
    main()
