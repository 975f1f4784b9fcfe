"""blocklisted-client: the cluster refuses a client of this node; its reads fail with -108."""

import ipaddress
from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.cluster import ClusterView
from volumes.rules.base import Rule, Scene, Trouble, needs_clusters


def _matches(address: str, entry: str) -> bool:
    """Entries are ip:port/nonce; port 0 stands for all of the ip's, nonce 0 for all its clients.
    Ranges are cidr:ip:port/bits.
    """
    entry, address = (
        text.split(":", 1)[1] if text[:3] in ("v1:", "v2:") else text for text in (entry, address)
    )
    if entry.startswith("cidr:"):
        return _in_range(address, entry.removeprefix("cidr:"))
    if entry == address:
        return True
    where, _, nonce = entry.rpartition("/")
    return (
        nonce == "0"
        and where.rpartition(":")[2] == "0"
        and (where.rpartition(":")[0] == address.rpartition("/")[0].rpartition(":")[0])
    )


def _in_range(address: str, entry: str) -> bool:
    where, _, bits = entry.rpartition("/")
    ip, network = (
        text.rpartition(":")[0].strip("[]") for text in (address.rpartition("/")[0], where)
    )
    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(f"{network}/{bits}", strict=False)
    except ValueError:
        return False  # no address: a name that nobody resolves here


def _judge(scene: Scene, view: ClusterView) -> Iterator[Trouble]:
    if scene.inventory is None:
        return
    for device in scene.inventory.devices:
        address = device.client.address if device.client else ""
        owner = scene.cluster_of(device)
        if owner is None or owner.name != view.name:
            continue
        addresses = [address] if address else []
        if not addresses and device.image is not None:
            image = device.image
            known = scene.watched_by.get((view.name, image.pool, image.namespace, image.name))
            addresses = [known] if known else []
        hit = next((e for e in view.blocklist for a in addresses if _matches(a, e)), None)
        if hit is None:
            continue
        yield Trouble(
            subject=device.name,
            key=hit,
            device=device.name,
            message=f"the Ceph client of {device.label} is blocklisted ({hit}): its I/O fails",
            advice="another client broke its lock, most likely while this node was cut off. Do not "
            "remove the entry: stop the pod, unmount and unmap, and let the volume be attached "
            "anew. A failed read looks like an empty volume to blkid: nothing may be formatted now",
            evidence={"cluster": view.name, "entry": hit},
        )


RULE = Rule(
    name="blocklisted-client",
    summary="the cluster refuses the I/O of a mapping on this node",
    severity=Severity.CRITICAL,
    patience=0.0,
    judge=needs_clusters(_judge, "osd blocklist ls", "osd blacklist ls"),
)
