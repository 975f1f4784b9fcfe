"""The node service: publish, unpublish and measure volumes. Knows nothing of gRPC.

Kubelet asks again after every error and after its own restart, so each request is answered from
what is there: the mount table, the records, the datasets. Nothing is kept only in memory.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

import kit.child
import kit.errors
from cache.csi import mounts, records, volumes
from cache.csi.volumes import WantedVolume
from cache.dataset.dataset import Dataset
from cache.settings import CsiSettings
from cache.views.view import Stage
from kube.settings import ThisNode
from linux import mountinfo

log = structlog.get_logger("csi")

MOUNT_SECONDS = 15.0
UNMOUNT_SECONDS = 20.0
SIZE_SECONDS = 10.0
LOOK_SECONDS = 0.2  # between two looks at a dataset that is waited for
# Each is a process of 15 MB; many pods start at once.
MOST_AT_ONCE = 4


class BusyError(kit.errors.RefusedError):
    """Another request for the same target is not finished."""


class NodeService:
    """``volumes``: what is mounted, by target."""

    def __init__(self, datasets: Mapping[str, Dataset], state_dir: Path) -> None:
        self.volumes: dict[str, records.DatasetVolume] = {}
        self.unmapped: dict[str, records.DatasetVolume] = {}  # of pods that cannot start for it
        self.unrenewed: dict[str, str] = {}  # why, by target: what was tried last is the last
        self._renewed: dict[str, mountinfo.Mount] = {}  # the view's, by target
        self.settings = CsiSettings()
        self.here = ThisNode()
        self._datasets = datasets
        self._folder = records.folder_of(state_dir)
        self._busy: set[str] = set()
        self._leaving: Counter[str] = Counter()  # datasets that are being removed
        # Of volumes of images, by target: the mount that was asked, its bytes and its inodes.
        self._sizes: dict[str, tuple[tuple[int, int, int], tuple[int, int]]] = {}
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    async def adopt(self, settings: CsiSettings, here: ThisNode) -> None:
        """Take over what an earlier agent mounted: volumes hold their dataset, also disabled."""
        self.settings, self.here = settings, here
        self.volumes = await asyncio.to_thread(
            lambda: records.load(self._folder, {each.target for each in mountinfo.read()})
        )

    # --- requests of the kubelet

    async def publish(self, identity: str, path: str, wanted: WantedVolume, seconds: float) -> None:
        """Mount a volume within about ``seconds``. AgentError with the reason why not, OSError."""
        target = self._target(path)
        with self._alone(target):
            volume = records.DatasetVolume(
                identity, target, wanted.dataset, str(wanted.layout), wanted.pod
            )
            before = self.volumes.get(target)
            if await self._mounted(target):
                if before is None or not before.dataset:  # nobody knows what it shows
                    await self._unmount(target)
                elif (before.id, before.dataset, before.layout) == (
                    identity, volume.dataset, volume.layout,
                ):  # fmt: skip
                    return
                else:
                    raise volumes.TakenError(
                        f"target path {target}", f"volume {before.id} is mounted there",
                        "unpublish it",
                    )  # fmt: skip
            dataset = await self._wait(wanted, min(seconds, self.settings.wait))
            self.volumes[target] = volume
            try:
                await asyncio.to_thread(records.write, self._folder, volume)
                async with self._slots:
                    await kit.child.call(
                        mounts.publish, target, dataset.view, volume.layout,
                        str(records.file_of(self._folder, target)), deadline=MOUNT_SECONDS,
                    )  # fmt: skip
            except kit.child.DeadlineError:
                raise  # it may be mounted yet; kubelet unpublishes before it gives up
            except (kit.errors.AgentError, OSError, RuntimeError):
                await self._unmount(target)
                raise
            log.info("volume mounted", dataset=volume.dataset, pod=volume.pod, target=target)

    async def unpublish(self, identity: str, path: str) -> None:
        """Unmount whatever is at the target, known or not. AgentError, OSError."""
        target = self._target(path)
        with self._alone(target):
            await self._unmount(target)
            log.info("volume unmounted", volume=identity, target=target)

    async def stats(self, path: str) -> volumes.Stats:
        """NotFoundError for a volume that is not ours. AgentError, OSError."""
        try:
            target = self._target(path)
            volume = self.volumes[target]
        except (KeyError, kit.errors.SettingsError, kit.errors.RefusedError):
            raise kit.errors.NotFoundError(
                f"volume at {path[: volumes.MOST_TEXT]}", "no volume is published there", ""
            ) from None
        dataset = self._datasets.get(volume.dataset)
        found = None if dataset is None else shown(dataset)
        table = await asyncio.to_thread(mountinfo.read)
        return volumes.stats(
            volume.dataset,
            found,
            mounted=is_mounted(volume, table),
            held=await self._size(volume, table) if found is not None and found.block else None,
        )

    async def _size(
        self, volume: records.DatasetVolume, table: list[mountinfo.Mount]
    ) -> tuple[int, int] | None:
        """Bytes and files in an image. None when nothing is mounted.

        It cannot change under one mount, so each is asked once: kubelet asks all volumes each
        minute, and a question is a process.
        """
        data = _data(volume)
        stacked = mountinfo.at(data, table)
        if not stacked:
            return None
        top = stacked[-1]
        key = (top.mount_id, *top.device)
        known = self._sizes.get(volume.target)
        if known is None or known[0] != key:
            async with self._slots:
                known = key, await kit.child.call(mounts.size, data, deadline=SIZE_SECONDS)
            if volume.target in self.volumes:
                self._sizes[volume.target] = known
        return known[1]

    def _target(self, path: str) -> str:
        """As the mount table has it: kubelet's root and its pods may be links, and nothing below.
        SettingsError, RefusedError."""
        pods = f"{self.here.kubelet.root_dir}/pods"
        target = os.path.realpath(pods) + volumes.target_below(path, pods)[len(pods) :]
        if os.path.realpath(os.path.dirname(target)) != os.path.dirname(target):
            raise volumes.linked(path)
        return target

    @contextlib.contextmanager
    def _alone(self, target: str) -> Iterator[None]:
        if target in self._busy:
            raise BusyError(f"target path {target}", "an earlier request is not finished", "")
        self._busy.add(target)
        try:
            yield
        finally:
            self._busy.discard(target)

    async def _wait(self, wanted: WantedVolume, seconds: float) -> Dataset:
        """The dataset once the volume can be mounted. AgentError: why not, after ``seconds``."""
        until = time.monotonic() + seconds
        while True:
            dataset = self._find(wanted.dataset)
            last = time.monotonic() >= until
            trouble = volumes.obstacle(shown(dataset), wanted, last=last)
            if trouble is None:
                return dataset
            if last or dataset.removed:
                raise trouble
            await asyncio.sleep(LOOK_SECONDS)

    def _find(self, name: str) -> Dataset:
        if self._leaving[name]:
            raise kit.errors.RefusedError(f"dataset {name}", "it is being removed", "")
        try:
            return self._datasets[name]
        except KeyError:
            names = kit.errors.some(sorted(self._datasets), between=", ") or "none"
            raise kit.errors.NotFoundError(
                f"dataset {name[:volumes.MOST_TEXT]!r}", "this node does not have it",
                f"its datasets are: {names}",
            ) from None  # fmt: skip

    async def _mounted(self, target: str) -> bool:
        table = await asyncio.to_thread(mountinfo.read)
        return bool(mountinfo.at(target, table))

    async def _unmount(self, target: str) -> None:
        """First the record goes, so that a hanging publish mounts nothing afterwards."""
        await asyncio.to_thread(records.forget, self._folder, target)
        async with self._slots:
            await kit.child.call(mounts.unpublish, target, deadline=UNMOUNT_SECONDS)
        volume = self.volumes.pop(target, None)
        self._sizes.pop(target, None)
        self._renewed.pop(target, None)
        for name, dataset in self._datasets.items():
            if volume is not None and volume.holds(name):
                dataset.wake()  # it may discard now what the volume held

    # --- pods with users of their own

    async def renew(self) -> None:
        """Pods with hostUsers: false whose mount cannot be mapped get the store once it serves.

        Until then no runtime starts their containers, so nobody reads what is exchanged here.
        """
        direct = [v for v in self.volumes.values() if v.layout == volumes.VolumeLayout.DIRECT]
        table = await asyncio.to_thread(mountinfo.read) if direct else []
        tops = {v.target: mountinfo.at(v.target, table)[-1:] for v in direct}
        bad = [v for v in direct if any(not volumes.maps(m.fstype) for m in tops[v.target])]
        own = await asyncio.to_thread(lambda: [v for v in bad if _has_users(v.target)])
        stores = {v.target: self._store(v, table) for v in own}
        # Of one that shows the store already nobody knows better: its pod may run well.
        own = [v for v in own if not _same_device(tops[v.target], stores[v.target])]
        self.unmapped = {volume.target: volume for volume in own}
        self.unrenewed = {t: why for t, why in self.unrenewed.items() if stores.get(t)}
        able = [(v, store) for v in own for store in stores[v.target]]
        for volume, store in able:
            if not volumes.maps(store.fstype):
                why = f"the SSD's file system, {store.fstype}, is not known to map users"
                self._not_renewed(volume.target, why)
        # Whatever cannot be renewed keeps no other one from its turn.
        turn = {target: place for place, target in enumerate(self.unrenewed)}
        able.sort(key=lambda each: turn.get(each[0].target, -1))
        due = [each for each in able if self._is_due(*each)]
        await asyncio.gather(*(self._renew(*each) for each in due[:MOST_AT_ONCE]))

    def _store(
        self, volume: records.DatasetVolume, table: list[mountinfo.Mount]
    ) -> list[mountinfo.Mount]:
        """The mount at its dataset's view, once that shows the store."""
        dataset = self._datasets.get(volume.dataset)
        if dataset is None or shown(dataset).stage is not Stage.STORE:
            return []
        return mountinfo.at(dataset.view, table)[-1:]

    def _is_due(self, volume: records.DatasetVolume, store: mountinfo.Mount) -> bool:
        """One exchange for each mount of the view: a second one would change nothing."""
        done = self._renewed.get(volume.target) == store
        return volumes.maps(store.fstype) and not done and volume.target not in self._busy

    async def _renew(self, volume: records.DatasetVolume, store: mountinfo.Mount) -> None:
        target, view = volume.target, store.target
        record = str(records.file_of(self._folder, target))
        try:
            with self._alone(target):
                await kit.child.call(mounts.renew, target, view, record, deadline=MOUNT_SECONDS)
                self._renewed[target] = store
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            self._not_renewed(target, str(error))
            return
        log.info("volume shows the SSD now", pod=volume.pod, target=target)
        self.unmapped.pop(target, None)
        self.unrenewed.pop(target, None)

    def _not_renewed(self, target: str, why: str) -> None:
        if self.unrenewed.pop(target, None) != why:  # else it is logged already
            log.warning("volume could not be renewed", target=target, why=why)
        self.unrenewed[target] = why

    # --- what volumes hold

    def of(self, dataset: str) -> list[records.DatasetVolume]:
        """Volumes that hold a dataset."""
        return [each for each in self.volumes.values() if each.holds(dataset)]

    @contextlib.contextmanager
    def leaving(self, dataset: str) -> Iterator[None]:
        """While a dataset is removed it is given to nobody. InUseError: who has it."""
        if using := self.of(dataset):
            who = f"in use: {kit.errors.some([str(each) for each in using])}"
            raise kit.errors.InUseError(f"dataset {dataset}", who, "end these pods, then try again")
        self._leaving[dataset] += 1
        try:
            yield
        finally:
            self._leaving[dataset] -= 1


def _has_users(target: str) -> bool:
    return (volumes.pod_folder(target) / volumes.USERS).exists()


def _same_device(some: list[mountinfo.Mount], others: list[mountinfo.Mount]) -> bool:
    return any(one.device == other.device for one in some for other in others)


def _data(volume: records.DatasetVolume) -> str:
    """Where its pod reads."""
    below = f"/{mounts.VIEW}" if volume.layout == volumes.VolumeLayout.PARENT else ""
    return f"{volume.target}{below}"


def is_mounted(volume: records.DatasetVolume, table: list[mountinfo.Mount]) -> bool:
    """Whether something is mounted where its pod reads."""
    found = mountinfo.leads_to(_data(volume), table)
    return found is not None and found.target == _data(volume)


def shown(dataset: Dataset) -> volumes.Shown:
    figures, reached = dataset.figures, dataset.reached
    late = reached is not None and dataset.source.block and not reached.root
    stage = dataset.stage
    if stage is Stage.STORE and dataset.generation.state != "complete":
        stage = Stage.UNKNOWN  # what was stored until now, or of another source: it is replaced
    return volumes.Shown(
        stage=stage,
        state=dataset.state(),
        why=dataset.why(),
        reached=reached is not None,
        files=figures.files,
        bytes=figures.bytes,
        done_files=figures.done_files,
        done_bytes=figures.done_bytes,
        block=dataset.source.block,
        late=reached.note if late and reached is not None else "",
    )
