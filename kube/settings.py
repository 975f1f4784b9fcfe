"""How settings name the API server of the node's cluster, and the agent's login there."""

import os
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

import kit.settings
import kit.units

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAMESPACE_FILE = ACCOUNT / "namespace"


class AccessSettings(kit.settings.Section):
    """An API server and a login. A pod needs none of these."""

    server: Annotated[str, Field(pattern=r"^https://[^/?#@\s]+/?$")] | None = None
    """https://HOST:PORT. Default: the one that a pod is told of ($KUBERNETES_SERVICE_HOST)."""
    ca_file: kit.settings.AbsolutePath = ACCOUNT / "ca.crt"
    """The authority that signed its certificate, PEM."""
    token_file: kit.settings.AbsolutePath = ACCOUNT / "token"
    """The agent's own token there."""
    kubeconfig: kit.settings.AbsolutePath | None = None
    """A kubeconfig, whose current context replaces the three above. Logins by a token or a
    certificate; not by a program (exec)."""

    @property
    def is_configured(self) -> bool:
        """Whether there is a cluster: the settings name one, or this is a pod with an account."""
        if self.server is not None or self.kubeconfig is not None:
            return True
        return "KUBERNETES_SERVICE_HOST" in os.environ and self.token_file.exists()


class KubeletApiSettings(kit.settings.Section):
    """Asking the kubelet for the configuration that it runs with (/configz). The agent's account
    needs the right to get nodes/configz, which Kubernetes has from 1.33 on."""

    server: Annotated[str, Field(pattern=r"^https://[^/?#@\s]+/?$")] | None = None
    """https://HOST:PORT of the kubelet's authenticated port. Default: port 10250 of $NODE_IP."""
    ca_file: kit.settings.AbsolutePath = ACCOUNT / "ca.crt"
    """What the kubelet's certificate is checked with, PEM: the cluster's authority
    (serverTLSBootstrap), or /var/lib/kubelet/pki/kubelet.crt where it signed its own."""
    token_file: kit.settings.AbsolutePath = ACCOUNT / "token"
    """The agent's own token in the cluster."""


class KubeletSource(kit.settings.Section):
    """Where the kubelet's thresholds are found."""

    named: ClassVar[str] = "kubelet"

    api: KubeletApiSettings | None = None
    """Ask the kubelet itself ({}: with the account of the agent's pod); absent: it is not asked.
    Until it has answered, what follows counts."""
    config: Path | None = None
    """The kubelet's configuration file (its --config); what it says and its defaults count."""
    config_dir: Path | None = None
    """The kubelet's --config-dir: drop-ins that override the file."""
    root_dir: kit.settings.AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's --root-dir: what lies on the same file system is under its evictions at
    nodefs.available and nodefs.inodesFree."""

    @model_validator(mode="after")
    def _has_config(self) -> "KubeletSource":
        if self.config_dir is not None and self.config is None:
            raise ValueError("config_dir needs config: drop-ins change what that file says")
        return self


class KubeletSettings(KubeletSource):
    """The kubelet's thresholds for image garbage collection and eviction; no pull crosses them. The
    last four are assumed where neither the kubelet nor its file tells."""

    named: ClassVar[str] = "preheat.kubelet"

    gc_high: kit.units.Share = Field(default=0.85, gt=0)
    """imageGCHighThresholdPercent: above it images are deleted."""
    gc_low: kit.units.Share = Field(default=0.80, gt=0)
    """imageGCLowThresholdPercent: images are deleted down to it."""
    eviction_free: kit.units.Share = 0.15
    """evictionHard imagefs.available: below it, DiskPressure."""
    eviction_inodes: kit.units.Share = 0.05
    """evictionHard imagefs.inodesFree: below it, DiskPressure."""

    @model_validator(mode="after")
    def _ordered(self) -> "KubeletSettings":
        if self.gc_low > self.gc_high:
            raise ValueError("gc_low is above gc_high")
        return self
