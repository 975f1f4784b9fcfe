"""A real containerd of a chosen Debian release as a plain process, and a client like kubelet."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf import empty_pb2
from google.protobuf.message import Message

import kit.files
from preheat.runtimes import containerd_pb2, cri_pb2
from tests.testbed import leftovers, waiting

RUNTIMES = Path(__file__).parents[2] / "build" / "runtimes"
# Debian release -> what its containerd is; scripts/runtimes.sh unpacks them.
RELEASES = {"bookworm": "1.6", "trixie": "1.7", "sid": "2"}
START_SECONDS = 20.0

_CONFIG = """\
version = 2
root = "{d}/root"
state = "{d}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.nri.v1.nri"]
[grpc]
  address = "{d}/c.sock"
[ttrpc]
  address = "{d}/c.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  disable_cgroup = true
  # Containers of a test machine may lack CAP_SYS_RESOURCE; lowering the score needs it.
  restrict_oom_score_adj = true
  sandbox_image = "{sandbox}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    discard_unpacked_layers = {discard}
    disable_snapshot_annotations = {plain}
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{d}/cni/bin"
    conf_dir = "{d}/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{d}/certs"
{newer}
{proxy}
"""
# 2.x does not take these over from the names above.
_NEWER = """\
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  discard_unpacked_layers = {discard}
  disable_snapshot_annotations = {plain}
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "{d}/certs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{sandbox}"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "{snapshotter}"
  differ = "walking"
"""

_PROXY = """\
[proxy_plugins.{snapshotter}]
  type = "snapshot"
  address = "{address}"
"""

ResponseT = TypeVar("ResponseT", bound=Message)


def _same(data: bytes) -> bytes:
    return data


class Containerd:
    """One containerd below one folder. After ``kill``, ``start`` uses the same root again."""

    def __init__(
        self,
        folder: Path,
        release: str,
        *,
        discard: bool = False,
        snapshotter: str = "overlayfs",
        remote: Path | None = None,
    ) -> None:
        """``remote``: the socket of the ``snapshotter``, a process of its own."""
        self.folder = folder.absolute()
        self.release = release
        self.binary = RUNTIMES / release / "usr" / "bin" / "containerd"
        self._discard = discard
        self._remote = remote
        self.environment: dict[str, str] = {}  # beside PATH, from the next start on
        self._snapshotter = snapshotter
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "c.sock"

    @property
    def certs(self) -> Path:
        """The hosts.toml directory that containerd reads, and the agent with it."""
        return self.folder / "certs"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _content(self) -> Path:
        return self.folder / "root" / "io.containerd.content.v1.content"

    def stored_bytes(self) -> int:
        """What its content store has on disk: whole blobs, and the begun part of others."""
        files = [*self._content.glob("blobs/*/*"), *self._content.glob("ingest/*/data")]
        return sum(file.stat().st_size for file in files)

    def has_closed_parts(self) -> bool:
        """Whether nobody writes to a begun blob any more: who closes one dates it last.

        One that is collected earlier is forgotten, with files left ("directory not empty").
        """
        try:
            return all(
                part.with_name("updatedat").stat().st_mtime_ns > part.stat().st_mtime_ns
                for part in self._content.glob("ingest/*/data")
            )
        except FileNotFoundError:  # it is being collected
            return False

    def trust(self, host: str, url: str) -> None:
        """Pull images of ``host`` from the plain-http ``url``."""
        place = self.certs / host
        place.mkdir(parents=True, exist_ok=True)
        (place / "hosts.toml").write_text(
            f'server = "{url}"\n[host."{url}"]\n  capabilities = ["pull", "resolve"]\n'
        )

    def start(self, sandbox: str = "localhost/none:none") -> None:
        for name in ("root", "state", "certs", "cni/bin", "cni/net.d"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        discard = "true" if self._discard else "false"
        values = {
            "d": self.folder,
            "discard": discard,
            "sandbox": sandbox,
            "snapshotter": self._snapshotter,
            "plain": "true" if self._remote is None else "false",
        }
        newer = _NEWER.format(**values) if self.release == "sid" else ""
        config = self.folder / "config.toml"
        proxy = _PROXY.format(**values, address=self._remote) if self._remote is not None else ""
        config.write_text(_CONFIG.format(**values, newer=newer, proxy=proxy))
        path = f"{self.binary.parent}:{RUNTIMES / 'bookworm' / 'usr' / 'bin'}"
        path += f":{RUNTIMES / 'bookworm' / 'usr' / 'sbin'}:{os.environ['PATH']}"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.binary), "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": path, **self.environment},
                start_new_session=True,
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        def log() -> str:
            return (self.folder / "log").read_text(errors="replace")[-3000:]

        def answers() -> bool:
            if not self.alive:
                raise RuntimeError(f"containerd {self.release} ended: {log()}")
            with contextlib.suppress(grpc.RpcError), self.channel() as channel:
                path = "/runtime.v1.ImageService/ListImages"
                call = channel.unary_unary(path, _same, _same)
                call(b"", timeout=waiting.limit(2.0))
                return True
            return False

        what = f"an answer of containerd {self.release}"
        waiting.until(answers, START_SECONDS, what, detail=log)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, as the OOM killer would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=waiting.limit(20))

    def stop(self) -> None:
        """End it and everything it mounted or started; its folder stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=waiting.limit(10))
        except subprocess.TimeoutExpired:
            self.kill()
        for pid, words in leftovers.commands():
            if "containerd-shim" in words[0] and str(self.socket) in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        leftovers.unmount(self.folder)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        options = [("grpc.max_receive_message_length", 64 * 2**20), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(kit.files.grpc_address(self.socket), options=options) as channel:
            yield channel


class Kubelet:
    """Calls that kubelet, crictl or ctr would make to the runtime."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.aio.insecure_channel(
            kit.files.grpc_address(socket),
            options=[("grpc.max_receive_message_length", 64 * 2**20)],
        )

    async def close(self) -> None:
        await self._channel.close()

    async def raw(
        self,
        path: str,
        request: bytes,
        timeout: float = waiting.limit(60.0),
        lease: str | None = None,
    ) -> bytes:
        """Any unary call with any bytes."""
        metadata = [("containerd-namespace", "k8s.io")]
        if lease is not None:
            metadata.append(("containerd-lease", lease))
        call = self._channel.unary_unary(path, _same, _same)
        return await call(request, timeout=timeout, metadata=tuple(metadata))

    async def _cri(
        self,
        method: str,
        request: Message,
        response: type[ResponseT],
        timeout: float = waiting.limit(60.0),
    ) -> ResponseT:
        path = f"/runtime.v1.ImageService/{method}"
        return response.FromString(await self.raw(path, request.SerializeToString(), timeout))

    @staticmethod
    def _image(ref: str) -> cri_pb2.ImageRequest:
        return cri_pb2.ImageRequest(image=cri_pb2.ImageSpec(image=ref))

    async def pull(self, ref: str, timeout: float = waiting.limit(300.0)) -> str:
        request = cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image=ref))
        answer = await self._cri("PullImage", request, cri_pb2.PullImageResponse, timeout)
        return answer.image_ref

    async def remove(self, ref: str) -> None:
        await self._cri("RemoveImage", self._image(ref), empty_pb2.Empty)

    async def images(self) -> list[cri_pb2.Image]:
        answer = await self._cri("ListImages", empty_pb2.Empty(), cri_pb2.ListImagesResponse)
        return list(answer.images)

    async def status(self, ref: str) -> cri_pb2.Image | None:
        answer = await self._cri("ImageStatus", self._image(ref), cri_pb2.ImageStatusResponse)
        return answer.image if answer.HasField("image") else None

    async def records(self) -> list[containerd_pb2.Image]:
        """The image records with their labels."""
        data = await self.raw("/containerd.services.images.v1.Images/List", b"")
        return list(containerd_pb2.ListImagesResponse.FromString(data).images)

    async def resources(self, lease: str) -> set[tuple[str, str]]:
        """Kind and id of what a lease holds."""
        request = containerd_pb2.ListResourcesRequest(id=lease).SerializeToString()
        data = await self.raw("/containerd.services.leases.v1.Leases/ListResources", request)
        found = containerd_pb2.ListResourcesResponse.FromString(data).resources
        return {(each.type, each.id) for each in found}

    async def leases(self) -> list[containerd_pb2.Lease]:
        data = await self.raw("/containerd.services.leases.v1.Leases/List", b"")
        return list(containerd_pb2.ListLeasesResponse.FromString(data).leases)

    async def ingests(self) -> list[containerd_pb2.IngestStatus]:
        data = await self.raw("/containerd.services.content.v1.Content/ListStatuses", b"")
        return list(containerd_pb2.ListStatusesResponse.FromString(data).statuses)

    async def _many(self, path: str, request: bytes) -> list[bytes]:
        metadata = (("containerd-namespace", "k8s.io"),)
        call = self._channel.unary_stream(path, _same, _same)
        return [
            part async for part in call(request, timeout=waiting.limit(30.0), metadata=metadata)
        ]

    async def content(self) -> dict[str, containerd_pb2.ContentInfo]:
        parts = await self._many("/containerd.services.content.v1.Content/List", b"")
        answers = [containerd_pb2.ListContentResponse.FromString(part) for part in parts]
        return {info.digest: info for answer in answers for info in answer.info}

    async def snapshots(self) -> set[str]:
        return set(await self.snapshot_labels())

    async def snapshot_labels(self) -> dict[str, dict[str, str]]:
        request = containerd_pb2.ListSnapshotsRequest(snapshotter="overlayfs").SerializeToString()
        parts = await self._many("/containerd.services.snapshots.v1.Snapshots/List", request)
        answers = [containerd_pb2.ListSnapshotsResponse.FromString(part) for part in parts]
        return {info.name: dict(info.labels) for answer in answers for info in answer.info}

    async def collect(self) -> None:
        """Make garbage collection run now: delete an empty containerd lease synchronously."""
        create = containerd_pb2.CreateLeaseRequest(id="test-collect")
        delete = containerd_pb2.DeleteLeaseRequest(id="test-collect", sync=True)
        service = "/containerd.services.leases.v1.Leases"
        await self.raw(f"{service}/Create", create.SerializeToString())
        await self.raw(f"{service}/Delete", delete.SerializeToString())
