"""mtu-mismatch and messenger-mode: networks and protocols that do not fit."""

import re
from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.cluster import ClusterView, refusal
from volumes.rules.base import Outcome, Rule, Scene, Trouble, needs_clusters

LARGEST_PACKET = 65535  # of IP; the loopback interface takes one byte more
_MODE = re.compile(r"ms_mode=([\w-]+)")


def _mtu(scene: Scene) -> Outcome:
    if not scene.settings.clusters:
        return Outcome(off="no cluster is set (volumes.audit.clusters)")
    troubles = []
    by_cluster: dict[str, set[int]] = {}
    for path in scene.paths:
        by_cluster.setdefault(path.cluster, set()).add(path.interface_mtu)
        if path.path_mtu < min(path.interface_mtu, LARGEST_PACKET):
            troubles.append(
                Trouble(
                    subject=path.cluster,
                    key=path.monitor,
                    message=f"the way to monitor {path.monitor} takes {path.path_mtu} bytes, "
                    f"interface {path.interface} sends up to {path.interface_mtu}",
                    advice="a switch or node on the way has a smaller MTU; where it drops instead "
                    "of answering, large reads hang while pings go through. Check with 'ping -M do "
                    f"-s {path.interface_mtu - 28} {path.monitor}'",
                    evidence={"interface": path.interface, "cluster": path.cluster},
                )
            )
    for cluster, sizes in by_cluster.items():
        if len(sizes) > 1:
            troubles.append(
                Trouble(
                    subject=cluster,
                    key="interfaces",
                    severity=Severity.INFO,
                    message=f"monitors of {cluster} are reached with different MTUs: "
                    f"{', '.join(map(str, sorted(sizes)))}",
                    advice="one of the interfaces is not set up as the others",
                    evidence={"cluster": cluster},
                )
            )
    unknown = [
        f"cluster {each.name}: {_why_no_path(scene, each.name)}"
        for each in scene.settings.clusters
        if each.name not in by_cluster
    ]
    return Outcome(tuple(troubles), unknown="; ".join(unknown))


def _why_no_path(scene: Scene, cluster: str) -> str:
    view = scene.clusters.get(cluster, "not asked yet")
    if isinstance(view, str):
        return view
    if "mon dump" in view.denied:
        return refusal("mon dump")
    return "the kernel knows no way to any of its monitors"


def _messenger(scene: Scene, view: ClusterView) -> Iterator[Trouble]:
    if scene.inventory is None or not (view.monitors_v1 or view.monitors_v2):
        return
    for device in scene.inventory.devices:
        owner = scene.cluster_of(device)
        if device.client is None or owner is None or owner.name != view.name:
            continue
        found = _MODE.search(device.client.config)
        mode = found[1] if found else "legacy" if device.client.config else ""
        if mode == "legacy" and not view.monitors_v1:
            needs = "its monitors speak msgr2 only"
        elif mode not in ("", "legacy") and not view.monitors_v2:
            needs = "its monitors do not speak msgr2"
        else:
            continue
        yield Trouble(
            subject=device.name,
            key=mode,
            device=device.name,
            message=f"{device.label} is mapped with ms_mode={mode}, but {needs}",
            advice="the mapping works until its session ends and cannot come back then: map it "
            "anew with a fitting ms_mode (mapOptions 'krbd:ms_mode=prefer-crc')",
            evidence={"cluster": view.name, "mode": mode},
        )


MTU = Rule(
    name="mtu-mismatch",
    summary="packets to the cluster do not fit through the network",
    severity=Severity.WARNING,
    patience=0.0,
    judge=_mtu,
)
MESSENGER = Rule(
    name="messenger-mode",
    summary="a mapping speaks a protocol that the cluster has given up",
    severity=Severity.WARNING,
    patience=0.0,
    judge=needs_clusters(_messenger, "mon dump"),
)
