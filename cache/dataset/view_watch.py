"""Whether jobs find what is mounted for them: the mount table is looked at after each change.

Others unmount what the agent has mounted (``umount -a -t overlay``, clean-up scripts), and mount
over it. Then nothing says any more that the dataset is served, and its loop mounts it again: at
once, later after growing pauses. Mounts of others stay where they are: at a view ours goes on top,
and one that hides a directory of the views is named.

One watch for all datasets. The table is read and compared in a thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

import kit.errors
import kit.tasks
from cache.dataset.dataset import Dataset
from cache.dataset.standing import finding
from cache.dataset.succession import Succession
from cache.views import by_id, view
from cache.views.view import Mounted
from kit.findings import Finding, Severity
from linux import mountinfo

log = structlog.get_logger("views")

LOOK_SECONDS = 60.0  # between two looks while the kernel tells of no change
AGAIN_SECONDS = 5.0  # after a look that failed
LEAST_SECONDS = 0.1  # between two looks, and at most this share of the time is spent on them
SHARE = 0.05
TOLD_SECONDS = 3600.0  # for so long a loss stays a finding


@dataclass(frozen=True)
class Asked:
    """What of a dataset is to be found."""

    view: str
    changes: int  # as of ``Dataset``
    published: bool
    mounted: Mounted  # at the view, when it was published last
    ids: Mapping[str, Mounted | None]  # None: not seen yet


@dataclass(frozen=True)
class Seen:
    """What jobs find of it. ``lost``: what has become of what was published, in words."""

    lost: str
    back: bool  # what was published is there
    hidden: kit.errors.HostError | None  # why nothing can be found
    lost_ids: Mapping[str, str]
    ids: Mapping[str, Mounted]


def compare(
    asked: Asked, hidden: kit.errors.HostError | None, table: Sequence[mountinfo.Mount]
) -> Seen:
    """Pure. ``hidden``: why no view at all is to be found."""
    hidden = hidden or view.hiding(asked.view, table)
    known = {mount.mount_id for mount in table}
    gone, ids = {}, {}
    for name, mounted in asked.ids.items():
        place = f"{by_id.folder_of(asked.view)}/{name}"
        top = mountinfo.leads_to(place, table)
        covered = mounted is not None and mounted.mount_id in known and not mounted.shows(top)
        if top is None or top.target != place or covered:
            gone[name] = hidden.cause if hidden else view.lost(place, mounted or Mounted(), table)
        else:  # the agent has it show something else at times
            ids[name] = Mounted.of(top)
    lost = view.lost(asked.view, asked.mounted, table)
    return Seen(
        lost=(hidden.cause if hidden else lost) if lost and asked.published else "",
        back=not lost,
        hidden=hidden,
        lost_ids=gone,
        ids=ids,
    )


def is_gone(views: str, base: Mounted, table: Sequence[mountinfo.Mount]) -> bool:
    """Whether what the folder of the views lay on was unmounted. Pure.

    A view that is mounted again at once may get its id, and even its device number.
    """
    return base not in (Mounted.of(m) for m in table if mountinfo.within(views, m.target))


class ViewWatch:
    """``prepare``: makes the folder of the views a mount again. ``report``: after a loss."""

    def __init__(
        self,
        views: str,
        datasets: Mapping[str, Dataset],
        successions: Mapping[str, Succession],
        mounts: mountinfo.Table,
        prepare: Callable[[], Awaitable[None]],
        report: Callable[[], None],
    ) -> None:
        self._views = views
        self._datasets, self._successions = datasets, successions
        self._mounts, self._prepare, self._report = mounts, prepare, report
        self._base: Mounted | None = None  # what the folder of the views lies on
        self._ids: dict[tuple[str, str], Mounted] = {}
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()

    def wake(self) -> None:
        self._changed.set()

    async def follow(self) -> None:
        """Never ends."""
        watch, said = mountinfo.Watch(str(mountinfo.OWN), self.wake), ""
        try:
            while True:
                self._changed.clear()
                began, patience = time.monotonic(), LOOK_SECONDS
                try:
                    await self.look()
                    said = ""
                except (kit.errors.AgentError, OSError, RuntimeError) as error:
                    if str(error) != said:
                        log.error("views cannot be looked at; it is tried again", why=str(error))
                    said = str(error)
                    patience = AGAIN_SECONDS
                await asyncio.sleep(max(LEAST_SECONDS, (time.monotonic() - began) / SHARE))
                await kit.tasks.until(self._changed, patience)
        finally:
            watch.close()

    async def look(self) -> None:
        """Look now, and tell each dataset what it has lost. AgentError, OSError."""
        async with self._looking:
            if await self._look() is not None:
                return
        await self.prepare()
        async with self._looking:
            await self._look()

    async def prepare(self) -> None:
        """Make the folder of the views a mount. What it lay on before is no view's: somebody may
        have asked while the agent starts. HostError, OSError."""
        async with self._looking:
            await self._prepare()
            self._base = None

    async def _look(self) -> Mounted | None:
        """What the folder of the views lies on; None when that was unmounted."""
        asked = {name: self._ask(name, each) for name, each in self._datasets.items()}
        base, seen = await asyncio.to_thread(self._compare, asked)
        losses = [self._take(name, asked[name], seen[name], base is None) for name in seen]
        if any(losses):
            self._report()
        return base

    def _ask(self, name: str, dataset: Dataset) -> Asked:
        ids = self._successions[name].shown if name in self._successions else ()
        return Asked(
            dataset.view, dataset.changes, dataset.published, dataset.mounted,
            {each: self._ids.get((name, each)) for each in ids},
        )  # fmt: skip

    def _compare(self, asked: Mapping[str, Asked]) -> tuple[Mounted | None, dict[str, Seen]]:
        """In a thread."""
        table = self._mounts.now()
        near = [
            mount for mount in table
            if mountinfo.within(self._views, mount.target)
            or mountinfo.within(mount.target, self._views)
        ]  # fmt: skip
        base = self._base or Mounted.of(mountinfo.leads_to(self._views, near))
        hidden = view.hides_all(self._views, base, near)
        self._base = base
        gone = is_gone(self._views, base, near)
        if gone:
            thing = f"cache.views {self._views}"
            hidden = kit.errors.HostError(
                thing, "it was unmounted", "it is mounted again by itself"
            )
        seen = {name: compare(each, hidden, near) for name, each in asked.items()}
        return None if gone else base, seen

    def _take(self, name: str, asked: Asked, seen: Seen, with_folder: bool) -> bool:
        """Whether something is lost."""
        dataset, succession = self._datasets.get(name), self._successions.get(name)
        if dataset is None or succession is None:
            return False
        if dataset.changes != asked.changes or asked.changes % 2:
            return False  # the agent itself changes it; ``look_again`` follows
        dataset.find_view(seen.hidden, back=seen.back)
        words = [f"by-id/{each}: {what}" for each, what in seen.lost_ids.items()]
        words = [seen.lost] if seen.lost else words
        if words:
            more = " with the folder of all views: pods that began before do not get it back"
            dataset.count_loss(words[0] + more * with_folder)
        if seen.lost:
            dataset.lose_view(words[0])
        for each, what in seen.lost_ids.items():
            succession.lose(each, what)
        self._ids = {key: m for key, m in self._ids.items() if key[0] != name or key[1] in seen.ids}
        self._ids |= {(name, each): mounted for each, mounted in seen.ids.items()}
        return bool(words)


def findings(datasets: Mapping[str, Dataset], now: float) -> Iterator[Finding]:
    """``now``: Unix time."""
    for name, dataset in datasets.items():
        loss = dataset.loss
        if dataset.removed or not loss.count or now - loss.at > TOLD_SECONDS:
            continue
        times = f" ({loss.count} times since the agent began)" if loss.count > 1 else ""
        yield finding(
            "dataset-view-lost",
            name,
            Severity.WARNING,
            f"somebody has changed what is mounted at {dataset.view}: {loss.what}{times}",
            "it is mounted again by itself; find who did it (a clean-up script, "
            "'umount -a', 'umount -R' of a directory above): jobs found an empty directory, "
            "those that began or opened files then are to be looked at",
        )
