"""List and watch against a real API server, through a relay that breaks the connection."""

import asyncio
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kube import client, watching
from kube.settings import AccessSettings
from nodeagent.cluster import kinds
from tests.kube.test_crds import dataset
from tests.nodeagent.test_listeners import certify
from tests.testbed import waiting
from tests.testbed.control_plane import ControlPlane, unique

PATH = f"{kinds.API}/cacheddatasets"
SILENCE_SECONDS = 5.0


class Relay:
    """Passes bytes between a client and the API server. ``frozen``: passes none, closes nothing."""

    def __init__(self, port: int) -> None:
        self.frozen = False
        self.port = 0
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nothing listens any more, and open connections are cut."""
        assert self._server is not None
        self._server.close()
        for each in list(self._writers):
            each.transport.abort()
        await asyncio.sleep(0)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        finally:
            for each in (writer, back):
                each.transport.abort()
                self._writers.discard(each)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self.frozen:
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class Followed:
    """A watch of datasets, and what broke its way."""

    def __init__(self, relay: Relay, watch: watching.Watch[int]) -> None:
        self.relay = relay
        self.watch = watch

    async def until(self, name: str, priority: int | None) -> None:
        """``priority`` None: it is not there."""
        await waiting.until_async(
            lambda: self.watch.objects.get(name) == priority, 40, f"{name}: {priority}",
            detail=lambda: f"{self.watch.objects} {self.watch.trouble}",
        )  # fmt: skip


@pytest.fixture
async def followed(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(watching, "LIST_SECONDS", 1.0)
    monkeypatch.setattr(watching, "SPREAD_SECONDS", 1.0)
    monkeypatch.setattr(watching, "PAUSES", (0.2, 1.0))
    monkeypatch.setattr(watching, "SILENCE_SECONDS", SILENCE_SECONDS)
    relay = Relay(plane.api_port)
    await relay.start()
    login = plane.account(unique("agent"), "gpu-watch")
    server = client.ApiServer(
        login.model_copy(update={"server": f"https://127.0.0.1:{relay.port}"})
    )
    watch = watching.Watch[int](
        server, PATH, about="datasets", changed=lambda: None,
        keep=lambda thing: int(thing["spec"].get("priority", 0)),
    )  # fmt: skip
    task = asyncio.create_task(watch.follow())
    try:
        await waiting.until_async(lambda: watch.synced, 40, "the first list")
        yield Followed(relay, watch)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close()
        relay.frozen = False
        await relay.stop()


async def apply(plane: ControlPlane, name: str, priority: int) -> None:
    await asyncio.to_thread(plane.apply, dataset(name, priority=priority))


async def delete(plane: ControlPlane, name: str) -> None:
    await asyncio.to_thread(plane.kubectl, "delete", "cds", name)


@pytest.mark.real
async def test_watch_goes_on_after_a_cut_without_another_list(
    plane: ControlPlane, followed: Followed
) -> None:
    kept, gone = unique("kept"), unique("gone")
    await apply(plane, kept, 1)
    await apply(plane, gone, 1)
    await followed.until(gone, 1)
    await followed.relay.stop()
    await waiting.until_async(lambda: followed.watch.trouble, 30, "the trouble")
    await apply(plane, kept, 2)
    await delete(plane, gone)
    await followed.relay.start()
    await followed.until(kept, 2)
    await followed.until(gone, None)
    assert gone in followed.watch.deleted
    assert followed.watch.lists == 1
    # Where it was is lost, too: what went meanwhile is missing in the next list.
    await followed.relay.stop()
    await waiting.until_async(lambda: followed.watch.trouble, 30, "the trouble")
    followed.watch._version = ""
    await delete(plane, kept)
    await followed.relay.start()
    await followed.until(kept, None)
    assert kept not in followed.watch.deleted
    assert followed.watch.lists >= 2


@pytest.mark.real
async def test_silent_connection_is_given_up(plane: ControlPlane, followed: Followed) -> None:
    name = unique("half")
    await apply(plane, name, 1)
    await followed.until(name, 1)
    followed.relay.frozen = True
    await apply(plane, name, 2)
    await waiting.until_async(lambda: followed.watch.trouble, 40, "the silence to be seen")
    followed.relay.frozen = False
    await followed.until(name, 2)
    assert followed.watch.lists == 1
    await delete(plane, name)


class Lists(client.ApiServer):
    """Answers of an API server, without one."""

    def __init__(self) -> None:
        super().__init__(AccessSettings(server="https://localhost:1"))
        self.names = [f"n{number}" for number in range(7)]
        self.asked: list[dict[str, str]] = []
        self.look: Callable[[], None] = lambda: None

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        query = dict(urllib.parse.parse_qsl(path.partition("?")[2]))
        self.asked.append(query)
        self.look()
        first = int(query.get("continue", 0))
        last = first + int(query.get("limit", len(self.names)))
        rest = {"continue": str(last)} if last < len(self.names) else {}
        return {
            "metadata": {"resourceVersion": "5", **rest},
            "items": [{"metadata": {"name": name}} for name in self.names[first:last]],
        }


def listed(server: Lists, page: int) -> watching.Watch[str]:
    return watching.Watch[str](
        server, PATH, about="datasets", changed=lambda: None, page=page,
        keep=lambda thing: str(thing["metadata"]["name"]),
    )  # fmt: skip


async def test_nobody_sees_half_of_a_list_in_pages() -> None:
    server = Lists()
    watch = listed(server, page=3)
    seen: list[int] = []
    server.look = lambda: seen.append(len(watch.objects))
    for _ in range(2):
        await watch.look()
    assert sorted(watch.objects) == server.names
    assert seen == [0, 0, 0, 7, 7, 7]
    once = [{"limit": "3"}, {"limit": "3", "continue": "3"}, {"limit": "3", "continue": "6"}]
    assert server.asked == once * 2


async def test_list_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_PAGES", 2)
    with pytest.raises(client.KubeError, match="more than 2 pages"):
        await listed(Lists(), page=3).look()
    monkeypatch.setattr(watching, "MOST_OBJECTS", 5)
    with pytest.raises(client.KubeError, match="at most 5 objects"):
        await listed(Lists(), page=3).look()


Event = dict[str, Any]
END = {watching.MARK: "true"}


class Streams(Lists):
    """Each stream or watch gets the next of ``script``, and after the last one nothing."""

    def __init__(self, *script: list[Event] | client.KubeError) -> None:
        super().__init__()
        self.script = list(script)
        self.streams: list[dict[str, str]] = []

    async def lines(self, path: str, **_: Any) -> AsyncGenerator[Event, None]:
        query = dict(urllib.parse.parse_qsl(path.partition("?")[2], keep_blank_values=True))
        if "sendInitialEvents" in query:
            self.streams.append(query)
        said = self.script.pop(0) if self.script else []
        if isinstance(said, client.KubeError):
            raise said
        for each in said:
            yield each


def event(kind: str, name: str = "", version: int = 1, notes: Any = None) -> Event:
    meta = {"name": name, "resourceVersion": str(version), "annotations": notes}
    return {"type": kind, "object": {"metadata": meta}}


MARK = event("BOOKMARK", version=7, notes=END)


def answer(status: int) -> client.KubeError:
    return client.KubeError("datasets", f"the API server answers {status}", status)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(watching, "SPREAD_SECONDS", 0.0)


@pytest.mark.usefixtures("no_pauses")
async def test_streamed_list_takes_the_place_of_what_was_known_at_its_mark() -> None:
    first = [event("ADDED", "a"), event("ADDED", "b"), event("BOOKMARK"), MARK]
    server = Streams([*first, event("ADDED", "c", 8)], [event("ADDED", "b"), MARK])
    seen: list[list[str]] = []
    watch = listed(server, page=0)
    watch._changed = lambda: seen.append(sorted(watch.objects))
    await watch._begin()
    assert seen == [["a", "b"], ["a", "b", "c"]]
    assert (watch.synced, watch._version, watch.lists) == (True, "8", 1)
    watch._version = ""
    await watch._begin()
    assert (sorted(watch.objects), watch._version, watch.lists) == (["b"], "7", 2)
    assert watch.deleted == set()  # nobody saw it
    assert server.asked == []  # no list
    wanted = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan",
              "allowWatchBookmarks": "true", "resourceVersion": "0"}  # fmt: skip
    assert all(each.items() >= wanted.items() for each in server.streams)


async def test_list_that_few_ask_for_is_streamed_as_new_as_etcd() -> None:
    server = Streams([MARK])
    await listed(server, page=500)._begin()
    assert server.streams[0]["resourceVersion"] == ""


async def test_deletion_in_a_stream_is_seen() -> None:
    script = [event("ADDED", "a"), event("ADDED", "b"), event("DELETED", "a"), MARK]
    watch = listed(Streams(script), page=0)
    watch.objects = {"a": "a"}
    await watch._begin()
    assert (sorted(watch.objects), watch.deleted) == (["b"], {"a"})


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    "refusal",
    [
        answer(400),
        answer(422),
        [{"type": "ERROR", "object": {"code": 500, "message": "the storage feature is disabled"}}],
    ],
)
async def test_server_without_streams_is_listed_and_asked_again_much_later(refusal: Any) -> None:
    server = Streams(refusal)
    one, other = listed(server, page=0), listed(server, page=0)
    for each in (one, other, one):
        each._version = ""
        await each._begin()
    assert (one.lists, other.lists) == (2, 1)
    assert len(server.streams) == 1 and len(server.asked) == 3
    assert sorted(one.objects) == server.names
    server.no_streams_until -= watching.NO_STREAMS_SECONDS
    server.script, one._version = [[MARK]], ""
    await one._begin()
    assert len(server.streams) == 2 and len(server.asked) == 3


@pytest.mark.usefixtures("no_pauses")
async def test_stream_without_a_mark_is_given_up_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from a server that knows nothing of it: it sends the objects, and then what changes."""
    monkeypatch.setattr(watching, "MARK_SECONDS", 0.05)
    server = Streams([event("ADDED", "a")])
    ended = asyncio.Event()
    sent = server.lines

    async def lines(path: str, **more: Any) -> AsyncGenerator[Event, None]:
        try:
            async for each in sent(path, **more):
                yield each
            if "sendInitialEvents" in path:
                await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(server, "lines", lines)
    watch = listed(server, page=0)
    with pytest.raises(client.KubeError, match="without an end"):
        await watch._begin()
    assert ended.is_set() and not watch.synced and not watch.objects
    await watch._begin()
    assert sorted(watch.objects) == server.names
    assert len(server.streams) == 1


async def test_stream_that_ends_before_its_mark_counts_as_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    server = Streams(answer(429), [event("ADDED", "a")], [MARK])
    watch = listed(server, page=0)
    with monkeypatch.context() as patched:
        patched.setattr("kube.watching.asyncio.sleep", sleep)
        for wrong in ("429", "before its time"):
            with pytest.raises(client.KubeError, match=wrong):
                await watch._begin()
            assert pauses == []  # what the server refused for the moment costs it nothing
        await watch._begin()
    assert pauses[0] > watching.LIST_SECONDS / 2
    assert (watch.lists, watch.synced, server.asked) == (2, True, [])


async def test_stream_of_too_many_objects_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_OBJECTS", 2)
    with pytest.raises(client.KubeError, match="at most 2 objects"):
        await listed(Streams([event("ADDED", name) for name in "abc"]), page=0)._begin()


class Etcds(client.ApiServer):
    """Answers of an API server: by a kind's path the version that its etcd is at."""

    def __init__(self, versions: dict[str, int]) -> None:
        super().__init__(AccessSettings(server="https://localhost:1"))
        self.now = versions

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        version = str(self.now[path.partition("?")[0]])
        return {"metadata": {"resourceVersion": version}, "items": []}


def following(server: client.ApiServer, path: str) -> watching.Watch[str]:
    return watching.Watch[str](
        server, path, about=path, changed=lambda: None, keep=lambda thing: str(thing)
    )


NODES, IMAGES = "/api/v1/nodes", f"{kinds.API}/imagesets"


async def test_nodes_in_an_etcd_of_their_own_say_nothing_of_other_kinds() -> None:
    server = Etcds({NODES: 1_000_000, PATH: 5})
    nodes, datasets = following(server, NODES), following(server, PATH)
    await nodes.look()
    await datasets.look()
    for version in (6, 7, 8):  # a connection that breaks again and again
        server.now[PATH] = version
        server.now[NODES] += 1
        await datasets._compare()
        await nodes._compare()
    assert server.epoch == 0


async def test_kinds_of_one_group_notice_together_that_their_etcd_is_another_one() -> None:
    """A kind that nobody changes has seen low versions only, and cannot tell by itself."""
    server = Etcds({NODES: 1_000_000, PATH: 50, IMAGES: 5})
    nodes, datasets, images = (following(server, each) for each in (NODES, PATH, IMAGES))
    for each in (nodes, datasets, images):
        await each.look()
    server.now |= {PATH: 20, IMAGES: 20}
    for each in (images, datasets):
        with pytest.raises(watching._GoneError):
            await each._compare()
        await each.look()
        await each._compare()
    await nodes._compare()
    assert server.epoch == 1


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (f"{PATH}?limit=1", "nodeagent.io"),
        (f"{kinds.API}/nodestorages/n1/status", "nodeagent.io"),
        ("/api/v1/nodes?watch=1", "/nodes"),
        ("/api/v1/namespaces/a/secrets/b", "/secrets"),
        ("/apis/coordination.k8s.io/v1/namespaces/a/leases/b", "coordination.k8s.io/leases"),
        ("/apis/apps/v1/daemonsets", "apps/daemonsets"),
    ],
)
def test_versions_are_compared_within_what_shares_an_etcd(path: str, part: str) -> None:
    assert client.part_of(path) == part


async def test_list_that_all_agents_ask_for_is_from_the_cache() -> None:
    server = Lists()
    await listed(server, page=0).look()
    assert server.asked == [{"resourceVersion": "0"}]


async def test_pause_that_the_server_asks_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path, "localhost")
    (tmp_path / "token").write_text("t")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 0\r\n"
            b"Connection: close\r\n\r\n"
        )
        writer.close()

    listening = await asyncio.start_server(busy, "localhost", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server = client.ApiServer(
        AccessSettings(
            server=f"https://localhost:{port}", ca_file=tmp_path / "tls.crt",
            token_file=tmp_path / "token",
        )
    )  # fmt: skip
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    watch = watching.Watch[Any](
        server, PATH, about="datasets", changed=lambda: None, keep=lambda thing: thing
    )
    try:
        with monkeypatch.context() as patched, pytest.raises(asyncio.CancelledError):
            patched.setattr("kube.watching.asyncio.sleep", sleep)
            await watch.follow()
    finally:
        await server.close()
        listening.close()
    assert min(pauses) >= 6.0, pauses  # what is left of it
    assert server.requests == 1  # until then nothing is sent
