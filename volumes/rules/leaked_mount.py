"""leaked-mount: the device is in use, but not mounted on the host any more."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Device, Inventory, Number, Owner, Place, Space, User
from volumes.rules.base import Rule, Scene, Trouble, needs_inventory, needs_namespaces

# A file system that is being shut down writes back first and has no holder: not at once.
UNEXPLAINED_SECONDS = 60.0
MOST_PER_DEVICE = 20
# Where kubelet and CSI drivers mount volumes: a copy of such a path is a copy of the host's mount.
_HOST_PATHS = ("/kubernetes.io/csi/", "/volumes/kubernetes.io~")
# Copies are seen by themselves, but a container runtime passes through such a state for moments.
PATIENCE_SECONDS = 1.5


def _owner(space: Space) -> Owner | None:
    return space.owners[0] if space.owners else None


def who(space: Space) -> str:
    owner = _owner(space)
    if owner is not None:
        more = f" and {space.processes - 1} more" if space.processes > 1 else ""
        return owner.label + more
    kept = f", kept by {space.kept_by[0]}" if space.kept_by else ""
    return f"mount namespace {space.inode} without processes{kept}"


def owner_evidence(owner: Owner) -> dict[str, str]:
    told = {
        "cgroup": owner.cgroup,
        "comm": owner.comm,
        "container": owner.container,
        "pod_uid": owner.pod_uid,
        "pod": owner.pod,
        "thread": str(owner.thread) if owner.thread else "",
        "process_started": str(owner.started),
    }
    return {name: value for name, value in told.items() if value}


NAME = "leaked-mount"


def identity(device: Device, space: Space) -> str:
    """The finding's id, for the command in its own advice (see volumes.audit.standing)."""
    return f"{NAME}/{device.name}/mnt-{space.inode}"


def why_not_detach(
    inventory: Inventory,
    device: Device,
    space: Space,
    places: list[Place],
    former: frozenset[str],
) -> str:
    """Why ``places`` of ``space`` are not for us to undo; '' when they are copies of the host's.

    ``former``: where the host had the device. One decision for the advice and for the action.
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
                f"{place.target} is not a copy of a host mount: it is what that container works "
                "with; end the container instead"
            )
    return ""


def _is_copy(target: str, former: frozenset[str]) -> bool:
    if any(path in target for path in _HOST_PATHS):
        return True
    return any(target == path or target.endswith(path) for path in former)


def _advice(space: Space, places: list[Place], device: Device, refusal: str) -> str:
    owner = _owner(space)
    if any(not place.is_private for place in places):
        return (
            "its mounts follow another namespace's; find the one they come from, or end "
            f"{who(space)}"
        )
    if refusal:
        return (
            f"{refusal}. Its host mount is gone, so its data can no longer be unmapped or moved "
            f"safely: end {who(space)} (delete its pod) and let kubelet begin anew"
        )
    targets = " ".join(place.target for place in places[:4])
    cause = (
        "it copied the host's mounts with private propagation, so that the host's unmount "
        "never reached it"
    )
    act = f"'nodeagent volume act {identity(device, space)} --yes'"
    if owner is not None:
        way = f"/proc/{owner.pid}/task/{owner.thread}" if owner.thread else f"/proc/{owner.pid}"
        return (
            f"{cause}. Free it now, the process goes on: {act} (by hand, where that container has "
            f"the program: 'nsenter --mount={way}/ns/mnt umount -l {targets}'). "
            "For good: give that container 'mountPropagation: HostToContainer' (docker: rslave) "
            f"and restart it. Until then do not use what is on {device.name} elsewhere"
        )
    keeper = space.kept_by[0] if space.kept_by else "a descriptor that no process list shows"
    return (
        f"{cause}. No process is in the namespace; it is kept by {keeper}: unmount or close that, "
        f"or free the device with {act}"
    )


def on_host(inventory: Inventory, device: Device) -> set[Number]:
    """Which numbers of the device the host has mounted."""
    return {place.device for place in inventory.on_host(device)}


def copies(inventory: Inventory, device: Device) -> list[tuple[Space, Place]]:
    """Mounts outside the host's namespaces of what the host does not have mounted."""
    at_home = on_host(inventory, device)
    return [each for each in inventory.elsewhere(device) if each[1].device not in at_home]


def _mounts(inventory: Inventory, device: Device, former: frozenset[str]) -> Iterator[Trouble]:
    spaces: dict[int, tuple[Space, list[Place]]] = {}
    for space, place in copies(inventory, device):
        spaces.setdefault(space.inode, (space, []))[1].append(place)
    for space, places in list(spaces.values())[:MOST_PER_DEVICE]:
        owner = _owner(space)
        yield Trouble(
            subject=device.name,
            key=f"mnt-{space.inode}",
            device=device.name,
            pid=owner.pid if owner else 0,
            message=f"{device.label} is not mounted on the host, but {who(space)} still has it "
            f"mounted at {places[0].target}",
            advice=_advice(
                *(space, places, device),
                refusal=why_not_detach(inventory, device, space, places, former),
            ),
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
                **(owner_evidence(owner) if owner else {}),
            },
        )


def user_trouble(device: Device, user: User, message: str, advice: str) -> Trouble:
    return Trouble(
        subject=device.name,
        key=f"pid-{user.owner.pid}-{user.owner.started}",
        device=device.name,
        pid=user.owner.pid,
        message=message,
        advice=advice,
        evidence={
            "kind": "open",
            "uses": ", ".join(user.ways),
            "namespace": str(user.namespace),
            **owner_evidence(user.owner),
        },
    )


def _users(inventory: Inventory, device: Device) -> Iterator[Trouble]:
    at_home = on_host(inventory, device)
    users = [user for user in inventory.users_on(device) if user.device not in at_home]
    for user in users[:MOST_PER_DEVICE]:
        yield user_trouble(
            device,
            user,
            f"{device.label} is not mounted anywhere, but {user.owner.label} keeps its file "
            f"system alive ({', '.join(user.ways)})",
            "a lazy unmount (umount -l) or a container's end left it behind: end or restart "
            f"{user.owner.label}, or let it close these files; nothing else frees the device",
        )


def is_leaked(inventory: Inventory, device: Device) -> bool:
    """Something outside the host's namespaces has it or a layer of it, and the host does not."""
    return bool(device.live - on_host(inventory, device) or copies(inventory, device))


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    for device in inventory.devices:
        if not is_leaked(inventory, device):
            continue
        former = scene.former.get(device.name, frozenset())
        found = list(_mounts(inventory, device, former)) or list(_users(inventory, device))
        yield from found
        if not found:
            yield Trouble(
                subject=device.name,
                key="nobody",
                device=device.name,
                severity=Severity.WARNING,
                patience=UNEXPLAINED_SECONDS,
                message=f"{device.label} is mounted nowhere, but its {device.active[0]} file "
                "system is still alive and no holder is visible",
                advice="it is still being written back, a process hangs in an unmount, or it is "
                "held by what the kernel does not list (a file in flight over a socket, io_uring, "
                "swap, a loop device on a file of it); look for D states with 'ps -eo "
                "pid,stat,wchan:30,cmd'",
                evidence={"kind": "unknown", "file_systems": ", ".join(device.active)},
            )


RULE = Rule(
    name=NAME,
    summary="a device is in use by somebody, but not mounted on the host any more",
    severity=Severity.CRITICAL,
    patience=PATIENCE_SECONDS,
    judge=needs_namespaces(needs_inventory(_judge)),
)
