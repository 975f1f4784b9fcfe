"""Probes devices in child processes, because a read of a dead device cannot be interrupted.

A child in an uninterruptible sleep does not die of SIGKILL until its device answers. When for a
deadline none of its reads was answered it is abandoned, and while it exists the device's verdict is
TIMEOUT without another child, which would only hang beside it. Children that answered are kept
while other probes wait, then one, and one is started ahead, because a start takes longer than a
probe.
"""

import asyncio
import random
import weakref

import structlog

import kit.errors
import kit.line_worker
import kit.tasks
from kit import processes
from linux import procfs
from volumes.probe.examine import Kind, Request, Verdict

log = structlog.get_logger("volumes")

MOST_OF_CLUSTER = 8  # devices of one cluster whose children hang
# Of a whole probe. A blank device costs 550 reads: with 3 s so many pass at 80 ms each, one after
# the other. The request that waits for it has 55 s.
MOST_DEADLINES = 20
MOST_SECONDS = 45.0
MOST_CLUSTERS = 4  # that have all their slots in use at a time
_NO_ANSWER = "no answer"


def _about(device: str) -> str:
    return f"probe of {device}"


class Prober:
    """Invariant: at most one child per device exists, a hanging one included.

    ``deadline``: seconds without an answered read. ``at_once``: probes of one cluster that run at a
    time, because one whose devices are slow must not keep others waiting; hanging ones do not
    count.
    """

    def __init__(self, deadline: float = 3.0, at_once: int = 4) -> None:
        self.deadline = deadline
        self.started = 0
        self._probes: dict[str, asyncio.Task[Verdict]] = {}
        self._slots = asyncio.Semaphore(at_once * MOST_CLUSTERS)
        self._of_cluster: weakref.WeakValueDictionary[str, asyncio.Semaphore]
        self._of_cluster = weakref.WeakValueDictionary()
        self._late: dict[str, str] = {}  # with their clusters
        self._at_once = at_once
        self._spares: list[kit.line_worker.LineWorker[Verdict]] = []
        self._closed = False

    @property
    def hanging(self) -> frozenset[str]:
        """Devices whose child was abandoned and still exists."""
        for device in [each for each in self._late if not processes.hanging(_about(each))]:
            del self._late[device]
        return frozenset(self._late)

    @property
    def _whole(self) -> float:
        return max(self.deadline, min(MOST_DEADLINES * self.deadline, MOST_SECONDS))

    async def probe(self, device: str, below: str = "", cluster: str = "") -> Verdict:
        """The verdict on the device node ``device`` (see ``Request`` for ``below``), at the latest
        ``_whole`` seconds after its child may start. Calls for one device share one child.

        ``cluster``: what does not answer together, a cluster's fsid or a driver's name.
        TooManyHangError, which says nothing about the device, where too many children hang, of all
        or of its cluster.
        """
        task = self._probes.get(device)
        if task is None:
            if device in self.hanging:
                return self._timeout(device)
            self._refuse_dead(cluster)
            task = asyncio.create_task(self._run(device, below, cluster), name=_about(device))
            self._probes[device] = task
            task.add_done_callback(lambda _: self._probes.pop(device, None))
        return await asyncio.shield(task)

    def _refuse_dead(self, cluster: str) -> None:
        """One dead cluster must not take the children that others need."""
        late = sum(each == cluster for each in self._late.values())
        if cluster and late >= MOST_OF_CLUSTER:
            raise processes.TooManyHangError(
                f"cluster or driver {cluster}", f"probes of {late} of its devices hang",
                "see its health",
            )  # fmt: skip

    async def warm(self) -> None:
        """Have a child ready that waits for its device, where one can be started."""
        if self._spares or self._closed:
            return
        spare = _worker()
        self._spares.append(spare)
        try:
            await spare.start()
        except (kit.errors.AgentError, OSError) as error:
            log.warning("no child is ready for the next probe", error=str(error))
            if spare in self._spares:
                self._spares.remove(spare)

    async def _run(self, device: str, below: str, cluster: str) -> Verdict:
        mine = self._of_cluster.setdefault(cluster, asyncio.Semaphore(self._at_once))
        async with mine, self._slots:
            self.started += 1
            worker = self._spares.pop() if self._spares else _worker()
            worker.about = _about(device)
            try:
                request = Request(device, random.getrandbits(32), below)
                found = await self._ask(worker, request)
            except processes.TooManyHangError:
                raise
            except processes.DeadlineError:  # the worker has abandoned its child
                self._late[device] = cluster
                found = self._timeout(device)
            except kit.line_worker.FAILURES as error:
                found = Verdict(Kind.UNREADABLE, device, where=f"no probe: {error}", errno=5)
                await worker.close()
            else:
                await self._keep(worker)
        await self.warm()
        return found

    async def _ask(self, worker: kit.line_worker.LineWorker[Verdict], request: Request) -> Verdict:
        """Its answer. DeadlineError when the device stopped answering, or after ``_whole``."""
        try:
            async with asyncio.timeout(self.deadline) as limit:
                following = asyncio.create_task(_follow(worker, limit, self.deadline))
                try:
                    return await worker.ask(request, self._whole)
                finally:
                    await kit.tasks.end(following)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise processes.DeadlineError(request.device, _NO_ANSWER, "") from error

    async def _keep(self, worker: kit.line_worker.LineWorker[Verdict]) -> None:
        """For the next probe; as many as still wait for one, then one."""
        most = 0 if self._closed else max(1, min(self._at_once, len(self._probes) - 1))
        self._spares.append(worker)
        while len(self._spares) > most:
            await self._spares.pop().close()

    def _timeout(self, device: str) -> Verdict:
        return Verdict(Kind.TIMEOUT, device, where=_NO_ANSWER, seconds=self.deadline)

    async def close(self) -> None:
        """Abandon every child, without waiting for those that hang."""
        self._closed = True
        devices = list(self._probes)
        await kit.tasks.end(*self._probes.values())
        # Their children were killed a moment ago; those that do not hang are reaped here.
        ends = (processes.settled(_about(each), processes.KILLED_SECONDS) for each in devices)
        await asyncio.gather(*ends)
        while self._spares:
            await self._spares.pop().close()


async def _follow(
    worker: kit.line_worker.LineWorker[Verdict], limit: asyncio.Timeout, deadline: float
) -> None:
    """Let the deadline begin anew while the child's reads are answered."""
    before = None
    while not limit.expired():
        now = procfs.reads(worker.pid) if worker.pid is not None else None
        if now != before:
            before = now
            limit.reschedule(asyncio.get_running_loop().time() + deadline)
        await asyncio.sleep(deadline / 8)


def _worker() -> kit.line_worker.LineWorker[Verdict]:
    return kit.line_worker.LineWorker("volumes.probe.examine:main", Verdict, about="probe")
