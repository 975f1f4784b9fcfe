"""A PersistentVolumeClaim of ceph-csi as a source: the CephFS directory or RBD image behind it.

The API server says which PersistentVolume is bound to the claim, and the volume names cluster,
directory or image, and the Secret that its nodes use. A ConfigMap beside that Secret (of ceph-csi,
or of Rook) has the monitors. A VolumeSnapshot names a snapshot of that directory, or an image that
ceph-csi made of it. Fields as ceph-csi writes them: docs/static-pvc.md, CreateVolume in
internal/cephfs and internal/rbd, and api/deploy/kubernetes/csi-config-map.go of its repository.

Who may name a dataset is not always who may read a namespace's volumes, so a claim says by its
annotation that it may be cached (``ALLOWED``).

What was found is used until the source does not answer, and asked for again now and then. The key
is kept in memory and in a file that only root can read.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import structlog

import kit.errors
import kit.files
import kit.formats
import kit.pause
from cache.settings import CephfsSource, DatasetSettings, PvcSource, RbdSource, Source
from cache.sources import base, cephfs, cephfs_mount, rbd, rbd_child
from kube import client
from kube.settings import ThisNode

log = structlog.get_logger("source")

ALLOWED = "nodeagent.io/cache"  # an annotation of the claim: 'allowed'
ANSWER_SECONDS = 10.0  # for one request
FOUND_SECONDS = 6 * 3600.0  # for which an answer is used; each look takes about six requests
AGAIN_SECONDS = (60.0, 1800.0)  # after a source that did not answer: the first pause, the longest
MOST_ANSWERS = 16  # of one dataset: its generations, and the volume itself
KINDS = {"cephfs.csi.ceph.com": "cephfs", "rbd.csi.ceph.com": "rbd"}  # with a prefix: Rook's
# Where ceph-csi and Rook keep monitors: name of the ConfigMap, and its entry.
CONFIGS = (
    ("ceph-csi-config", "config.json"),
    ("rook-ceph-csi-config", "csi-cluster-config-json"),
)
SNAPSHOTS = "/apis/snapshot.storage.k8s.io/v1"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Object = Mapping[str, Any]
Ask = Callable[[str, str], Awaitable[Object]]  # path of an object, what it is; KubeError


class ClaimError(Exception):
    """The claim cannot be a source. The text says why; ``remedy``: what to do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class ClaimedVolume:
    """What a PersistentVolume of ceph-csi says. ``directory``: of a file system, for CephFS."""

    kind: str  # as ``PvcSource`` becomes: cephfs or rbd
    cluster: str  # ceph-csi's clusterID
    secret: tuple[str, str]  # namespace and name
    filesystem: str = ""
    directory: str = ""
    pool: str = ""
    image: str = ""
    writers: str = ""  # access modes that let pods write, for operators


@dataclass(frozen=True)
class ClaimedSource:
    """What a claim names. ``snapshot``: of a CephFS volume, as ceph-csi called it."""

    source: CephfsSource | RbdSource
    key: str = field(repr=False)
    snapshot: str = ""
    note: str = ""


# --- pure: what the objects say


def allowed(claim: Object) -> None:
    """ClaimError unless the claim may be cached and has a volume."""
    meta, spec = claim.get("metadata") or {}, claim.get("spec") or {}
    if (meta.get("annotations") or {}).get(ALLOWED) != "allowed":
        claim_name = f"-n {meta.get('namespace')} {meta.get('name')}"
        raise ClaimError(
            f"its annotation {ALLOWED} is not 'allowed'",
            f"allow it: 'kubectl annotate pvc {claim_name} {ALLOWED}=allowed'",
        )
    if (claim.get("status") or {}).get("phase") != "Bound" or not spec.get("volumeName"):
        raise ClaimError("it is not bound to a volume", "see 'kubectl describe pvc'")
    if spec.get("volumeMode", "Filesystem") != "Filesystem":
        raise ClaimError("its volumeMode is Block: it has no files", "choose a Filesystem volume")


def volume_of(claim: Object, volume: Object) -> ClaimedVolume:
    """The PersistentVolume of a claim. ClaimError when it is none of ceph-csi, or not bound."""
    spec = volume.get("spec") or {}
    owner, meta = spec.get("claimRef") or {}, claim["metadata"]
    if owner.get("uid") != meta.get("uid"):  # a claim may name any volume, also another's
        raise ClaimError("its volume is bound to another claim", "see 'kubectl describe pv'")
    csi = spec.get("csi") or {}
    driver, given = str(csi.get("driver", "")), dict(csi.get("volumeAttributes") or {})
    kinds = (kind for name, kind in KINDS.items() if f".{driver}".endswith(f".{name}"))
    kind = next(kinds, "")
    if not kind:
        what = driver or "no CSI driver"
        raise ClaimError(f"its volume is of {what}, not of ceph-csi", "use 'kind: dir' for it")
    if _is_true(given, "encrypted"):
        raise ClaimError("its volume is encrypted", "cache a copy that is not")
    secret = csi.get("nodeStageSecretRef") or {}
    if not secret.get("name") or not secret.get("namespace"):
        raise ClaimError("its volume names no node-stage Secret", "see its StorageClass")
    modes = [mode for mode in spec.get("accessModes") or () if mode != "ReadOnlyMany"]
    static = _is_true(given, "staticVolume")
    found = ClaimedVolume(
        kind, _text(given, "clusterID"), (str(secret["namespace"]), str(secret["name"])),
        writers=", ".join(modes),
    )  # fmt: skip
    if kind == "rbd":
        image = str(csi.get("volumeHandle", "")) if static else _text(given, "imageName")
        return dataclasses.replace(found, pool=_text(given, "pool"), image=image)
    directory = _text(given, "rootPath" if static else "subvolumePath")
    # A claim made of a snapshot without a copy has no data of its own: its path is the directory
    # above that of the other volume, with a slash behind it. Data is in GROUP/NAME-UUID/UUID, in
    # what Ceph calls a legacy subvolume in GROUP/NAME-UUID, without a slash.
    shows = _is_true(given, "backingSnapshot") or given.get("backingSnapshotID")
    if shows or not (static or _UUID.fullmatch(directory[-36:])):
        raise ClaimError(
            "it shows a snapshot of another volume",
            "name that volume's claim, and the VolumeSnapshot as source.snapshot",
        )
    return dataclasses.replace(found, filesystem=_text(given, "fsName"), directory=directory)


def _is_true(given: Object, name: str) -> bool:
    """As ceph-csi reads it (Go's ParseBool)."""
    return str(given.get(name)).lower() in ("1", "t", "true")


def _text(given: Object, name: str) -> str:
    value = str(given.get(name) or "")
    if not value:
        raise ClaimError(
            f"its volume does not say its {name}",
            "ceph-csi before 3.4 did not write it; name the directory or image by 'kind: cephfs' "
            "or 'kind: rbd'",
        )
    return value


def snapshot_name(content: Object, prefix: str) -> str:
    """How Ceph calls the snapshot of a VolumeSnapshotContent. ClaimError."""
    handle = str((content.get("status") or {}).get("snapshotHandle") or "")
    if not _UUID.fullmatch(handle[-36:]):
        raise ClaimError("its VolumeSnapshot is not ready", "see 'kubectl describe'")
    return f"{prefix or 'csi-snap-'}{handle[-36:]}"


@dataclass(frozen=True)
class CsiCluster:
    """An entry of ceph-csi's ConfigMap. ``namespace``: of RADOS, in pools of images."""

    monitors: tuple[str, ...]
    namespace: str = ""


def cluster_of(text: str, wanted: str) -> CsiCluster:
    """ClaimError when the ConfigMap does not have it."""
    try:
        entries = [each for each in json.loads(text) if each.get("clusterID") == wanted]
        monitors = tuple(str(each) for each in entries[0]["monitors"])
        namespace = str((entries[0].get("rbd") or {}).get("radosNamespace") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        monitors, namespace = (), ""
    if not monitors:
        raise ClaimError(
            f"the ConfigMap of ceph-csi names no monitors of cluster {wanted}",
            "see its config.json",
        )
    return CsiCluster(monitors, namespace)


def login_of(secret: Object) -> tuple[str, str]:
    """User and key of a node-stage Secret. ClaimError."""
    data = secret.get("data") or {}
    for user, key in (("userID", "userKey"), ("adminID", "adminKey")):
        with contextlib.suppress(ValueError):
            found = [base64.b64decode(str(data.get(each) or ""), validate=True).decode("ascii")
                     for each in (user, key)]  # fmt: skip
            if all(found):
                return found[0].strip(), found[1].strip()
    raise ClaimError("its Secret has no userID and userKey", "see the Secret of ceph-csi's nodes")


# --- asking


async def find(source: PvcSource, key_file: Path, ask: Ask) -> ClaimedSource:
    """What the claim names. ClaimError, KubeError; ValueError for what Ceph cannot be given."""
    space = "/api/v1/namespaces"
    path = client.path_to(space, source.namespace, "persistentvolumeclaims", source.name)
    claim = await ask(path, f"PersistentVolumeClaim {source.namespace}/{source.name}")
    allowed(claim)
    name = str(claim["spec"]["volumeName"])
    bound = await ask(client.path_to("/api/v1/persistentvolumes", name), f"PersistentVolume {name}")
    volume = volume_of(claim, bound)
    in_ceph = ""
    if source.snapshot is not None:
        handle = str(bound["spec"]["csi"].get("volumeHandle", ""))
        in_ceph = await _snapshot(source.namespace, source.snapshot, handle, ask)
    cluster = cluster_of(await _config(volume.secret[0], ask), volume.cluster)
    secret = "/".join(volume.secret)
    user, key = login_of(
        await ask(
            client.path_to(space, volume.secret[0], "secrets", volume.secret[1]), f"Secret {secret}"
        )
    )
    ways = {"monitors": cluster.monitors, "user": user, "secret_file": str(key_file)}
    if volume.kind == "cephfs":
        tree = CephfsSource.model_validate(
            {
                "kind": "cephfs", "filesystem": volume.filesystem, "path": volume.directory, **ways,
            }
        )  # fmt: skip
        note = "" if in_ceph or not volume.writers else (
            f"pods may write to the claim ({volume.writers}): 'frozen' is your promise that none "
            "does"
        )  # fmt: skip
        return ClaimedSource(tree, key, in_ceph, note)
    if not in_ceph:
        raise ClaimError(
            "it is an RBD image, which is cached from a snapshot only",
            "make a VolumeSnapshot of the claim and name it as source.snapshot",
        )
    # ceph-csi makes an image of each snapshot, with a snapshot of the same name.
    image = RbdSource.model_validate(
        {
            "kind": "rbd", "pool": volume.pool, "namespace": cluster.namespace, "image": in_ceph,
            "snapshot": in_ceph, **ways,
        }
    )  # fmt: skip
    return ClaimedSource(image, key)


async def asked(source: PvcSource, key_file: Path, here: ThisNode) -> ClaimedSource:
    """As ``find``, of the API server of this node's cluster. ClaimError says what is missing,
    too; KubeError that nobody answered."""
    server = client.ApiServer(here.cluster)

    async def ask(path: str, about: str) -> Object:
        return await server.request("GET", path, about=about, deadline=ANSWER_SECONDS)

    try:
        return await find(source, key_file, ask)
    except pydantic.ValidationError as error:
        why = f"what its volume says is not understood ({error.errors()[0]['msg']})"
        raise ClaimError(why, "see 'kubectl describe pv'") from None
    except client.KubeError as error:
        if error.status == 404:
            raise ClaimError(f"{error.thing} does not exist", "make it") from None
        if error.status == 403:
            remedy = "give the agent that right (docs/kubernetes.md, Cache a claim)"
            raise ClaimError(f"the agent may not read {error.thing}", remedy) from None
        raise
    finally:
        await server.close()


def told(source: PvcSource, here: ThisNode) -> str:
    """For 'nodeagent doctor': what the claim names. SourceError."""
    try:
        found = asyncio.run(asked(source, Path("/dev/null"), here))
    except (ClaimError, client.KubeError) as error:
        thing = f"claim {source.namespace}/{source.name}"
        remedy = error.remedy or "see the API server"
        raise kit.errors.SourceError(thing, str(error), remedy) from None
    inner = found.source
    where = f"{inner.filesystem}:{inner.path}" if isinstance(inner, CephfsSource) else inner.image
    return f"{inner.kind} {where} as client.{inner.user}"


async def _snapshot(namespace: str, name: str, of_volume: str, ask: Ask) -> str:
    """How Ceph calls a VolumeSnapshot. ``of_volume``: the handle of the volume that it must be of,
    because only that one's claim allowed it."""
    path = client.path_to(f"{SNAPSHOTS}/namespaces", namespace, "volumesnapshots", name)
    snapshot = await ask(path, f"VolumeSnapshot {namespace}/{name}")
    content = str((snapshot.get("status") or {}).get("boundVolumeSnapshotContentName") or "")
    if not content:
        raise ClaimError(f"VolumeSnapshot {namespace}/{name} is not bound", "wait for it")
    path = client.path_to(f"{SNAPSHOTS}/volumesnapshotcontents", content)
    bound = await ask(path, f"VolumeSnapshotContent {content}")
    owner = (bound.get("spec") or {}).get("volumeSnapshotRef") or {}
    if owner.get("uid") != snapshot["metadata"].get("uid"):
        raise ClaimError(f"VolumeSnapshot {namespace}/{name} is not bound", "wait for it")
    made_of = str(((bound.get("spec") or {}).get("source") or {}).get("volumeHandle") or "")
    if not made_of or made_of != of_volume:
        raise ClaimError(
            f"VolumeSnapshot {namespace}/{name} is not of this claim's volume",
            "name one that was made of the claim",
        )
    kind, prefix = str((bound.get("spec") or {}).get("volumeSnapshotClassName") or ""), ""
    if kind:
        path = client.path_to(f"{SNAPSHOTS}/volumesnapshotclasses", kind)
        try:
            given = (await ask(path, f"VolumeSnapshotClass {kind}")).get("parameters") or {}
            prefix = str(given.get("snapshotNamePrefix") or "")
        except client.KubeError as error:
            if error.status != 404:  # deleted since: most classes name no prefix
                raise
    return snapshot_name(bound, prefix)


async def _config(namespace: str, ask: Ask) -> str:
    """The monitors' entry of the ConfigMap of ceph-csi, or of Rook."""
    forbidden: client.KubeError | None = None
    for name, entry in CONFIGS:
        path = client.path_to("/api/v1/namespaces", namespace, "configmaps", name)
        try:
            found = await ask(path, f"ConfigMap {namespace}/{name}")
        except client.KubeError as error:
            if error.status not in (403, 404):
                raise
            forbidden = error if error.status == 403 else forbidden
            continue
        if text := (found.get("data") or {}).get(entry):
            return str(text)
    if forbidden is not None:
        raise forbidden
    names = " or ".join(f"{namespace}/{name}" for name, _ in CONFIGS)
    raise ClaimError(f"no ConfigMap {names} has monitors", "see where ceph-csi was installed")


# --- the source


class ClaimLookup:
    """What the claim of a dataset names, for all its generations: one answer for each snapshot."""

    def __init__(self, here: Callable[[], ThisNode]) -> None:
        """``here``: whose cluster is asked."""
        self._here = here
        self._found: dict[PvcSource, ClaimedSource] = {}
        self._due: dict[PvcSource, float] = {}  # monotonic: when it is asked for again
        self._pauses = kit.pause.Backoff(*AGAIN_SECONDS)
        self._again = 0.0  # monotonic: the earliest of them after the last failure

    def known(self, source: PvcSource) -> ClaimedSource | None:
        """The last answer."""
        return self._found.get(source)

    def forget(self) -> None:
        """Ask at the next look."""
        self._due.clear()

    def ask_again(self) -> None:
        """Keys and monitors change: look whether they did, but not at each try, and ever less often
        while that does not help."""
        soon = self._later()
        self._due = {source: min(due, soon) for source, due in self._due.items()}

    def answered(self) -> None:
        """The source did: its next failure is the first one."""
        self._pauses.reset()
        self._again = 0.0

    def _later(self) -> float:
        if (now := time.monotonic()) >= self._again:
            self._again = now + self._pauses.next()
        return self._again

    @contextlib.contextmanager
    def doubted(self) -> Iterator[None]:
        """What fails in the block may do so because other things are true by now."""
        try:
            yield
        except kit.errors.SourceError:
            self.ask_again()
            raise

    async def find(
        self, source: PvcSource, key_file: Path, thing: str, deadline: float
    ) -> ClaimedSource:
        """SourceError while nobody says it, or it cannot be a source."""
        found = self._found.get(source)
        if found is not None and time.monotonic() < self._due.get(source, 0.0):
            return found
        try:
            async with asyncio.timeout(deadline):
                found = await asked(source, key_file, self._here())
            due = time.monotonic() + kit.pause.jittered(FOUND_SECONDS)
        except ClaimError as error:
            raise _unusable(thing, str(error), error.remedy) from None
        except (TimeoutError, client.KubeError) as error:
            why = str(error) or f"the API server did not answer within {deadline:g}s"
            if found is None:
                cause = f"it is not known what it names: {why}"
                raise _unusable(thing, cause, "see the API server") from None
            log.warning("claim is read as before", source=thing, why=why)
            due = self._later()
        self._found[source], self._due[source] = found, due
        while len(self._found) > MOST_ANSWERS:
            oldest = next(iter(self._found))
            del self._found[oldest]
            self._due.pop(oldest, None)
        return found


def _unusable(thing: str, cause: str, remedy: str) -> kit.errors.SourceError:
    return kit.errors.SourceError(thing, cause, f"{remedy}; it is tried again")


class ClaimSource:
    """The source of a dataset. ``folder``: as of the source that it becomes."""

    replaceable = True
    place = ""

    def __init__(
        self, dataset: DatasetSettings, source: PvcSource, folder: Path, memory: Path,
        lookup: ClaimLookup,
    ) -> None:  # fmt: skip
        """``memory``: a file that tells the next agent whether it is an image."""
        self._dataset, self._source, self._folder, self._memory = dataset, source, folder, memory
        self._key, self._lookup = folder / cephfs_mount.CLAIM_KEY, lookup
        self._thing = f"dataset {dataset.name}: claim {source.namespace}/{source.name}"
        self._inner: cephfs.Cephfs | rbd.Rbd | None = None
        self.block = kit.formats.read(memory, None, dict) == {"block": True}
        self.immutable = dataset.freshness != "frozen"

    @property
    def identity(self) -> dict[str, Any]:
        source = self._source
        return {
            "kind": "pvc", "namespace": source.namespace, "name": source.name,
            "snapshot": source.snapshot,
        }  # fmt: skip

    @property
    def note(self) -> str:
        found = self._lookup.known(self._asked)
        return "" if found is None else found.note

    def take(self, source: Source) -> None:
        assert isinstance(source, PvcSource)
        self._source = source
        self._lookup.forget()

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        with self._lookup.doubted():
            inner = await self._reachable(deadline)
            reached = await inner.reach(deadline, serve=serve)
        self._lookup.answered()
        return reached

    async def snapshots(self, deadline: float) -> dict[str, float]:
        """Of the volume's directory, whatever snapshot this is of."""
        whole = await self._find(self._whole, deadline)
        if not isinstance(whole.source, CephfsSource):
            return {}  # 'follow' is for directories
        await asyncio.to_thread(_keep, self._key, whole.key)
        volume = cephfs.Cephfs(self._dataset, whole.source, self._folder)
        with self._lookup.doubted():
            return await volume.snapshots(deadline)

    async def release(self) -> None:
        """By the folder alone: an earlier agent, or a list of its snapshots, may have mounted it.
        The key stays in memory: the next look at the source asks nobody."""
        await release(self._folder)

    # --- what it becomes

    @property
    def _asked(self) -> PvcSource:
        """As the API server knows it: a snapshot that 'follow' found is none of its names."""
        return self._whole if self._dataset.freshness == "follow" else self._source

    @property
    def _whole(self) -> PvcSource:
        return self._source.model_copy(update={"snapshot": None})

    async def _find(self, source: PvcSource, deadline: float) -> ClaimedSource:
        return await self._lookup.find(source, self._key, self._thing, deadline)

    async def _reachable(self, deadline: float) -> cephfs.Cephfs | rbd.Rbd:
        """The directory or image behind it."""
        found = await self._find(self._asked, deadline)
        source = found.source
        made: cephfs.Cephfs | rbd.Rbd
        if isinstance(source, CephfsSource):
            snapshot = await self._in_ceph(found, deadline) or None
            source = source.model_copy(update={"snapshot": snapshot})
            made = cephfs.Cephfs(self._dataset, source, self._folder)
        else:
            made = rbd.Rbd(self._dataset, source, self._folder)
        if self._inner is not None and self._inner.identity == made.identity:
            self._inner.take(source)
        else:
            if self._inner is not None:
                await release(self._folder)
            self._inner = made
        if made.block != self.block:
            await asyncio.to_thread(_keep, self._memory, json.dumps({"block": made.block}))
            self.block = made.block
        await asyncio.to_thread(_keep, self._key, found.key)  # a release deletes it
        return self._inner

    async def _in_ceph(self, found: ClaimedSource, deadline: float) -> str:
        """The snapshot's name inside of the volume's directory, '' without one. One of a subvolume
        lies a level above, and is seen here with that directory's number behind it; one of a
        subvolume of version 1, or a legacy one, lies here."""
        if self._dataset.freshness == "follow":
            return self._source.snapshot or ""
        if not (wanted := found.snapshot):
            return ""
        names = await self.snapshots(deadline)
        matching = [each for each in names if each == wanted or each.startswith(f"_{wanted}_")]
        if not matching:
            why = f"it has no snapshot {wanted}"
            remedy = "make the VolumeSnapshot again, or name another one"
            raise base.GoneError(self._thing, why, f"{remedy}; it is tried again")
        return matching[0]


async def release(folder: Path) -> None:
    """Unmount what a source of any kind left in its folder, and delete its key."""
    kind = rbd if (folder / rbd_child.MAPPED).exists() else cephfs
    await kind.release(folder)


def _keep(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kit.files.save(file, text.encode("ascii"))
