"""An API server with the agent's kinds and its rights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.kube import rendered
from tests.testbed import control_plane, waiting

REPO = Path(__file__).parents[2]


@contextlib.contextmanager
def with_kinds(folder: Path) -> Iterator[control_plane.ControlPlane]:
    """Stopped when the block ends."""
    made = control_plane.ControlPlane(folder)
    try:
        made.start()
        made.apply(
            {
                "apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": control_plane.NAMESPACE},
            }
        )  # fmt: skip
        made.kubectl("apply", "--server-side", "-f", str(REPO / "deploy/manifests/crds.yaml"))
        for each in ("cacheddatasets", "imagesets", "nodestorages"):
            made.kubectl(
                "wait", "--for=condition=Established", f"crd/{each}.nodeagent.io", "--timeout=60s"
            )
        waiting.until(
            lambda: made._ask("get", "cacheddatasets,imagesets,nodestorages", "-o", "name") == "",
            30, "the kinds to be served",
        )  # fmt: skip
        made.apply(*rendered.rights())
        yield made
    finally:
        made.stop()
