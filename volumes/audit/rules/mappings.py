"""Rules about mapped devices: mapped-unmounted, unmap-failing, mapped-twice, mapped-elsewhere,
blocklisted-client, read-only-claim.

Why: a mapping is a client of the cluster with its own cache and locks. Two writing clients of one
image destroy its file system, a mapping left behind is silently reused by the next attach, and a
blocklisted client's reads fail, which makes a full volume look empty.
"""

import ipaddress
from collections.abc import Iterator, Sequence

import kit.errors
from ceph import protocol
from linux import blockdev
from volumes.audit.inventory.model import Inventory, contents
from volumes.audit.rules import mounting
from volumes.audit.rules.base import NO_CLUSTER, NOT_SCANNED, Outcome, cluster_rule, node_rule, rule
from volumes.audit.types import LogHit, Scene, Severity, Trouble

MAPPED_UNMOUNTED = "mapped-unmounted"
MAPPED_ELSEWHERE = "mapped-elsewhere"
# kubelet retries after at most two minutes: an older line that names no device is over.
NAMELESS_SECONDS = 150.0

ByImage = dict[tuple[str, str, str], list[blockdev.BlockDevice]]  # by pool, namespace, name


# -- mapped-unmounted --------------------------------------------------------------------------


@node_rule(MAPPED_UNMOUNTED, Severity.WARNING, 300.0, records=True)
def mapped_unmounted(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A device stays mapped although nothing uses it."""
    if inventory.no_records:
        return  # the advice to unmap would be wrong for a volume that a pod is waiting for
    for device in inventory.devices:
        # A device with users is not idle (mkfs, fsck, a raw reader); unmap-failing names them.
        # kubelet leaves a loop device on a raw block volume behind when the end of its pod fails.
        users = inventory.users_on(device)
        if not is_idle(inventory, device) or any(user.owner.pid for user in users):
            continue
        loops = [user.owner.comm for user in users]
        volume = inventory.volume_of(device)
        record = (
            f"kubelet still has a record: {volume.staging}"
            if volume
            else "kubelet has no record of it"
        )
        yield Trouble(
            subject=device.name,
            device=device.name,
            key=f"{device.diskseq}",
            message=f"{device.label} is mapped, but not mounted and not used"
            + (f", except by loop device {kit.errors.some(loops)}" if loops else "")
            + f" ({record})",
            advice="".join(f"{mounting.detach(each)}. " for each in loops)
            + (
                "kubelet unmaps it once the volume's pod is gone; read kubelet's log for the volume"
                if volume
                else f"no pod will ask for it again: unmap it ('rbd unmap /dev/{device.name}'). "
                "The next attach of the image would silently reuse it. Of itself the agent unmaps "
                "only what is broken (volumes.repair)"
            ),
            evidence={
                "driver": device.driver,
                "size": str(device.size),
                "backing": device.backing,
                "record": record,
                "deep": str(inventory.deep).lower(),
            },
        )


def is_idle(inventory: Inventory, device: blockdev.BlockDevice) -> bool:
    """No mount in any namespace, no live file system, no device on top, no raw block use."""
    return not (
        inventory.on_host(device)
        or inventory.elsewhere(device)
        or device.active
        or device.stacked
        or inventory.raw.get(device.name)
    )


# -- unmap-failing -----------------------------------------------------------------------------


@node_rule("unmap-failing", Severity.WARNING, 0.0)
def unmap_failing(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A device cannot be unmapped."""
    seen = set()
    for device, hit in failing_unmaps(scene, inventory):
        subject = device.name if device else hit.image or hit.device or "unknown device"
        if subject in seen or (device is None and (hit.device or hit.image)):
            continue  # reported already, or unmapped since
        seen.add(subject)
        holders = []
        if device is not None:
            holders = [space.label for space, _ in inventory.elsewhere(device)]
            holders += [user.owner.label for user in inventory.users_on(device)]
            holders += [f"{above} on top of it" for above in device.stacked]
        yield Trouble(
            subject=subject,
            device=device.name if device else "",
            message=f"unmapping {device.label if device else subject} fails: {hit.text[:200]}",
            advice=f"held by: {kit.errors.some(holders)}"
            if holders
            else "no holder is visible: run 'nodeagent volume show "
            f"{device.path if device else 'DEVICE'}' and search for processes in state D; never "
            "force the unmap of a device that may still be written to",
            evidence={"log": hit.text[:500], "source": hit.source, "times": str(hit.count)},
        )


def failing_unmaps(
    scene: Scene, inventory: Inventory
) -> list[tuple[blockdev.BlockDevice | None, LogHit]]:
    """Unmaps that still fail: not of devices that a pod has again, nor old nameless ones."""
    found = [(_device_of(inventory, h), h) for h in scene.logs if h.hint == "unmap-failed"]
    return [
        (device, hit)
        for device, hit in found
        if (device is None or not mounting.is_published(inventory, device))
        and (hit.device or hit.image or scene.now - hit.last < NAMELESS_SECONDS)
    ]


def _device_of(inventory: Inventory, hit: LogHit) -> blockdev.BlockDevice | None:
    """The device by name or by image; for a line without a name the only leaked device."""
    for device in inventory.devices:
        spec = device.image.spec if device.image else ""
        if device.name == hit.device or (hit.image and hit.image == spec):
            return device
    if hit.device or hit.image:
        return None
    leaked = [d for d in inventory.devices if mounting.is_leaked(inventory, d)]
    return leaked[0] if len(leaked) == 1 else None


# -- mapped-twice ------------------------------------------------------------------------------


@node_rule("mapped-twice", Severity.CRITICAL, 2.0)
def mapped_twice(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """One image is mapped more than once on this node."""
    groups: dict[str, list[blockdev.BlockDevice]] = {}
    for device in (*inventory.devices, *inventory.related):
        for content in contents(device):
            groups.setdefault(content, []).append(device)
    distinct = {tuple(d.name for d in devices): content for content, devices in groups.items()}
    for content in distinct.values():
        devices = groups[content]
        writers = [device for device in devices if not device.read_only]
        if len(devices) < 2 or not writers or not inventory.device(devices[0].name):
            continue
        names = ", ".join(device.name for device in devices)
        what = devices[0].image.spec if devices[0].image else devices[0].backing
        yield Trouble(
            subject=devices[0].name,
            key="+".join(device.name for device in devices[:8]),
            device=(writers[0] if inventory.device(writers[0].name) else devices[0]).name,
            severity=Severity.CRITICAL if len(writers) > 1 else Severity.WARNING,
            message=f"{what} is mapped {len(devices)} times on this node ({names}); "
            f"{len(writers)} of the mappings can write",
            advice="the kernel protects a mounted device only against writes through the same "
            "mapping: mkfs or a second mount through another mapping destroys the file system. "
            f"Keep the mapping in use. {_leave(inventory, devices)}",
            evidence={"thing": content, "devices": names, "writers": str(len(writers))},
        )


def _leave(inventory: Inventory, devices: Sequence[blockdev.BlockDevice]) -> str:
    """How each of the mappings goes. Behind kubelet's back none does that it has a record of."""
    if inventory.no_records:
        return f"{inventory.no_records}: unmap nothing before its records can be read"
    return "; ".join(
        f"{each.name}: end its pod, kubelet unmaps it"
        if inventory.volume_of(each)
        else f"{each.name}: kubelet has no record of it, unmap it without force"
        for each in devices
    )


# -- mapped-elsewhere --------------------------------------------------------------------------


# A volume that moves to this node keeps its old watcher for up to 30 s.
@rule(MAPPED_ELSEWHERE, Severity.CRITICAL, 30.0)
def mapped_elsewhere(scene: Scene) -> Outcome:
    """Another client has an image open for writing that is mapped here."""
    if scene.inventory is None or scene.blind:
        return Outcome(unknown=scene.blind or NOT_SCANNED)
    if not scene.clusters:
        return Outcome(off=NO_CLUSTER)
    troubles: list[Trouble] = []
    unknown = scene.silent
    for view in scene.answering.values():
        mapped = _by_image(scene, view)
        troubles += _other_writers(mapped, view, scene.inventory)
        # Every cluster is asked about every image; only the image's own cluster must have it.
        unknown += [
            f"image {image.pool}/{image.name}: {image.error}"
            for image in view.images
            if image.error and image.key in mapped
        ]
    return Outcome(tuple(troubles), unknown="; ".join(unknown))


def _by_image(scene: Scene, view: protocol.ClusterView) -> ByImage:
    """The cluster's images that are mapped here with their devices, snapshots left out."""
    found: ByImage = {}
    for device in scene.devices_in(view):
        image = device.image
        if image is not None and not image.snapshot:
            found.setdefault(image.key, []).append(device)
    return found


def _other_watchers(
    devices: list[blockdev.BlockDevice], image: protocol.ImageView
) -> list[protocol.Watcher]:
    """Watchers that are not this node's mappings of the image.

    A kernel mapping shows its client. rbd-nbd and rbd-fuse do not: each is assumed to be one of the
    remaining watchers. With two watchers and one such mapping, one watcher is another node's,
    though it is not known which.
    """
    ours = {device.client.client for device in devices if device.client and device.client.client}
    left = [watcher for watcher in image.watchers if watcher.client not in ours]
    silent = sum(1 for d in devices if not (d.client and d.client.client) and not d.read_only)
    return left[silent:]


def _other_writers(
    mapped: ByImage, view: protocol.ClusterView, inventory: Inventory
) -> Iterator[Trouble]:
    for key, devices in mapped.items():
        image = view.image(*key)
        if image is None or image.error:
            continue
        if image.migrating:
            continue  # librbd copies it, and watches it meanwhile
        # A mapping that volumes.audit.names leaves out is a watcher of this node, too.
        content = set(contents(devices[0]))
        here = devices + [each for each in inventory.related if content & set(contents(each))]
        # rbd-mirror watches a mirrored image; which of the watchers it is, nobody says.
        found = _other_watchers(here, image)[int(image.mirrored) :]
        if not found or all(inventory.raw.get(device.name) for device in devices):
            continue  # a raw block volume may have users on many nodes (RWX, a VM that moves)
        writers = [device for device in devices if not device.read_only]
        ours = {device.client.client for device in here if device.client}
        locks = [lock for lock in image.locks if lock.client not in ours]
        device = (writers or devices)[0]
        yield Trouble(
            subject=device.name,
            key=found[0].client,
            device=device.name,
            severity=Severity.CRITICAL if writers else Severity.WARNING,
            message=f"{device.label} is mapped {'read-write' if writers else 'read-only'} here, "
            f"and {found[0].client} at {found[0].address} has it open for writing",
            advice="two writers destroy a file system: find the other client ('rbd status "
            f"{device.image.spec if device.image else ''}') and what it does before anything is "
            "mounted. The exclusive lock does not prevent a second writer, because "
            "its owner hands it over on request; 'mapOptions: krbd:exclusive' does",
            evidence={
                "cluster": view.name,
                "watchers": ", ".join(f"{w.client} {w.address}" for w in image.watchers[:8]),
                "locks": ", ".join(f"{k.client} {k.address}" for k in locks[:4])
                or "none by others",
                "note": "read-only users leave no watcher",
            },
        )


# -- blocklisted-client ------------------------------------------------------------------------


@cluster_rule(
    "blocklisted-client", Severity.CRITICAL, 0.0, commands=("osd blocklist ls", "osd blacklist ls")
)
def blocklisted_client(scene: Scene, view: protocol.ClusterView) -> Iterator[Trouble]:
    """The cluster refuses the I/O of a mapping on this node."""
    for device in scene.devices_in(view):
        address = _address(scene, view, device)
        hit = next((e for e in view.blocklist if address and is_listed(address, e)), None)
        if hit is None:
            continue
        yield Trouble(
            subject=device.name,
            key=hit,
            device=device.name,
            message=f"the Ceph client of {device.label} is blocklisted ({hit}): its I/O fails",
            advice="another client broke its lock, most likely while this node was cut off. Do not "
            "remove the entry: end the pods of this client's volumes, let the kubelet unmount and "
            "unmap them, and let them be attached again. A failed read looks like an empty volume "
            "to blkid, so format nothing now",
            evidence={"cluster": view.name, "entry": hit},
        )


def _address(scene: Scene, view: protocol.ClusterView, device: blockdev.BlockDevice) -> str:
    """The address of the device's Ceph client; for silent drivers that of its last only watcher."""
    if device.client and device.client.address:
        return device.client.address
    return scene.watched_by.get((view.name, *device.image.key), "") if device.image else ""


def is_listed(address: str, entry: str) -> bool:
    """Whether a blocklist entry is about the address.

    Entries are ip:port/nonce. With port 0 and nonce 0 an entry is about all clients of the ip; a
    range is cidr:ip:port/bits.
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
        return False  # a host name, which nobody resolves here


# -- read-only-claim ---------------------------------------------------------------------------


@node_rule("read-only-claim", Severity.INFO, 30.0, records=True)
def read_only_claim(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A volume that is only read is mapped read-write."""
    for device in inventory.devices:
        places = inventory.on_host(device)
        if device.read_only or not places:
            continue
        if not all(place.read_only or place.super_read_only for place in places):
            continue
        yield Trouble(
            subject=device.name,
            device=device.name,
            message=f"{device.label} is mapped read-write although its mounts are read-only",
            advice="map it read-only ('rbd map --read-only'; PV accessModes [ReadOnlyMany] with "
            "readOnly: true) and use a key with 'profile rbd-read-only': nothing on this node can "
            "format it then",
            evidence={"targets": ", ".join(place.target for place in places[:4])},
        )
