"""The .proto files that containerd and Kubernetes publish, as Go modules.

Fetched once through the Go module proxy and kept in the cache folder, like Kubernetes' programs: a
second run needs no network.
"""

import fcntl
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool

from tests.testbed import kubernetes, waiting

# What the newest release has; a number that was published once never changes its meaning.
MODULES = {
    "github.com/containerd/containerd/api": "v1.9.0",
    "k8s.io/cri-api": f"v0.{kubernetes.VERSION.removeprefix('1.')}",
}
FILES = (
    *(
        f"github.com/containerd/containerd/api/services/{name}/v1/{name}.proto"
        for name in ("content", "diff", "events", "images", "leases", "snapshots", "version")
    ),
    "github.com/containerd/containerd/api/events/image.proto",
    "k8s.io/cri-api/pkg/apis/runtime/v1/api.proto",
)
FETCH_SECONDS = 240.0


def _fetch(module: str, version: str, place: Path) -> None:
    """Copy the module's .proto files to ``place``."""
    with tempfile.TemporaryDirectory(dir=place.parent) as made:
        (Path(made) / "go.mod").write_text("module scratch\n")
        answer = subprocess.run(
            ["go", "mod", "download", "-json", f"{module}@{version}"],
            cwd=made,
            capture_output=True,
            text=True,
            check=False,
            timeout=FETCH_SECONDS,
        )
        said = json.loads(answer.stdout or "{}")
        assert "Dir" in said, f"{module}@{version}: {said.get('Error', answer.stderr)}"
        copy = Path(made) / "copy"
        for file in Path(said["Dir"]).rglob("*.proto"):
            target = copy / file.relative_to(said["Dir"])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        copy.rename(place)  # there only when it is whole


def folder() -> Path:
    """The folder that holds all modules, each at its import path."""
    versions = "-".join(f"{module.rpartition('/')[2]}{v}" for module, v in MODULES.items())
    root = kubernetes.CACHE / "protos" / versions
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module, version in MODULES.items():
            place = root / module
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                _fetch(module, version, place)
    return root


def messages(python: Path, work: Path) -> descriptor_pool.DescriptorPool:
    """All published messages. ``python``: an interpreter with grpc_tools; ``work``: any folder."""
    made = work / "published.bin"
    command = [str(python), "-m", "grpc_tools.protoc", f"-I{folder()}"]
    command += ["--include_imports", f"--descriptor_set_out={made}", *FILES]
    subprocess.run(command, check=True, timeout=waiting.limit(60))
    found = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return pool
