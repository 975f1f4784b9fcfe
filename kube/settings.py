"""How settings name this node, its kubelet, and the API server of its cluster."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

import kit.settings
import kit.units

_URL = r"^https://[^/?#@\s]+/?$"
_url = kit.settings.matching(_URL, "an address like https://HOST:PORT")
_PATTERN = Field(json_schema_extra={"pattern": _URL})

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAMESPACE_FILE = ACCOUNT / "namespace"


class AccessSettings(kit.settings.Section):
    """An API server and a login. A pod needs none of these."""

    server: Annotated[str, AfterValidator(_url), _PATTERN] | None = None
    """https://HOST:PORT. Default: the pod's API server."""
    ca_file: kit.settings.AbsolutePath = ACCOUNT / "ca.crt"
    """CA certificate of the API server."""
    token_file: kit.settings.AbsolutePath = ACCOUNT / "token"
    """Token of the agent's account."""
    kubeconfig: kit.settings.AbsolutePath | None = None
    """Kubeconfig, instead of `server`, `ca_file` and `token_file`. Exec plugins do not work."""

    @property
    def is_configured(self) -> bool:
        """Whether there is a cluster: the settings name one, or this is a pod with an account."""
        if self.server is not None or self.kubeconfig is not None:
            return True
        return "KUBERNETES_SERVICE_HOST" in os.environ and self.token_file.exists()


class KubeletSettings(kit.settings.Section):
    """This node's kubelet: where its directory is, and its thresholds for image garbage collection
    and eviction. No pull crosses them, and the cache's reserve is no less. Without 'config' pulls
    take the kubelet's defaults for them, and the reserve is that of the cache alone."""

    root_dir: kit.settings.AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's --root-dir (nodefs)."""
    image_dir: kit.settings.AbsolutePath = Path("/var/lib/containerd")
    """Directory of the images (imagefs)."""
    config: kit.settings.AbsolutePath | None = None
    """The kubelet's --config file. The agent reads the thresholds in it. If the kubelet uses
    flags, write a file with the same thresholds."""
    config_dir: kit.settings.AbsolutePath | None = None
    """The kubelet's --config-dir. If you set it, set `config` too."""

    @model_validator(mode="after")
    def _has_config(self) -> "KubeletSettings":
        if self.config_dir is not None and self.config is None:
            raise ValueError("config_dir needs config: drop-ins change what that file says")
        return self


class ThisNode(kit.settings.Section):
    """What the settings file says once, for every room: the node's name, its kubelet, and the API
    server of its cluster."""

    name: str = Field(default_factory=lambda: os.environ.get("NODE_NAME") or socket.gethostname())
    kubelet: KubeletSettings = KubeletSettings()
    cluster: AccessSettings = AccessSettings()


class RoomSettings(kit.settings.Section):
    """The base of a room's section. ``this_node`` is not in the section: the process gives it."""

    _this_node: ThisNode = PrivateAttr(default_factory=ThisNode)

    @property
    def this_node(self) -> ThisNode:
        return self._this_node

    def at(self, this_node: ThisNode) -> Self:
        """The same section on that node, whether or not it fits there (``fit``)."""
        placed = self.model_copy()
        placed._this_node = this_node
        return placed

    def fit(self) -> Self:
        """ValueError when the section does not fit to its node."""
        return self

    def as_json(self) -> dict[str, Any]:
        """For a child process, with the node; ``of_json`` reads it."""
        shown = self.model_dump(mode="json", by_alias=True)
        return {"section": shown, "this_node": self.this_node.model_dump(mode="json")}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> Self:
        section = cls.model_validate(given["section"])
        return section.at(ThisNode.model_validate(given["this_node"]))
