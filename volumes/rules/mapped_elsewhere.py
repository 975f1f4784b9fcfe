"""mapped-elsewhere: the cluster sees another client writing an image that is mapped here."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.cluster import ClusterView, ImageView, Watcher
from volumes.inventory.model import Device, Inventory
from volumes.rules.base import Outcome, Rule, Scene, Trouble


def _mapped(scene: Scene, inventory: Inventory) -> dict[tuple[str, str, str, str], list[Device]]:
    """Image (cluster, pool, namespace, name) -> its devices on this node, snapshots left out."""
    found: dict[tuple[str, str, str, str], list[Device]] = {}
    for device in inventory.devices:
        view = scene.cluster_of(device)
        if view is None or device.image is None or device.image.snapshot:
            continue
        key = (view.name, device.image.pool, device.image.namespace, device.image.name)
        found.setdefault(key, []).append(device)
    return found


def others(devices: list[Device], image: ImageView) -> list[Watcher]:
    """Watchers that are not our own mappings.

    A kernel mapping knows its client. A driver that does not tell (rbd-nbd, rbd-fuse) is taken
    for one watcher of whichever client is left: of two watchers and one such mapping one is
    somebody else's, though not known which.
    """
    ours = {device.client.client for device in devices if device.client and device.client.client}
    left = [watcher for watcher in image.watchers if watcher.client not in ours]
    silent = sum(1 for d in devices if not (d.client and d.client.client) and not d.read_only)
    return left[silent:]


def _judge_view(scene: Scene, inventory: Inventory, view: ClusterView) -> Iterator[Trouble]:
    for (name, *key), devices in _mapped(scene, inventory).items():
        image = view.image(*key) if name == view.name else None
        if image is None or image.error:
            continue
        found = others(devices, image)
        if not found:
            continue
        writers = [device for device in devices if not device.read_only]
        ours = {device.client.client for device in devices if device.client}
        locks = [lock for lock in image.locks if lock.client not in ours]
        device = (writers or devices)[0]
        yield Trouble(
            subject=device.name,
            key=found[0].client,
            device=device.name,
            severity=Severity.CRITICAL if writers else Severity.WARNING,
            message=f"{device.label} is mapped {'read-write' if writers else 'read-only'} here, "
            f"and {found[0].client} at {found[0].address} has it open for writing",
            advice="two writers destroy a file system; find who runs there ('rbd status "
            f"{device.image.spec if device.image else ''}'), and take one of them down before "
            "anything is mounted. The exclusive lock does not keep a second writer out: it is "
            "handed over on request; 'mapOptions: krbd:exclusive' does",
            evidence={
                "cluster": name,
                "watchers": ", ".join(f"{w.client} {w.address}" for w in image.watchers[:8]),
                "locks": ", ".join(f"{k.client} {k.address}" for k in locks[:4])
                or "none by others",
                "note": "read-only users leave no watcher",
            },
        )


def _judge(scene: Scene) -> Outcome:
    if scene.inventory is None or scene.blind:
        return Outcome(unknown=scene.blind or "the node has not been looked at yet")
    if not scene.clusters:
        return Outcome(off="no cluster is set (volumes.audit.clusters)")
    troubles: list[Trouble] = []
    mapped = _mapped(scene, scene.inventory)
    unknown = [f"cluster {n}: {v}" for n, v in scene.clusters.items() if isinstance(v, str)]
    for view in scene.clusters.values():
        if isinstance(view, ClusterView):
            troubles += _judge_view(scene, scene.inventory, view)
            # Every cluster is asked for every image; only its own cluster must know it.
            unknown += [
                f"image {image.pool}/{image.name}: {image.error}"
                for image in view.images
                if image.error and (view.name, *image.key) in mapped
            ]
    return Outcome(tuple(troubles), unknown="; ".join(unknown))


RULE = Rule(
    name="mapped-elsewhere",
    summary="an image mapped here is open for writing by another client",
    severity=Severity.CRITICAL,
    patience=30.0,  # a volume that moves keeps its old watcher for up to 30 s
    judge=_judge,
)
