"""Directories of this host that no dataset may show.

Who may name a source (the settings file, a ConfigMap, an object of the cluster) has all pods of the
node read it. So a directory with other pods' volumes and images, or with keys, is no source.
"""

import os.path
from collections.abc import Mapping

from linux import mountinfo

KUBELET, RUNTIME, AGENT = "the kubelet's", "the container runtime's", "the agent's"
CLUSTER = "the cluster's"
ALWAYS: Mapping[str, str] = {
    "/var/lib/kubelet": KUBELET,
    "/var/log/pods": KUBELET,
    "/var/log/containers": KUBELET,
    "/var/lib/containerd": RUNTIME,
    "/var/lib/containers": RUNTIME,
    "/var/lib/docker": RUNTIME,
    "/var/lib/rancher": RUNTIME,
    "/run/containerd": RUNTIME,
    "/run/containers": RUNTIME,
    "/run/crio": RUNTIME,
    "/run/docker": RUNTIME,
    "/run/k3s": RUNTIME,
    "/run/nodeagent": AGENT,
    "/run/secrets": AGENT,  # its token in the cluster
    "/var/lib/etcd": CLUSTER,
    "/var/lib/rook": CLUSTER,
    "/var/lib/ceph": CLUSTER,
    "/var/lib/cni": CLUSTER,
    "/etc": "the host's configuration",
    "/boot": "the host's",
    "/root": "root's",
    "/dev": "the kernel's",
    "/proc": "the kernel's",
    "/sys": "the kernel's",
}
# Administrators keep datasets there too, and say so in the settings file.
OF_USERS: Mapping[str, str] = {"/home": "its users'"}


def plain(path: str) -> str:
    """An absolute path without '..', '.' and double slashes; links are not followed."""
    return os.path.normpath("/" + path.lstrip("/"))


lies_in = mountinfo.within


def why(path: str, folders: Mapping[str, str]) -> str:
    """Why ``path`` is no source; '' when it lies neither in one of ``folders`` nor above one.

    Paths are ``plain``.
    """
    for folder, whose in folders.items():
        if lies_in(path, folder):
            return f"it lies in {folder}, which is {whose}: pods would read it"
        if lies_in(folder, path):
            return f"{folder}, which is {whose}, lies in it: pods would read that too"
    return ""
