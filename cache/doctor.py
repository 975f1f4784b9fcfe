"""What the cache needs of a node. The functions run in child processes."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.units
from cache.csi import volumes
from cache.settings import CacheSettings, CephfsSource, DirSource, PvcSource, RbdSource
from cache.sources import base, claims, roots
from cache.store import disk, tree
from cache.views import closed, view
from ceph import monitors, secrets
from kit.room import Check
from kube.settings import ThisNode
from linux import devmapper, krbd, mountinfo, mounts


def checks(section: CacheSettings, state_dir: Path) -> Sequence[Check]:
    store, views = str(section.store), str(section.views)  # the disk below may hang
    wanted_disk = None if section.disk is None else str(section.disk)
    found = [
        Check("overlayfs", overlay, (), "no dataset is served"),
        Check(
            "ssd", ssd, (store, wanted_disk, str(state_dir), section.reserve),
            "nothing is cached: jobs read from the sources",
        ),
        Check("propagation", propagation, (views,), "pods and the host do not see the views"),
    ]  # fmt: skip
    found.append(
        Check(
            "kubelet", kubelet, (str(section.this_node.kubelet.root_dir),),
            "pods get no volumes by dataset name",
            wanted=section.csi.enabled,
        )
    )  # fmt: skip
    if "budget" in section.model_fields_set:
        found.append(Check("budget", budget, (store, section.budget), "the disk fills first"))
    sources = {dataset.name: dataset.source for dataset in section.datasets}
    folders = {name: str(s.path) for name, s in sources.items() if isinstance(s, DirSource)}
    if len(folders) > 1:
        found.append(Check("sources", apart, (folders,), "the same files are stored twice"))
    for dataset in section.datasets:
        if fault := dataset.access.fault:
            cost = f"jobs of users cannot read dataset {dataset.name}"
            found.append(Check(f"access {dataset.name}", access, (dataset.name, fault), cost))
    for name, source in sources.items():
        cost = f"dataset {name} is not served"
        if isinstance(source, DirSource):
            where = str(source.path), str(state_dir), source.by_object
            found.append(Check(f"source {name}", directory, where, cost))
            continue
        if isinstance(source, PvcSource):
            asked = source.model_dump(mode="json"), section.this_node.model_dump(mode="json")
            found.append(Check(f"claim {name}", claim, asked, cost))
            continue
        mounted_by = source.client if isinstance(source, CephfsSource) else ""
        about_key = str(source.secret_file), source.user, mounted_by
        found.append(Check(f"key {name}", key, about_key, cost))
        found.append(Check(f"ceph {name}", monitors.reach, (list(source.monitors),), cost))
    clients = {source.client for source in sources.values() if isinstance(source, CephfsSource)}
    client = "auto" if len(clients) != 1 else clients.pop()
    cost = "no dataset of kind cephfs is served"
    found.append(
        Check("cephfs client", cephfs, (client,), cost, wanted=bool(clients or client != "auto"))
    )
    images = {source.client for source in sources.values() if isinstance(source, RbdSource)}
    if images - {"none"}:
        cost = "jobs wait for the complete copy of an image"
        found.append(Check("rbd client", rbd, (), cost))
    return found


def claim(source: dict[str, Any], here: dict[str, Any]) -> str:
    """What a claim names, as the API server says it."""
    wanted = PvcSource.model_validate(source)
    return claims.told(wanted, ThisNode.model_validate(here))


def overlay() -> str:
    view.check_kernel()
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < (5, 12):
        raise kit.errors.HostError(
            f"kernel {release}", "it is older than 5.12", "boot a newer kernel"
        )
    return f"kernel {release}" + ("" if numbers >= (6, 5) else " (6.5 swaps views without a rest)")


def ssd(store: str, wanted: str | None, state_dir: str, reserve: float) -> str:
    store = os.path.realpath(store)
    disk.check(store, None if wanted is None else Path(wanted), Path(state_dir))
    there = kit.files.existing(store)
    try:
        probe = tempfile.mkdtemp(prefix=".nodeagent-doctor-", dir=there)
        try:
            os.setxattr(probe, tree.OPAQUE, b"y")
        finally:
            os.rmdir(probe)
    except OSError as error:
        raise kit.errors.HostError(
            f"cache.store {store}", f"cannot be used ({error.strerror})",
            "put it on a writable ext4 or XFS of the SSD, and run this as root",
        ) from error  # fmt: skip
    stat = os.statvfs(there)
    free = stat.f_bavail / max(stat.f_blocks, 1)
    where = disk.place(store)
    if free <= reserve:
        raise kit.errors.HostError(
            f"cache.store {store}",
            f"{free:.0%} of the disk at {where} is free, the reserve is {reserve:.0%}",
            "free some space there, or lower cache.reserve",
        )  # fmt: skip
    mount = mountinfo.containing(there, mountinfo.read())
    kind = mount.fstype if mount is not None else "?"
    gib = stat.f_bavail * stat.f_frsize / 2**30
    return f"{store} on {kind} mounted at {where}, {gib:.1f} GiB free"


def budget(store: str, most: int) -> str:
    """HostError when the disk is smaller than the budget."""
    stat = os.statvfs(kit.files.existing(os.path.realpath(store)))
    size = stat.f_blocks * stat.f_frsize
    given, whole = map(kit.units.format_size, (most, size))
    if most > size:
        raise kit.errors.HostError(
            f"cache.budget {given}", f"the disk of the store has {whole} in all",
            "name what the store may take of it",
        )  # fmt: skip
    return f"{given} of a disk of {whole}"


def apart(folders: Mapping[str, str]) -> str:
    """HostError when the source of one dataset lies in that of another. ``folders``: by dataset."""
    for name, folder in folders.items():
        for other, outer in folders.items():
            if name != other and closed.lies_in(closed.plain(folder), closed.plain(outer)):
                raise kit.errors.HostError(
                    f"the source of dataset {name} ({folder})",
                    f"lies inside that of dataset {other} ({outer})",
                    "leave one of them out",
                )
    return "no source lies inside another"


def access(name: str, fault: str) -> str:
    """HostError: only root may enter the view of the dataset."""
    remedy = "write it with x bits, like '0755'"
    raise kit.errors.HostError(f"the view of dataset {name}", fault, remedy)


def propagation(views: str) -> str:
    """A mount namespace of our own must hand on what is mounted in it."""
    views = os.path.realpath(views)
    own = mountinfo.read()
    mount = mountinfo.containing(views, own)
    if mount is not None and mount.shared is not None:
        return f"{views} is on a shared mount"
    if disk.apart(own):
        raise kit.errors.HostError(
            f"cache.views {views}", "its mount does not hand on what is mounted below it",
            "in a pod: mountPropagation: Bidirectional; else run the agent in the host's namespace",
        )  # fmt: skip
    return f"{views} is not on a shared mount; the agent makes it one"


def kubelet(root: str) -> str:
    """The directories that the CSI driver works in."""
    pods, registry = f"{root}/pods", f"{root}/plugins_registry"
    for path in (pods, registry):
        if not os.path.isdir(path):
            raise kit.errors.HostError(
                path, "it is not there",
                "set kubelet.root_dir to the kubelet's --root-dir; in a pod mount it",
            )  # fmt: skip
    for path in (registry, kit.files.existing(f"{root}/plugins/{volumes.DRIVER}")):
        if not os.access(path, os.W_OK):
            raise kit.errors.HostError(
                path, "it cannot be written to", "in a pod mount it without readOnly"
            )
    own = mountinfo.read()
    mount = mountinfo.containing(os.path.realpath(pods), own)
    if (mount is None or mount.shared is None) and disk.apart(own):
        raise kit.errors.HostError(
            pods, "what is mounted here does not reach the kubelet",
            "in a pod: mountPropagation: Bidirectional",
        )  # fmt: skip
    return f"{pods} and {registry} can be used"


def directory(path: str, state_dir: str, by_object: bool) -> str:
    with base.asked_once():
        try:
            root = roots.look_in_place(path, state_dir, by_object)
        except OSError as error:
            raise base.explain(f"directory {path}", error) from error
    if root["empty"]:
        raise kit.errors.SourceError(f"directory {path}", "it is empty", "mount the source there")
    return f"{path} can be read"


def key(secret_file: str, user: str, client: str) -> str:
    """``client``: the setting of a CephFS; "" for an image, which librbd reads."""
    return secrets.has_key(secret_file, user, client != "" and _by_kernel(client))


def rbd() -> str:
    if not krbd.available():
        raise kit.errors.HostError(
            "RBD client", "the kernel has none", "load the module 'rbd' (modprobe rbd)"
        )
    mapper = "with" if devmapper.available() else "no"
    return f"the kernel's, {mapper} device mapper"


def _by_kernel(client: str) -> bool:
    return client != "fuse" and mounts.kernel_has("ceph")


def cephfs(client: str) -> str:
    kernel = _by_kernel(client)
    fuse = client != "kernel" and shutil.which("ceph-fuse") is not None
    if not kernel and not fuse:
        raise kit.errors.HostError(
            "CephFS client", "neither the kernel has one nor is ceph-fuse installed",
            "load the module 'ceph' (modprobe ceph), or install ceph-fuse",
        )  # fmt: skip
    return "the kernel's" if kernel else "ceph-fuse"
