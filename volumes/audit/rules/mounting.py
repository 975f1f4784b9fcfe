"""Rules about mounts: leaked-mount, busy-mount, staged-unused, two-claims-one-device,
claim-device-gone, file-system-errors, private-propagation, host-mount-options.

Why: a device can be released only after its last mount is gone, in every mount namespace. A
container that copied the host's mounts privately never receives the host's unmount, so it keeps the
device in use while the host no longer shows it. The kernel then refuses to unmap the device, and
another node may attach the image at the same time.

How: "in use" is a live superblock in sysfs (``BlockDevice.live``) or a mount in another namespace
(``Inventory.elsewhere``). What the host itself has mounted is never leaked. The holder is a mount
namespace (``copies``) or, where no mount explains the use, a process with open files.
"""

import fnmatch
from collections.abc import Iterator

from linux import blockdev
from volumes.audit.inventory.model import Inventory, Owner, Place, Space, User, Volume
from volumes.audit.rules.base import node_rule
from volumes.audit.types import Scene, Severity, Trouble

LEAKED_MOUNT = "leaked-mount"
# Writing back during an unmount looks like this: a live file system without any holder.
UNEXPLAINED_SECONDS = 60.0
MOST_PER_DEVICE = 20
# Where kubelet and CSI drivers mount volumes: a mount at such a path is a copy of the host's mount.
_HOST_PATHS = ("/kubernetes.io/csi/", "/volumes/kubernetes.io~")


# -- leaked-mount ------------------------------------------------------------------------------


# Container runtimes pass through such a state for moments.
@node_rule(LEAKED_MOUNT, Severity.CRITICAL, 1.5, namespaces=True)
def leaked_mount(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A device is in use, but the host no longer has it mounted."""
    for device in inventory.devices:
        if not is_leaked(inventory, device):
            continue
        former = scene.former.get(device.name, frozenset())
        found = list(_leaked_copies(inventory, device, former)) or list(
            _leaked_users(inventory, device)
        )
        yield from found
        if not found:
            yield Trouble(
                subject=device.name,
                key="nobody",
                device=device.name,
                severity=Severity.WARNING,
                patience=UNEXPLAINED_SECONDS,
                message=f"{device.label} is not mounted anywhere, but its {device.active[0]} file "
                "system is still live and no holder is visible",
                advice="possible causes: data is still being written back; a process hangs in an "
                "unmount; the kernel does not list the holder (a file in flight over a socket, "
                "io_uring, swap). Search for processes in state D: 'ps -eo pid,stat,wchan:30,cmd'",
                evidence={"kind": "unknown", "file_systems": ", ".join(device.active)},
            )


def is_leaked(inventory: Inventory, device: blockdev.BlockDevice) -> bool:
    """Whether the device or a layer of it is in use although the host does not have it mounted."""
    return bool(device.live - on_host(inventory, device) or copies(inventory, device))


def on_host(inventory: Inventory, device: blockdev.BlockDevice) -> set[blockdev.Number]:
    """Which numbers of the device the host has mounted."""
    return {place.device for place in inventory.on_host(device)}


def copies(inventory: Inventory, device: blockdev.BlockDevice) -> list[tuple[Space, Place]]:
    """Mounts in other namespaces of what the host does not have mounted."""
    at_home = on_host(inventory, device)
    return [each for each in inventory.elsewhere(device) if each[1].device not in at_home]


def _leaked_copies(
    inventory: Inventory, device: blockdev.BlockDevice, former: frozenset[str]
) -> Iterator[Trouble]:
    spaces: dict[int, tuple[Space, list[Place]]] = {}
    for space, place in copies(inventory, device):
        spaces.setdefault(space.inode, (space, []))[1].append(place)
    for space, places in list(spaces.values())[:MOST_PER_DEVICE]:
        owner = space.owner
        refusal = why_not_detach(inventory, device, space, places, former)
        yield Trouble(
            subject=device.name,
            key=f"mnt-{space.inode}",
            device=device.name,
            pid=owner.pid if owner else 0,
            message=f"{device.label} is not mounted on the host, but {space.label} still has it "
            f"mounted at {places[0].target}",
            advice=_leak_advice(space, places, device, refusal),
            evidence={
                "kind": "mount",
                "namespace": str(space.inode),
                "namespace_id": str(space.id),
                "processes": str(space.processes),
                "targets": ", ".join(place.target for place in places[:8]),
                "propagation": places[0].propagation,
                "on": ", ".join(sorted({device.name_of(place.device) for place in places})),
                "read_only": str(all(p.read_only or p.super_read_only for p in places)).lower(),
                "kept_by": "; ".join(space.kept_by),
                "size": str(device.size),
                **(_owner_evidence(owner) if owner else {}),
            },
        )


def _leak_advice(
    space: Space, places: list[Place], device: blockdev.BlockDevice, refusal: str
) -> str:
    if any(not place.is_private for place in places):
        return (
            "these mounts follow another namespace: find the mounts they come from, or end "
            f"{space.label}"
        )
    if refusal:
        return (
            f"{refusal}. The host mount is gone, so the device can no longer be unmapped or moved "
            f"safely: end {space.label} (delete its pod); kubelet then mounts the volume again"
        )
    targets = " ".join(place.target for place in places[:4])
    cause = (
        "it copied the host's mounts with private propagation, so it did not receive the host's "
        "unmount"
    )
    # The finding's id is made by volumes.audit.finding_state.identity.
    act = f"'nodeagent volume act {LEAKED_MOUNT}/{device.name}/mnt-{space.inode} --yes'"
    owner = space.owner
    if owner is not None:
        way = f"/proc/{owner.pid}/task/{owner.thread}" if owner.thread else f"/proc/{owner.pid}"
        return (
            f"{cause}. Free the device now (the process keeps running): {act}. Without the agent, "
            "if that container has the program: "
            f"'nsenter --mount={way}/ns/mnt umount -l {targets}'. Permanent fix: give that "
            "container 'mountPropagation: HostToContainer' (docker: rslave) and restart it. Do not "
            f"use the content of {device.name} elsewhere until then"
        )
    keeper = space.kept_by[0] if space.kept_by else "a file descriptor that no process list shows"
    return (
        f"{cause}. No process is in the namespace; {keeper} keeps it: unmount or close that, or "
        f"free the device with {act}"
    )


def why_not_detach(
    inventory: Inventory,
    device: blockdev.BlockDevice,
    space: Space,
    places: list[Place],
    former: frozenset[str],
) -> str:
    """Why the agent must not unmount ``places`` of ``space``; empty when it may.

    ``former`` is where the host had the device. The finding's advice and the action use this one
    decision, so the advice never recommends what the action refuses.
    """
    if any(not place.is_private for place in places):
        return "it is not a private copy: an unmount there would reach other namespaces"
    volume = inventory.volume_of(device)
    pods = {owner.pod_uid for owner in space.owners if owner.pod_uid}
    for publish in volume.publishes if volume is not None else ():
        if publish.pod_uid in pods:
            return f"pod {publish.pod_uid} still owns the volume"
    for place in places:
        if not _is_copy(place.target, former):
            return (
                f"{place.target} is not a copy of a host mount: that container works with it; end "
                "the container instead"
            )
    return ""


def _is_copy(target: str, former: frozenset[str]) -> bool:
    if any(path in target for path in _HOST_PATHS):
        return True
    return any(target == path or target.endswith(path) for path in former)


def _owner_evidence(owner: Owner) -> dict[str, str]:
    known = {
        "cgroup": owner.cgroup,
        "comm": owner.comm,
        "container": owner.container,
        "pod_uid": owner.pod_uid,
        "pod": owner.pod,
        "thread": str(owner.thread) if owner.thread else "",
        "process_started": str(owner.started) if owner.pid else "",
    }
    return {name: value for name, value in known.items() if value}


def _leaked_users(inventory: Inventory, device: blockdev.BlockDevice) -> Iterator[Trouble]:
    at_home = on_host(inventory, device)
    users = [user for user in inventory.users_on(device) if user.device not in at_home]
    for user in users[:MOST_PER_DEVICE]:
        yield _user_trouble(
            device,
            user,
            f"{device.label} is not mounted anywhere, but {user.owner.label} keeps its file "
            f"system in use ({', '.join(user.ways)})",
            "a lazy unmount (umount -l) or the end of a container left it behind: end or restart "
            f"{user.owner.label}, or make it close these files; nothing else frees the device",
        )


def detach(loop: str) -> str:
    """The advice about a loop device."""
    return f"when nothing uses /dev/{loop} any more, detach it: 'losetup -d /dev/{loop}'"


def _user_trouble(device: blockdev.BlockDevice, user: User, message: str, advice: str) -> Trouble:
    return Trouble(
        subject=device.name,
        key=f"pid-{user.owner.pid}-{user.owner.started}" if user.owner.pid else user.owner.comm,
        device=device.name,
        pid=user.owner.pid,
        message=message,
        advice=advice if user.owner.pid else detach(user.owner.comm),
        evidence={
            "kind": "open",
            "uses": ", ".join(user.ways),
            "namespace": str(user.namespace),
            **_owner_evidence(user.owner),
        },
    )


# -- busy-mount --------------------------------------------------------------------------------


@node_rule("busy-mount", Severity.WARNING, 2.0, records=True)
def busy_mount(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A process has files open on a volume that should be unmounted."""
    for device in busy_suspects(scene, inventory):
        volume = inventory.volume_of(device)
        where = inventory.on_host(device)[0].target
        state = "not published to any pod" if _left_over(inventory, device) else "to be unmounted"
        for user in inventory.users_on(device)[:MOST_PER_DEVICE]:
            yield _user_trouble(
                device,
                user,
                f"{device.label} at {where} is {state}, but {user.owner.label} keeps it busy "
                f"({', '.join(user.ways)})",
                f"make {user.owner.label} leave it (change its working directory, close its files) "
                "or restart it; kubelet's next attempt to unmount then succeeds. An agent that "
                "reads kubelet's directory should not keep files open there"
                + (f". Volume {volume.name or volume.handle}" if volume else ""),
            )


def busy_suspects(scene: Scene, inventory: Inventory) -> list[blockdev.BlockDevice]:
    """Devices whose users would explain why an unmount does not happen."""
    named = {hit.device for hit in scene.logs if hit.hint == "busy"}
    return [
        device
        for device in inventory.devices
        if inventory.on_host(device)
        and not is_published(inventory, device)
        and (_left_over(inventory, device) or device.name in named)
    ]


def is_published(inventory: Inventory, device: blockdev.BlockDevice) -> bool:
    """Whether a pod has the volume mounted: then an earlier failure to unmount it is over."""
    volume = inventory.volume_of(device)
    return volume is not None and any(publish.mounted for publish in volume.publishes)


def _left_over(inventory: Inventory, device: blockdev.BlockDevice) -> Volume | None:
    """The device's volume if it is staged, mounted nowhere else on the host, and in no pod."""
    volume = inventory.volume_of(device)
    if volume is None or not volume.mounts or not inventory.on_host(device):
        return None
    if is_published(inventory, device):
        return None
    at = {place.target for place in inventory.on_host(device)}
    return volume if at <= set(volume.mounts) else None


# -- staged-unused -----------------------------------------------------------------------------


# kubelet unstages a volume within minutes of its last pod's end.
@node_rule("staged-unused", Severity.WARNING, 600.0, records=True)
def staged_unused(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A volume is mounted for kubelet, but no pod has it."""
    for volume in forgotten(inventory):
        device = inventory.device(volume.device)
        label = device.label if device else volume.device
        gone = volume.handle in scene.detached
        at = ", ".join(volume.mounts[:4])
        yield Trouble(
            subject=volume.device,
            key=volume.staging,
            device=volume.device,
            severity=Severity.CRITICAL if gone else None,
            patience=0.0 if gone else None,
            message=f"{label} is mounted at {at}, but no pod of this node has it"
            + (", and its VolumeAttachment is gone: another node may write to it" if gone else ""),
            advice="a kubelet that was restarted may have forgotten it, and then never unmounts "
            f"it. Make sure that no pod on this node starts with it; then unmount {at} and unmap "
            f"{volume.device} without force. Until then start no pod with it on another node",
            evidence={
                "staging": volume.staging,
                "volume": volume.handle,
                "driver": volume.driver,
                "attachment": "gone" if gone else "there, or not known",
            },
        )


def forgotten(inventory: Inventory) -> list[Volume]:
    """Staged volumes of watched devices that are in no pod, nor asked for by one. Without a handle
    nobody knows whose they are."""
    found = (v for v in inventory.volumes if v.mounts and v.handle and not v.publishes)
    return [] if inventory.no_records else [each for each in found if each.device]


# -- two-claims-one-device, claim-device-gone: of every CSI driver -----------------------------


# Mount table, records and devices are read one after the other: two looks must agree.
@node_rule("two-claims-one-device", Severity.CRITICAL, 5.0, records=True)
def two_claims_one_device(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """Two volumes of Kubernetes are on one disk. Who only reads it mixes nothing."""
    disks: dict[str, dict[tuple[str, str], Volume]] = {}
    for volume in inventory.volumes:
        if volume.handle and scene.settings.watches(volume.on):
            for disk in sorted(volume.disks):  # of multipath each path
                disks.setdefault(disk, {}).setdefault((volume.driver, volume.handle), volume)
    distinct = {frozenset(disks[disk]): (disk, disks[disk]) for disk in sorted(disks, reverse=True)}
    for claims, (disk, volumes) in distinct.items():
        if any(claims < others for others in distinct):
            continue  # another path shows more of them
        if len(volumes) < 2 or all(volume.read_only for volume in volumes.values()):
            continue
        first = min(volumes.values(), key=lambda volume: volume.on)
        names = ", ".join(sorted({volume.on for volume in volumes.values()}))
        yield Trouble(
            subject=first.on,
            key="+".join("/".join(each) for each in sorted(volumes)[:4]),
            device=first.device or first.on,
            message=f"{len(volumes)} volumes are on one disk ({names}): "
            + "; ".join(_claimed(volume) for volume in list(volumes.values())[:4]),
            advice="one volume's data overwrites the other's. Either the CSI driver took the wrong "
            "disk (a stale link in /dev/disk, a name that another disk has now), or two "
            "PersistentVolumes name one volume. End the pods of all of them at once and delete no "
            "claim. Find out from the storage whose disk it is, check that volume with fsck or "
            "restore it, and tell the driver's maintainers",
            evidence={"disk": disk, **_claim_evidence(*volumes.values())},
        )


# The mount table is read a moment before the kernel's devices, and an unmount may come between.
@node_rule("claim-device-gone", Severity.CRITICAL, 5.0, records=True)
def claim_device_gone(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A volume is mounted or published, and its device is no longer there."""
    gone = {
        f"{volume.driver}/{volume.handle or volume.staging}": volume
        for volume in reversed(inventory.volumes)
        if volume.gone and scene.settings.watches(volume.on)
    }
    for key, volume in gone.items():
        yield Trouble(
            subject=volume.on,
            key=key,
            device=volume.device or volume.on,
            message=f"{_claimed(volume)} lost its device {volume.on}: {volume.gone}",
            advice="somebody detached or unplugged the disk, or the storage lost it. What was not "
            "written yet is lost, and the mount never recovers, even if the disk comes back. End "
            "the volume's pods so that kubelet unmounts it, attach the disk again, and check its "
            "file system before the next mount",
            evidence=_claim_evidence(volume),
        )


def _claimed(volume: Volume) -> str:
    pods = ", ".join(sorted({each.pod_uid for each in volume.publishes}))
    who = f"PersistentVolume {volume.name}, " if volume.name else ""
    left = "no pod has it: if none starts, unmount it"
    return f"{who}volume {volume.handle} ({f'pod {pods}' if pods else left}) at " + ", ".join(
        volume.places[:2]
    )


def _claim_evidence(*volumes: Volume) -> dict[str, str]:
    pods = {publish.pod_uid for volume in volumes for publish in volume.publishes}
    return {
        "volume": ", ".join(volume.handle for volume in volumes[:4]),
        "claim": ", ".join(volume.name for volume in volumes[:4] if volume.name),
        "driver": ", ".join(sorted({volume.driver for volume in volumes})),
        "pods": ", ".join(sorted(pods)[:8]),
        "targets": ", ".join(place for volume in volumes[:4] for place in volume.places[:4]),
    }


# -- file-system-errors ------------------------------------------------------------------------

# Others are read-only by their nature.
_WRITABLE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs")
# What ext4 says of itself since Linux 6.15. Of other kernels and file systems the super block is
# read-only under a mount that is not, or the errors are counted.
_STOPPED = ("emergency_ro", "shutdown")


# A remount looks like it for a moment.
@node_rule("file-system-errors", Severity.CRITICAL, 2.0)
def file_system_errors(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """The file system of a volume has stopped writing, or has counted errors."""
    for device in inventory.devices:
        places: dict[blockdev.Number, list[Place]] = {}
        for place in inventory.on_host(device):
            places.setdefault(place.device, []).append(place)
        volume = inventory.volume_of(device)
        for number, mounted in places.items():
            # ceph-csi's remount for a pod clears the 'ro' of a ReadOnlyMany there.
            staged = [p for p in mounted if volume is not None and p.target in volume.mounts]
            read_only = device.read_only or any(p.read_only for p in staged or mounted)
            on = device.name_of(number)
            errors = inventory.fs_errors.get(on)
            stopped = _stopped(mounted, read_only)
            if errors is not None:
                stops = errors.stops and not read_only
                counted = f"it counted {errors.count} error{'s' if errors.count > 1 else ''}"
                stopped = stopped or (f"{counted} and stops at the first" if stops else "")
            elif not stopped:
                continue
            yield Trouble(
                subject=device.name,
                key=on,
                device=device.name,
                severity=Severity.CRITICAL if stopped else Severity.WARNING,
                message=f"the {mounted[0].fstype} of {device.label} at {mounted[0].target} "
                + (f"takes no writes any more: {stopped}" if stopped else f"is damaged: {counted}"),
                advice="no line of the log repeats it, and it does not heal while it is mounted: "
                "find the device's I/O errors in the kernel's log, end the volume's pods, take a "
                "snapshot, and have it checked by fsck before it is mounted again",
                evidence={
                    "on": on,
                    "targets": ", ".join(place.target for place in mounted[:8]),
                    "options": ",".join(mounted[0].super_options),
                    **(
                        {"errors": str(errors.count), "last": f"{errors.last:.0f}"}
                        if errors
                        else {}
                    ),
                },
            )


def _stopped(places: list[Place], read_only: bool) -> str:
    """How the mount table shows it; empty when it does not, or somebody wanted it ``read_only``."""
    for place in places:
        words = [word for word in _STOPPED if word in place.super_options]
        if words:
            return words[0]
    if places[0].fstype in _WRITABLE and places[0].super_read_only and not read_only:
        return "it is read-only, and the mount is not"
    return ""


# -- private-propagation -----------------------------------------------------------------------


# Container runtimes use private mounts while a container starts.
@node_rule("private-propagation", Severity.WARNING, 15.0, records=True, namespaces=True)
def private_propagation(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A container sees the host's volume directories but does not receive unmounts."""
    kubelet = inventory.kubelet
    if kubelet is None:
        return
    for space in inventory.spaces:
        shown = [p for p in space.places if p.device == kubelet.device and p.is_private]
        if not shown:
            continue
        pinned = [p for p in space.places if p.device in inventory.by_number and p.is_private]
        names = sorted({inventory.by_number[place.device].name for place in pinned})
        owner = space.owner
        holds = f" and holds copies of {', '.join(names)}" if names else ""
        yield Trouble(
            subject=owner.pod or owner.pod_uid or owner.comm if owner else f"mnt:[{space.inode}]",
            # The kernel reuses inodes at once: a second short-lived namespace is another one.
            key=f"mnt-{space.inode}" + (f"-{space.id}" if space.id else ""),
            seen=inventory.spaces_at,
            pid=owner.pid if owner else 0,
            device=names[0] if names else "",
            # Without a copy of a volume it pins nothing yet; after its next restart it will.
            severity=Severity.WARNING if names else Severity.INFO,
            message=f"{space.label} has kubelet's directory at {shown[0].target} with private "
            f"propagation{holds}",
            advice="it never receives unmounts of the host, so every volume mounted when it starts "
            "stays in use. Give its hostPath mount 'mountPropagation: HostToContainer' (docker: "
            "rslave) and restart it",
            evidence={
                "namespace": str(space.inode),
                "targets": ", ".join(place.target for place in shown[:4]),
                "devices": ", ".join(names[:16]),
                **(_owner_evidence(owner) if owner else {}),
            },
        )


# -- host-mount-options ------------------------------------------------------------------------


@node_rule("host-mount-options", Severity.WARNING, 10.0, records=True)
def host_mount_options(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    """A host mount lacks required options."""
    kubelet = inventory.kubelet
    if kubelet is not None and kubelet.propagation != "shared":
        yield Trouble(
            subject=kubelet.target,
            message=f"kubelet's directory is on {kubelet.target}, which is not a shared mount",
            advice="no container receives unmounts from it, not even with HostToContainer: run "
            f"'mount --make-rshared {kubelet.target}', also at each boot",
            evidence={"propagation": kubelet.propagation, "needs": "shared"},
        )
    for place in inventory.host:
        device = inventory.by_number.get(place.device)
        for need in scene.settings.mount_options:
            if not fnmatch.fnmatchcase(place.target, need.target):
                continue
            if need.fstype is not None and need.fstype != place.fstype:
                continue
            has = set(place.options) | set(place.super_options)
            missing = [option for option in need.options if option not in has]
            if missing:
                yield Trouble(
                    subject=place.target,
                    key=",".join(missing),
                    device=device.name if device else "",
                    message=f"{place.target} is mounted without {','.join(missing)}",
                    advice="add the options to mountOptions of the StorageClass or PV; most of "
                    "them can be set on a running mount: "
                    f"'mount -o remount,{','.join(missing)} {place.target}'",
                    evidence={"options": ",".join(sorted(has)), "needs": ",".join(need.options)},
                )
