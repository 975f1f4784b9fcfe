"""ceph-version-skew and ceph-feature-skew: clients and cluster that do not fit together."""

import re
from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.cluster import ClusterView
from volumes.rules.base import Rule, Scene, Trouble, needs_clusters

# Ceph's order of releases, for comparing names; the number is the major version.
RELEASES = {
    "firefly": 0,
    "hammer": 0,
    "infernalis": 9,
    "jewel": 10,
    "kraken": 11,
    "luminous": 12,
    "mimic": 13,
    "nautilus": 14,
    "octopus": 15,
    "pacific": 16,
    "quincy": 17,
    "reef": 18,
    "squid": 19,
    "tentacle": 20,
}
MOST_APART = 2
_NUMBER = re.compile(r"(\d+)\.(\d+)\.(\d+)")
# https://docs.ceph.com, rbd features; what /sys/bus/rbd/supported_features speaks of
FEATURES = {
    0: "layering",
    1: "striping",
    2: "exclusive-lock",
    3: "object-map",
    4: "fast-diff",
    5: "deep-flatten",
    6: "journaling",
    7: "data-pool",
    8: "operations",
    9: "migrating",
}


def number(version: str) -> str:
    """``16.2.15`` from "ceph version 16.2.15 (...) pacific (stable)"; empty when there is none."""
    found = _NUMBER.search(version)
    return found[0] if found else ""


def fits(actual: str, expected: str) -> bool:
    """Whether 18.2.4 is an 18.2 (or 18.2.4, or 18)."""
    return actual == expected or actual.startswith(expected + ".")


def _versions(scene: Scene, view: ClusterView) -> Iterator[Trouble]:
    wanted = next(
        (c.expected_version for c in scene.settings.clusters if c.name == view.name), None
    )
    daemons: dict[str, list[str]] = {}
    for entry in view.versions:
        daemons.setdefault(number(entry.version), []).append(f"{entry.count} {entry.kind}")
    evidence = {
        "cluster": view.name,
        "daemons": "; ".join(f"{v}: {', '.join(who)}" for v, who in sorted(daemons.items())),
        "node_client": view.node_client,
        "kernel": scene.inventory.kernel if scene.inventory else "",
    }
    if wanted is not None:
        odd = [v for v in daemons if v and not fits(v, wanted)]
        if view.node_client and not fits(view.node_client, wanted):
            odd.append(f"this node's client {view.node_client}")
        if odd:
            yield Trouble(
                subject=view.name,
                key="expected",
                message=f"cluster {view.name}: expected {wanted}, found {', '.join(odd)}",
                advice="finish the upgrade, install the same release's client packages on the "
                "node, or correct volumes.audit.clusters.expected_version",
                evidence=evidence | {"expected": wanted},
            )
        return
    if len(daemons) > 1:
        yield Trouble(
            subject=view.name,
            key="mixed",
            severity=Severity.INFO,
            message=f"cluster {view.name} runs {len(daemons)} versions: "
            + ", ".join(sorted(daemons)),
            advice="normal during an upgrade; finish it before clients are changed",
            evidence=evidence,
        )
    majors = [int(v.split(".")[0]) for v in daemons if v]
    if view.node_client and majors:
        own = int(view.node_client.split(".")[0])
        if max(abs(own - major) for major in majors) > MOST_APART:
            yield Trouble(
                subject=view.name,
                key="apart",
                message=f"this node's Ceph client {view.node_client} and cluster {view.name} "
                f"({', '.join(sorted(daemons))}) are more than {MOST_APART} releases apart",
                advice="install client packages of a release near the cluster's; that pair is "
                "not tested by anyone",
                evidence=evidence,
            )


def _features(scene: Scene, view: ClusterView) -> Iterator[Trouble]:
    needed = RELEASES.get(view.min_client)
    if needed is not None:
        for group in view.features:
            have = RELEASES.get(group.release)
            if group.kind == "client" and have is not None and have < needed:
                yield Trouble(
                    subject=view.name,
                    key=f"{group.release}-{group.features:x}",
                    message=f"cluster {view.name} has {group.count} clients of {group.release}, "
                    f"but requires {view.min_client}",
                    advice="these cannot connect again once they lose their session: find them "
                    "('ceph features', 'ceph tell mon.* sessions') and upgrade them first",
                    evidence={"cluster": view.name, "features": hex(group.features)},
                )
    inventory = scene.inventory
    if inventory is None or not inventory.supported_features:
        return
    for device in inventory.devices:
        owner = scene.cluster_of(device)
        if owner is None or owner.name != view.name:
            continue
        image = device.image and view.image(
            device.image.pool, device.image.namespace, device.image.name
        )
        missing = image.features & ~inventory.supported_features if image else 0
        if image and device.client and missing:
            names = [FEATURES.get(bit, str(bit)) for bit in range(64) if missing >> bit & 1]
            yield Trouble(
                subject=device.name,
                key=f"{missing:x}",
                device=device.name,
                message=f"{device.label} has features that kernel {inventory.kernel} lacks: "
                f"{', '.join(names)}",
                advice="the next map of it fails with ENXIO: 'rbd feature disable', or use rbd-nbd",
                evidence={
                    "missing": ", ".join(names),
                    "supported": hex(inventory.supported_features),
                },
            )


VERSIONS = Rule(
    name="ceph-version-skew",
    summary="versions of the cluster and of this node's client do not fit",
    severity=Severity.WARNING,
    patience=0.0,
    judge=needs_clusters(_versions, "versions"),
)
FEATURE = Rule(
    name="ceph-feature-skew",
    summary="a client lacks features that the cluster or an image requires",
    severity=Severity.WARNING,
    patience=0.0,
    judge=needs_clusters(_features, "features", "osd get-require-min-compat-client"),
)
