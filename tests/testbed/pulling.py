"""A containerd with a registry of its own and the proxy between them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import containerd, proxy, registry


@dataclass(frozen=True)
class Pulling:
    images: registry.Registry
    gate: proxy.Proxy
    daemon: containerd.Containerd
    host: str  # under which the daemon finds the registry


@contextlib.contextmanager
def pulling(folder: Path, release: str, host: str = "") -> Iterator[Pulling]:
    """All of it started. ``host``: what image names begin with; the proxy's own address if ''."""
    with contextlib.ExitStack() as stack:
        images = registry.Registry(folder / "registry")
        images.start()
        stack.callback(images.stop)
        gate = proxy.Proxy(images.port)
        gate.start()
        stack.callback(gate.stop)
        daemon = containerd.Containerd(folder / "containerd", release)
        stack.callback(daemon.remove)
        daemon.trust(host or gate.host, gate.url)
        daemon.start()
        yield Pulling(images, gate, daemon, host or gate.host)
