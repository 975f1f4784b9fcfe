"""Real containerd, real registry, one folder; everything ends with the test that started it."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from preheat.runtimes import containerd as adapter
from tests.preheat.rig import Clock, Rig
from tests.testbed import agent, containerd, kubernetes, pods, proxy, registry, waiting


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registry.Registry]:
    server = registry.Registry(tmp_path_factory.mktemp("registry"))
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture(scope="package")
def newer(run_folder: Path) -> Iterator[kubernetes.Kubernetes]:
    """A Kubernetes whose node has containerd 2: the first one that mounts images."""
    made = kubernetes.Kubernetes(run_folder / "kube-2", "sid", gates=("ImageVolume",))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def gate(images: registry.Registry) -> Iterator[proxy.Proxy]:
    """The proxy that everything goes through; counts from zero in each test."""
    between = proxy.Proxy(images.port)
    between.start()
    try:
        yield between
    finally:
        between.stop()


@pytest.fixture(params=list(containerd.RELEASES))
def release(request: pytest.FixtureRequest) -> str:
    """Each containerd: 1.6, 1.7 and 2.x."""
    return str(request.param)


@pytest.fixture
def daemon(release: str, tmp_path: Path, gate: proxy.Proxy) -> Iterator[containerd.Containerd]:
    server = containerd.Containerd(tmp_path / "containerd", release)
    server.trust(gate.host, gate.url)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest_asyncio.fixture
async def kubelet(daemon: containerd.Containerd) -> AsyncIterator[containerd.Kubelet]:
    hand = containerd.Kubelet(daemon.socket)
    try:
        yield hand
    finally:
        await hand.close()


@pytest.fixture
def rig(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> Rig:
    return Rig(images, gate, daemon, kubelet, tmp_path)


@pytest_asyncio.fixture
async def box(daemon: containerd.Containerd) -> AsyncIterator[adapter.Containerd]:
    """The adapter under test, connected."""
    runtime = adapter.Containerd(daemon.socket)
    try:
        await runtime.connect()
        yield runtime
    finally:
        await runtime.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the work loop, which tests may advance."""
    made = Clock()
    for module in ("pulling.reconciler", "planning.stock"):
        monkeypatch.setattr(f"preheat.{module}.time", made)
    return made


@pytest.fixture
def node(rig: Rig) -> Iterator[agent.Agent]:
    """An agent process that only preheats, ready."""
    section = rig.section().model_dump(mode="json", exclude_none=True)
    made = agent.Agent(rig.folder / "node", {"preheat": section})
    try:
        made.start()
        waiting.until(lambda: made.get("/readyz")["ready"], what="the agent to be ready")
        yield made
    finally:
        made.end()


@pytest_asyncio.fixture
async def with_pods(rig: Rig) -> AsyncIterator[tuple[Rig, pods.Pods]]:
    """A rig whose containerd can run pods."""
    sandbox = pods.pause_image(rig.images)
    rig.daemon.stop()
    rig.daemon.start(sandbox=f"{rig.gate.host}/{sandbox}")
    yield rig, pods.Pods(rig.kubelet)
