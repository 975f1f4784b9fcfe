"""Follows the objects of the cluster and hands what they add to the process.

One watch of each kind and one of this node's own Node. What is in force is remembered on disk: an
agent that starts while no API server answers goes on as before.
"""

import asyncio
import base64
import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import re
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

import kit.errors
import kit.files
import kit.findings
import kit.formats
import kit.pause
import kit.tasks
from kube import client, watching
from nodeagent.cluster import intent, kinds, requests, rollup
from nodeagent.settings import ClusterSettings, Settings
from nodeagent.state import MOST_FINDINGS, State

log = structlog.get_logger("cluster")

FILE = "cluster.json"  # in the state directory
SETTLE_SECONDS = 0.2  # objects that come together are taken over together
CHECK_SECONDS = 5.0  # for what is to be given up, and for what is over
SECRET_SECONDS = 600.0
SECRET_AGAIN_SECONDS = 20.0  # when nobody answered
MOST_SECRETS = 20  # that are read in one go
RELEASE_SECONDS = 180.0
CHOOSE_SECONDS = 300.0  # between two looks at what all nodes report
ORIGIN = "agent.kubernetes"
# NodeStorages in one answer: with many datasets one has some kilobytes, and all of 7,500 nodes
# would be more than an answer may have.
PAGE = 500
# A file of a Secret, also half written (``kit.files.save``).
_WRITTEN = re.compile(r"\.?(?P<name>[0-9a-f]{64})(\.new)?")


def node_storages(server: client.ApiServer) -> watching.Watch[rollup.View]:
    """Of all nodes."""
    return watching.Watch[rollup.View](
        server,
        f"{kinds.API}/{kinds.NODE_STORAGES}",
        about=kinds.NODE_STORAGES,
        keep=rollup.view,
        changed=lambda: None,
        page=PAGE,
    )


class SecretFiles:
    """Keys of Secrets, which are read by name and never listed or watched, as files."""

    def __init__(self, server: client.ApiServer, files: intent.Secrets) -> None:
        self.files = files
        self._server = server
        self._due: dict[kinds.SecretRef, float] = {}  # when each is to be read again
        self._kept: set[str] | None = None  # names of files, since others were deleted

    async def read(self, wishes: Iterable[intent.Wish]) -> None:
        wanted = intent.secrets_of(wishes)
        now, silent = time.monotonic(), 0.0
        # Those that wait longest first: with many no more than some are asked for at a time, and
        # whoever may make objects may name many that this agent may not read.
        due = [each for each in wanted if self._due.get(each, 0.0) <= now]
        due.sort(key=lambda each: (self._due.get(each, 0.0), each.name, each.key))
        for ref in due[:MOST_SECRETS]:
            if silent:  # or each of them would hold up everything else
                self._due[ref] = now + silent
                continue
            pause = SECRET_SECONDS
            try:
                await self._one(ref)
            except (client.KubeError, OSError, ValueError) as error:
                pause = SECRET_SECONDS / 10
                if isinstance(error, client.KubeError) and error.status in (0, 401, 429):
                    pause = silent = SECRET_AGAIN_SECONDS
                log.warning("Secret cannot be read", secret=ref.name, key=ref.key, why=str(error))
            self._due[ref] = now + kit.pause.jittered(pause)
        for old in self._due.keys() - wanted:
            del self._due[old]
        kept = {self.files.file(each).name for each in wanted}
        if kept != self._kept:
            try:
                await asyncio.to_thread(_forget, self.files.folder, kept)
                self._kept = kept
            except OSError as error:
                log.warning("files of Secrets cannot be deleted", why=str(error))

    async def _one(self, ref: kinds.SecretRef) -> None:
        path = client.path_to("/api/v1/namespaces", self.files.namespace, "secrets", ref.name)
        about = f"Secret {self.files.namespace}/{ref.name}"
        found = await self._server.request(
            "GET", path, about=about, deadline=watching.ANSWER_SECONDS
        )
        entry = (found.get("data") or {}).get(ref.key)
        if entry is None:
            raise client.KubeError(about, f"it has no entry {ref.key!r}", 404)
        content = base64.b64decode(str(entry), validate=True)
        await asyncio.to_thread(_put, self.files.file(ref), content)


class Shares:
    """What ``status.chosen`` takes from this node: it gives that up only when what all nodes report
    says the same. Whoever breaks into one node can write a status."""

    def __init__(self, server: client.ApiServer, node: str) -> None:
        self.nodes = node_storages(server)
        self.wrong: set[intent.Key] = set()  # that is this node's, by what all report
        self._elsewhere: set[intent.Key] = set()
        self._node = node
        self._look_at: float | None = None  # the next look; None: nothing is due

    async def elsewhere(self, due: Mapping[intent.Key, intent.Wish], now: float) -> set[intent.Key]:
        """Of ``due``, what other nodes keep. What nobody knows is not among it."""
        self.wrong &= due.keys()
        self._elsewhere &= due.keys()
        if not due:
            self._look_at = None
        elif self._look_at is None:  # many nodes lose their share at the same moment
            self._look_at = time.monotonic() + random.uniform(0, CHOOSE_SECONDS)
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + kit.pause.jittered(CHOOSE_SECONDS)
            try:
                await self.nodes.look()
                self._judge(due, list(self.nodes.objects.values()), now)
            except client.KubeError as error:
                log.warning("what all nodes report is not known", why=str(error))
            self.nodes.forget()
        return self._elsewhere

    def _judge(
        self, due: Mapping[intent.Key, intent.Wish], views: list[rollup.View], now: float
    ) -> None:
        places = {key: rollup.placed(asked, views, now) for key, asked in due.items()}
        self.wrong = {key for key, nodes in places.items() if self._node in nodes}
        # Without a report of its own this node would be left out by all.
        counts = any(each.node == self._node and rollup.is_fresh(each, now) for each in views)
        self._elsewhere = {key for key, nodes in places.items() if counts and nodes} - self.wrong

    def findings(self) -> Iterator[kit.findings.Finding]:
        for key in sorted(self.wrong):
            message = (
                "status.chosen leaves this node out, and by what all nodes report it is one that "
                "keeps the dataset: it keeps it"
            )
            advice = "see who else writes the object's status (docs/security.md)"
            yield _finding("intent-refused", key, message, advice)


class Follower:
    """``apply`` is called when ``merged`` may give something else. ``verdicts``: the latest."""

    def __init__(self, asked: ClusterSettings, settings: Settings) -> None:
        self.asked = asked
        self.server = client.ApiServer(asked)
        self.verdicts: list[intent.Verdict] = []
        self._waits: dict[intent.Key, str] = {}  # what could not be given up yet, and why
        self.name, self.namespace = settings.this_node.name, asked.own_namespace
        files = intent.Secrets(settings.admin.socket.parent / "secrets", self.namespace)
        self.secrets = SecretFiles(self.server, files)
        self.shares = Shares(self.server, self.name)
        self._file = settings.state_dir / FILE
        self._known = _load(self._file)
        self._changed = asyncio.Event()
        self.requests = requests.Requests(settings.state_dir, self._changed.set)
        self.watches = {
            each.kind: watching.Watch[intent.Wish](
                self.server,
                f"{kinds.API}/{each.plural}",
                about=each.plural,
                keep=functools.partial(intent.wish, each.kind),
                changed=self._changed.set,
            )
            for _, each in kinds.intents()
        }
        self.node = watching.Watch[dict[str, Any]](
            self.server,
            "/api/v1/nodes",
            about=f"Node {self.name}",
            keep=_node,
            changed=self._changed.set,
            query={"fieldSelector": f"metadata.name={self.name}"},
        )

    # --- what others ask

    def merged(self, settings: Settings) -> Settings:
        made, self.verdicts = intent.merge(
            settings, self._known.wishes.values(), self.secrets.files
        )
        return made

    @property
    def observed(self) -> str:
        """A digest of all objects that this node knows, whether they select it or not."""
        found = sorted(
            (each.uid, each.generation)
            for watch in self.watches.values()
            for each in watch.objects.values()
        )
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]

    @property
    def candidates(self) -> dict[intent.Key, intent.Wish]:
        """Objects that this node may have to keep, though not all nodes do."""
        labels = self._known.labels
        return {
            each.key: each
            for watch in self.watches.values()
            for each in watch.objects.values()
            if each.spread and each.selects(labels)
        }

    @property
    def leaving(self) -> dict[intent.Key, str]:
        """What is not given up yet, and what it waits for. "": nothing, it is about to go."""
        return {key: self._waits.get(key, "") for key in sorted(self._known.releasing)}

    @property
    def epoch(self) -> int:
        """Changes when the cluster may have forgotten what this agent wrote there."""
        return self.server.epoch

    @property
    def synced(self) -> bool:
        return self.node.synced and all(each.synced for each in self.watches.values())

    # --- work

    async def follow(self, state: State, apply: Callable[[], Awaitable[None]]) -> None:
        """Never ends."""
        tasks = [
            asyncio.create_task(each.follow(), name=name) for name, each in self.watches.items()
        ]
        tasks.append(asyncio.create_task(self.node.follow(), name="Node"))
        working = asyncio.create_task(self._work(state, apply), name="objects")
        try:
            done, _ = await asyncio.wait((*tasks, working), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await kit.tasks.end(*tasks, working)
            await self.server.close()

    async def _work(self, state: State, apply: Callable[[], Awaitable[None]]) -> None:
        while True:
            self._changed.clear()
            before = self._known
            self._known = self._step(await self._elsewhere())
            await self.secrets.read(self._known.wishes.values())
            if self._known != before:
                await self._save()
                log.info("objects of the cluster have changed")
                await apply()
            await self._release(state)
            await self.requests.step(state, self.verdicts)
            if self.synced:
                await self.requests.settle()
            # Beside the loop: how many objects are refused is not ours to say.
            state.findings.report(ORIGIN, await asyncio.to_thread(self._findings))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._changed.wait()
                    await asyncio.sleep(SETTLE_SECONDS)

    async def _elsewhere(self) -> set[intent.Key]:
        now, known = time.time(), self._known
        due = {
            key: asked
            for key, asked in self.candidates.items()
            if key in known.wishes
            and not asked.kept_by(self.name, known.labels)
            and known.until.get(key, now + self.asked.drop_after) <= now
        }
        return await self.shares.elsewhere(due, now)

    def _step(self, elsewhere: Collection[intent.Key] = ()) -> intent.Known:
        labels = self._known.labels
        if self.node.synced and self.name in self.node.objects:
            ours = kinds.label_prefixes()  # must select nothing, or it would select itself
            labels = {
                key: value
                for key, value in self.node.objects[self.name]["labels"].items()
                if not key.startswith(ours)
            }
        elif not self.node.synced and not labels:
            return self._known  # whom objects select is not known yet
        deleted = []
        for kind, watch in self.watches.items():
            deleted += [(kind, name) for name in watch.deleted]
            watch.deleted.clear()
        seen = {kind: dict(w.objects) for kind, w in self.watches.items() if w.synced}
        now = time.time()
        return intent.step(
            self._known, seen, deleted, labels, now, self.asked.drop_after, self.name, elsewhere
        )

    async def _save(self) -> None:
        known = self._known

        def save() -> None:  # all of it grows with the objects
            kit.files.save(self._file, json.dumps(intent.to_json(known)).encode())

        try:
            await asyncio.to_thread(save)
        except OSError as error:
            log.warning("what the cluster wants cannot be remembered", why=str(error))

    async def _release(self, state: State) -> None:
        """Give up what deleted objects asked for, once nobody uses it."""
        running = {each.room.name: each for each in state.running if each.started}
        rooms = {found.kind: (room, found) for room, found in kinds.intents()}
        wanted: dict[str, set[Any]] = {}
        waits: dict[intent.Key, str] = {}
        before = self._known.releasing
        for kind, key in sorted(before):
            room, found = rooms[kind]
            section = getattr(state.settings, room.name)
            done = section is None or found.release is None
            if not done:
                assert found.release is not None
                if kind not in wanted:
                    wanted[kind] = {getattr(e, found.key) for e in getattr(section, found.field)}
                if key in wanted[kind]:
                    done = True  # wanted again
                elif room.name in running:
                    try:
                        async with asyncio.timeout(RELEASE_SECONDS):
                            await found.release(running[room.name].component, key)
                        done = True
                        log.info("given up", kind=kind, name=key)
                    except kit.errors.AgentError as error:
                        waits[kind, key] = str(error)
                    except (TimeoutError, OSError, RuntimeError) as error:
                        waits[kind, key] = str(error) or "it takes longer than expected"
            if done:
                left = self._known.releasing - {(kind, key)}
                self._known = dataclasses.replace(self._known, releasing=left)
        if self._known.releasing != before:
            await self._save()  # once: each time it is all that is known
        self._waits = waits

    # --- findings

    def _findings(self) -> list[kit.findings.Finding]:
        found = []
        refused = (each for each in self.verdicts if each.collides or not each.accepted)
        for each in itertools.islice(refused, MOST_FINDINGS):
            rule = "intent-collision" if each.collides else "intent-refused"
            found.append(
                _finding(
                    rule, each.wish.key, each.message,
                    "take it out of one of them" if each.collides else "correct the object",
                )
            )  # fmt: skip
        for key, why in self._waits.items():
            message = f"no object asks for it here any more, and it is not given up yet: {why}"
            found.append(_finding("intent-in-use", key, message, "it is tried again by itself"))
        found += self.shares.findings()
        troubles = [each.trouble for each in self.watches.values()] + [self.node.trouble]
        if trouble := next(filter(None, troubles), ""):
            found.append(
                kit.findings.Finding(
                    id="cluster-unreachable",
                    rule="cluster-unreachable",
                    severity=kit.findings.Severity.WARNING,
                    subject="Kubernetes API",
                    message=f"objects of the cluster are not followed: {trouble}",
                    advice="the agent goes on with what it knows; see docs/kubernetes.md",
                )
            )
        return found


def _node(thing: dict[str, Any]) -> dict[str, Any]:
    meta = thing["metadata"]
    return {"uid": meta["uid"], "labels": dict(meta.get("labels") or {})}


def _finding(rule: str, key: intent.Key, message: str, advice: str) -> kit.findings.Finding:
    subject = " ".join(key)
    return kit.findings.Finding(
        f"{rule}/{subject}", rule, kit.findings.Severity.WARNING, subject, message, advice
    )


def _load(file: Path) -> intent.Known:
    """What was lost, the cluster says again when it answers."""
    found = kit.formats.read(file, None, _remembered)
    if isinstance(found, kit.formats.Damage):
        log.error("what the cluster wanted is forgotten", why=str(found))
        return intent.Known()
    return found or intent.Known()


def _remembered(value: Any) -> intent.Known:
    """What a wrong shape leads to."""
    found = intent.from_json(value)
    for each in found.wishes.values():
        msgspec.convert(dataclasses.asdict(each), type=intent.Wish)
        each.kept_by("", msgspec.convert(found.labels, type=dict[str, str]))
        intent.elements_of(each)
    return found


def _put(file: Path, content: bytes) -> None:
    """OSError, also when its folder is not ours."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _own(file.parent)
    if file.is_symlink() or not file.exists() or file.read_bytes() != content:
        kit.files.save(file, content, 0o600)


def _forget(folder: Path, kept: Collection[str]) -> None:
    """Delete what ``_put`` wrote, this agent's or an earlier one's, but for ``kept``. OSError."""
    try:
        _own(folder)
    except FileNotFoundError:
        return
    _delete(folder, kept)


def _delete(folder: Path, kept: Collection[str]) -> None:
    for file in folder.iterdir():
        written = _WRITTEN.fullmatch(file.name)
        if written is not None and written["name"] not in kept:
            file.unlink(missing_ok=True)


def _own(folder: Path) -> None:
    """Let nobody else write in ``folder``: they could put a link or a file of their own in the
    place of ours. OSError when it is a link, or of somebody else."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is not a directory of the agent's own", str(folder))
    if status.st_mode & 0o022:  # as a new emptyDir is
        folder.chmod(0o700)
        _delete(folder, ())
