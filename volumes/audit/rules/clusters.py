"""Rules about clusters and the way to them: ceph-version-skew, ceph-feature-skew, clock-skew,
mtu-mismatch, messenger-mode. What the monitors say of the whole cluster by themselves (space,
their clocks, daemons of several versions) is theirs to tell, once.

Why: these states do not fail at once. They fail at the next map, the next reconnect or the next
large read, often on many nodes together.
"""

import re
from collections.abc import Iterator

from ceph import protocol
from volumes.audit.rules.base import NO_CLUSTER, Outcome, cluster_rule, rule
from volumes.audit.types import Scene, Severity, Trouble

# Ceph's release names and their major versions.
_NAMED = (
    "infernalis jewel kraken luminous mimic nautilus octopus pacific quincy reef squid tentacle"
)
_RELEASES = {name: major for major, name in enumerate(_NAMED.split(), 9)}
_RELEASES |= {"firefly": 0, "hammer": 0}
_MOST_APART = 2  # releases between client and daemons
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# Bits of an RBD image's features from the lowest, which /sys/bus/rbd/supported_features has too.
_IMAGE_FEATURES = (
    *("layering", "striping", "exclusive-lock", "object-map", "fast-diff", "deep-flatten"),
    *("journaling", "data-pool", "operations", "migrating"),
)
_LARGEST_PACKET = 65535  # of IP; the loopback interface has an MTU of one byte more
_MESSENGER_MODE = re.compile(r"ms_mode=([\w-]+)")


# -- ceph-version-skew -------------------------------------------------------------------------


@cluster_rule("ceph-version-skew", Severity.WARNING, 0.0, commands=("versions",))
def version_skew(scene: Scene, view: protocol.ClusterView) -> Iterator[Trouble]:
    """Versions of the cluster and of this node's client do not match."""
    daemons: dict[str, list[str]] = {}
    for entry in view.versions:
        daemons.setdefault(_number(entry.version), []).append(f"{entry.count} {entry.kind}")
    evidence = {
        "cluster": view.name,
        "daemons": "; ".join(f"{v}: {', '.join(who)}" for v, who in sorted(daemons.items())),
        "node_client": view.node_client,
        "kernel": scene.inventory.kernel if scene.inventory else "",
    }
    wanted = scene.expected_versions.get(view.name)
    if wanted is not None:
        yield from _unexpected(view, daemons, wanted, evidence)
        return
    majors = [int(v.split(".")[0]) for v in daemons if v]
    if view.node_client and majors:
        own = int(view.node_client.split(".")[0])
        if max(abs(own - major) for major in majors) > _MOST_APART:
            yield Trouble(
                subject=view.name,
                key="apart",
                message=f"this node's Ceph client {view.node_client} and cluster {view.name} "
                f"({', '.join(sorted(daemons))}) are more than {_MOST_APART} releases apart",
                advice="install client packages of a release near the cluster's: nobody tests this "
                "combination",
                evidence=evidence,
            )


def _unexpected(
    view: protocol.ClusterView, daemons: dict[str, list[str]], wanted: str, evidence: dict[str, str]
) -> Iterator[Trouble]:
    odd = [version for version in daemons if version and not _fits(version, wanted)]
    if view.node_client and not _fits(view.node_client, wanted):
        odd.append(f"this node's client {view.node_client}")
    if odd:
        yield Trouble(
            subject=view.name,
            key="expected",
            message=f"cluster {view.name}: expected {wanted}, found {', '.join(odd)}",
            advice="finish the upgrade, install client packages of the same release on the node, "
            "or correct expected_version of the cluster in the settings",
            evidence=evidence | {"expected": wanted},
        )


def _number(version: str) -> str:
    """``16.2.15`` from "ceph version 16.2.15 (...) pacific (stable)"; empty without a number."""
    found = _VERSION.search(version)
    return found[0] if found else ""


def _fits(actual: str, expected: str) -> bool:
    """Whether 18.2.4 is an 18.2 (or 18.2.4, or 18)."""
    return actual == expected or actual.startswith(expected + ".")


# -- ceph-feature-skew -------------------------------------------------------------------------


@cluster_rule(
    "ceph-feature-skew",
    Severity.WARNING,
    0.0,
    commands=("features", "osd get-require-min-compat-client"),
)
def feature_skew(scene: Scene, view: protocol.ClusterView) -> Iterator[Trouble]:
    """A client lacks features that the cluster or an image requires."""
    needed = _RELEASES.get(view.min_client)
    for group in view.features if needed is not None else ():
        have = _RELEASES.get(group.release)
        if group.kind == "client" and have is not None and needed is not None and have < needed:
            yield Trouble(
                subject=view.name,
                key=f"{group.release}-{group.features:x}",
                message=f"cluster {view.name} has {group.count} clients of {group.release}, but "
                f"requires {view.min_client}",
                advice="they cannot reconnect once they lose their session: find them ('ceph "
                "features', 'ceph tell mon.* sessions') and upgrade them first",
                evidence={"cluster": view.name, "features": hex(group.features)},
            )
    inventory = scene.inventory
    if inventory is None or not inventory.supported_features:
        return
    for device in scene.devices_in(view):
        assert device.image is not None
        image = view.image(*device.image.key)
        missing = image.features & ~inventory.supported_features if image else 0
        if device.client and missing:
            names = [_IMAGE_FEATURES[bit] if bit < len(_IMAGE_FEATURES) else str(bit)
                     for bit in range(64) if missing >> bit & 1]  # fmt: skip
            yield Trouble(
                subject=device.name,
                key=f"{missing:x}",
                device=device.name,
                message=f"{device.label} has features that kernel {inventory.kernel} lacks: "
                f"{', '.join(names)}",
                advice="its next map fails with ENXIO: disable them ('rbd feature disable'), or "
                "use rbd-nbd",
                evidence={
                    "missing": ", ".join(names),
                    "supported": hex(inventory.supported_features),
                },
            )


# -- clock-skew ---------------------------------------------------------------------------------


@rule("clock-skew", Severity.INFO, 60.0)
def clock_skew(scene: Scene) -> Outcome:
    """This node's clock is not synchronised."""
    if scene.clock is None:
        return Outcome(unknown="the kernel's clock state cannot be read")
    if scene.clock.synchronised:
        return Outcome()
    trouble = Trouble(
        subject="clock",
        key="unsynchronised",
        message="this node's clock is not synchronised (adjtimex)",
        advice="run chrony (with rtcsync), systemd-timesyncd or ntpd: Ceph refuses the tickets of "
        "a node whose clock is wrong",
        evidence={"max_error_seconds": f"{scene.clock.max_error_seconds:g}"},
    )
    return Outcome((trouble,))


# -- mtu-mismatch, messenger-mode --------------------------------------------------------------


@rule("mtu-mismatch", Severity.WARNING, 0.0)
def mtu_mismatch(scene: Scene) -> Outcome:
    """The network cannot carry packets of this node's size to a monitor."""
    if not scene.clusters:
        return Outcome(off=NO_CLUSTER)
    troubles = []
    by_cluster: dict[str, set[int]] = {}
    for path in scene.paths:
        by_cluster.setdefault(path.cluster, set()).add(path.interface_mtu)
        if path.path_mtu < min(path.interface_mtu, _LARGEST_PACKET):
            troubles.append(
                Trouble(
                    subject=path.cluster,
                    key=path.monitor,
                    message=f"the path to monitor {path.monitor} carries {path.path_mtu} bytes, "
                    f"interface {path.interface} sends up to {path.interface_mtu}",
                    advice="a switch or host on the path has a smaller MTU; if it drops large "
                    "packets silently, large reads hang while pings succeed. Check with 'ping -M "
                    f"do -s {path.interface_mtu - 28} {path.monitor}'",
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
                    message=f"the monitors of {cluster} are reached through interfaces with "
                    f"different MTUs: {', '.join(map(str, sorted(sizes)))}",
                    advice="one of the interfaces is configured differently: set one MTU",
                    evidence={"cluster": cluster},
                )
            )
    unknown = [
        f"cluster {name}: {_why_no_path(view)}"
        for name, view in scene.clusters.items()
        if name not in by_cluster
    ]
    return Outcome(tuple(troubles), unknown="; ".join(unknown))


def _why_no_path(view: protocol.ClusterView | str) -> str:
    if isinstance(view, str):
        return view
    if "mon dump" in view.denied:
        return protocol.refusal("mon dump")
    return "the kernel has no route to any of its monitors"


@cluster_rule("messenger-mode", Severity.WARNING, 0.0, commands=("mon dump",))
def messenger_mode(scene: Scene, view: protocol.ClusterView) -> Iterator[Trouble]:
    """A mapping uses a protocol that the cluster no longer offers."""
    if not (view.monitors_v1 or view.monitors_v2):
        return
    for device in scene.devices_in(view):
        if device.client is None:
            continue
        found = _MESSENGER_MODE.search(device.client.config)
        mode = found[1] if found else "legacy" if device.client.config else ""
        if mode == "legacy" and not view.monitors_v1:
            offer = "its monitors offer msgr2 only"
        elif mode not in ("", "legacy") and not view.monitors_v2:
            offer = "its monitors do not offer msgr2"
        else:
            continue
        yield Trouble(
            subject=device.name,
            key=mode,
            device=device.name,
            message=f"{device.label} is mapped with ms_mode={mode}, but {offer}",
            advice="the mapping works until its session ends and cannot reconnect then: map it "
            "again with an ms_mode that the monitors offer (mapOptions 'krbd:ms_mode=prefer-crc')",
            evidence={"cluster": view.name, "mode": mode},
        )
