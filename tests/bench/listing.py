"""``python -m tests.bench.listing``: what a fill asks of the MDS, with a published manifest and
without.

Counts, which need no quiet machine: those of the MDS's own counters (``perf dump``) from the
request to warm to ``complete``, the agent's mount included. A real cluster and a real agent; the
result goes to build/bench/listing.json. Not a part of ``python -m tests.bench``, whose tiny sizes
the suite runs: it would start another cluster there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.bench import agent, harness
from tests.testbed import ceph
from tests.testbed import trees as testbed_trees
from tests.testbed.agent import Agent

NAME, SNAPSHOT = "ceph", "v1"
FILL_SECONDS = 300.0
FILE_BYTES = 4096


def requests(cluster: ceph.CephCluster) -> dict[str, int]:
    """The requests of clients that the MDS has handled, by kind; ``all`` of them."""
    socket = cluster.folder / "run" / f"ceph-mds.a.{cluster.pid('mds')}.asok"
    found = json.loads(cluster.run("ceph", "daemon", str(socket), "perf", "dump"))["mds_server"]
    kinds = {
        name.removeprefix("req_").removesuffix("_latency"): int(value["avgcount"])
        for name, value in found.items()
        if name.startswith("req_") and isinstance(value, dict)
    }
    return {"all": int(found["handle_client_request"])} | kinds


def counted(cluster: ceph.CephCluster, node: Agent) -> dict[str, int]:
    """What a fill from nothing asked for."""
    before = requests(cluster)
    node.tell(NAME, "warm", {})
    node.wait_state(NAME, "complete", seconds=FILL_SECONDS)
    after = requests(cluster)
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


def measure(room: Path, directories: int, files: int) -> dict[str, Any]:
    with ceph.running(room / "ceph") as cluster, cluster.mounted(room / "writer") as writer:
        for number in range(directories):
            folder = writer / "data" / f"{number // 100:03}" / f"{number:05}"
            folder.mkdir(parents=True)
            for each in range(files // directories):
                (folder / f"{each:03}.bin").write_bytes(b"%16d" % each * (FILE_BYTES // 16))
        cluster.wait_until_not_recent()
        frozen = writer / "data" / ".snap" / SNAPSHOT
        frozen.mkdir()
        secret = room / "secret"
        secret.write_text(cluster.secret())
        source = {
            "kind": "cephfs", "monitors": [cluster.monitor], "path": "/data", "client": "fuse",
            "snapshot": SNAPSHOT, "user": "admin", "secret_file": str(secret),
        }  # fmt: skip
        dataset: dict[str, Any] = {
            "name": NAME, "freshness": "snapshot", "warm": False, "source": source,
        }  # fmt: skip
        settings = {"budget": "20GiB", "reserve": "1%", "datasets": [dataset]}
        found: dict[str, Any] = {"directories": directories, "files": files}
        with agent.running(room / "agent", settings) as node:
            found["listed"] = counted(cluster, node)
            target = writer / "data" / "v1.manifest"
            found["manifest"] = node.cli_json(
                "dataset", "publish-manifest", NAME, "--to", str(target)
            )
            node.remove(NAME)
            source["manifest"] = "{snapshot}.manifest"
            node.cache["datasets"] = [dataset]
            node.stop()  # warmed before it had read the new settings, it would list again
            node.start()
            found["from manifest"] = counted(cluster, node)
            if "directories are taken from" not in node.said():
                raise RuntimeError("the manifest was not used")
            testbed_trees.assert_equal(frozen, node.view(NAME))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.listing", description=__doc__)
    parser.add_argument("--directories", type=int, default=2000)
    parser.add_argument("--files", type=int, default=20_000)
    options = parser.parse_args()
    with harness.Workplace(harness.RESULTS / "work") as place, place.room("listing") as room:
        found = measure(room, options.directories, options.files)
    (harness.RESULTS / "listing.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
