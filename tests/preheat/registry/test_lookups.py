"""What a lookup sends and believes, at a registry in memory."""

import asyncio
import contextlib
import gzip
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.image import manifest
from preheat.registry import client as registry
from preheat.registry import failure
from preheat.runtimes import base
from tests.preheat.registry.test_resolver import LOGIN, REF, Node, docker_config, node
from tests.testbed import front, waiting

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


class Image:
    """The image ``REF`` in the files of a server. ``layers``: unpacked bytes."""

    def __init__(self, server: front.Front, *layers: bytes, tag: str = "v1") -> None:
        self._server = server
        layers = layers or (b"layer",)
        diff_ids = [manifest.digest_of(each) for each in layers]
        self.config = self.put("blobs", CONFIG, self.json({"rootfs": {"diff_ids": diff_ids}}))
        packed = [gzip.compress(each, mtime=0) for each in layers]
        self.layers = [self.put("blobs", f"{LAYER}+gzip", each) for each in packed]
        body = {"config": self.config, "layers": self.layers, "mediaType": MANIFEST}
        self.top = self.put("manifests", MANIFEST, self.json(body))
        self.tag(tag, MANIFEST, self.json(body))

    @staticmethod
    def json(value: object) -> bytes:
        return json.dumps(value).encode()

    def tag(self, tag: str, kind: str, data: bytes) -> None:
        self._server.files[f"/v2/fw/looked/manifests/{tag}"] = (kind, data)

    def put(self, place: str, kind: str, data: bytes) -> dict[str, Any]:
        """Its descriptor."""
        digest = manifest.digest_of(data)
        self._server.files[f"/v2/fw/looked/{place}/{digest}"] = (kind, data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}


@contextlib.contextmanager
def running() -> Iterator[front.Front]:
    made = front.Front(0)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@contextlib.asynccontextmanager
async def looking(*of: Any, **more: Any) -> AsyncIterator[Node]:
    made = node(*of, **more)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def server() -> Iterator[front.Front]:
    with running() as made:
        yield made


async def test_a_proxy_project_is_asked_with_the_scope_that_it_wants(
    server: front.Front, tmp_path: Path
) -> None:
    """Its repositories have other names than those in the reference (override_path)."""
    Image(server)
    server.project = "cache"
    with running() as empty:
        mirror = f'[host."{server.url}/v2/cache"]\noverride_path = true\n'
        async with looking(tmp_path, empty, mirror) as one:
            lookup = await one.look()

    assert lookup.shape is not None, lookup.failed
    asked = next(each for each in server.asked() if each.path == "/token")
    for path in ("fw/looked", "cache/fw/looked"):
        assert f"scope=repository:{path}:pull" in asked.query


@pytest.mark.parametrize("login", [base.Login(), base.Login(identity_token="i")])
@pytest.mark.parametrize(
    ("asked", "scopes"),
    [
        ("", ["repository:a/b:pull"]),
        (',scope="repository:a/b:pull"', ["repository:a/b:pull"]),
        (',scope="repository:p/a/b:pull"', ["repository:a/b:pull", "repository:p/a/b:pull"]),
        (',scope="x:1:y  z:2:y"', ["repository:a/b:pull", "x:1:y", "z:2:y"]),
    ],
)
def test_a_token_is_for_our_scope_and_the_challenges(
    login: base.Login, asked: str, scopes: list[str]
) -> None:
    challenge = f'Bearer realm="https://t.e/token",service="s"{asked}'
    found = registry._answer_to(challenge, "a/b", login, encrypted=True)
    assert isinstance(found, registry._TokenQuestion)
    sent = found.form if login.identity_token else found.query
    assert sent is not None
    assert sent["scope"] == (" ".join(scopes) if login.identity_token else scopes)


async def test_no_netrc_makes_a_private_image_public(
    server: front.Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one break a request that has a header of its own."""
    Image(server)
    netrc = tmp_path / "netrc"
    netrc.write_text(f'machine 127.0.0.1 login {LOGIN[0]} password "{LOGIN[1]}"\n')
    monkeypatch.setenv("NETRC", str(netrc))
    server.login = LOGIN
    async with looking(tmp_path, server) as one:
        nameless = await one.look()
        found = nameless.shape, nameless.failed
    server.bearer = True
    async with looking(tmp_path, server, **docker_config(tmp_path)) as named:
        shape = (await named.look()).shape

    assert found[0] is None
    assert found[1] is not None
    assert found[1].kind is failure.Kind.AUTH
    assert shape is not None


async def test_a_proxy_of_the_environment_is_used_for_each_redirect(
    server: front.Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it says for each host: the server is not to be proxied, where its blobs are is."""
    image = Image(server)
    server.elsewhere = "http://blobs.example"
    with running() as proxy:
        Image(proxy)
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with looking(tmp_path, server) as one:
            lookup = await one.look()

    assert lookup.shape is not None, lookup.failed
    (asked,) = proxy.asked()
    assert asked.path == f"/v2/fw/looked/blobs/{image.config['digest']}"


async def test_a_server_that_compresses_sends_documents_as_they_are(
    server: front.Front, tmp_path: Path
) -> None:
    Image(server)
    server.compresses = True
    async with looking(tmp_path, server) as one:
        lookup = await one.look()

    assert lookup.shape is not None, lookup.failed


async def test_blobs_that_flow_leave_connections_for_documents(
    server: front.Front, tmp_path: Path
) -> None:
    """Layers under a rate limit hold their connections for hours."""
    image = Image(server, random.Random(1).randbytes(200_000))
    server.rate = 100
    ref, digest = manifest.parse(REF), str(image.layers[0]["digest"])
    async with looking(tmp_path, server) as one, asyncio.timeout(waiting.limit(20)):
        streams = [one.client.blob(ref, digest, 0, None) for _ in range(registry.MOST_STREAMS)]
        begun = await asyncio.gather(*(anext(each) for each in streams))
        lookup = await one.look()
        server.rate = 0
        for each in streams:
            await each.aclose()

    assert all(begun)
    assert lookup.shape is not None, lookup.failed


# --- unpacked sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "ranges", "known", "asked"),
    [
        (bytes(150_000_000), True, 150_000_000, 1),  # a log of a user with a large id
        (random.Random(1).randbytes(400_000), False, 0, 1),
        (random.Random(1).randbytes(1000), True, 0, 0),  # too small to be worth a request
    ],
    ids=["zeros", "no ranges", "small"],
)
async def test_a_layer_is_asked_once_how_large_it_becomes(
    server: front.Front, tmp_path: Path, layer: bytes, ranges: bool, known: int, asked: int
) -> None:
    image = Image(server, layer)
    server.ranges = ranges
    path = f"/v2/fw/looked/blobs/{image.layers[0]['digest']}"
    for _ in range(2):  # over a restart, too
        async with looking(tmp_path, server) as one:
            shape = (await one.look()).shape
            again = (await one.look()).shape
        assert shape is not None
        assert shape == again
        assert shape.layers[0].unpacked == known

    assert sum(each.path == path for each in server.asked()) == asked


async def test_a_layer_that_does_not_say_its_size_fails_no_lookup(
    server: front.Front, tmp_path: Path
) -> None:
    image = Image(server, random.Random(1).randbytes(400_000))
    del server.files[f"/v2/fw/looked/blobs/{image.layers[0]['digest']}"]
    async with looking(tmp_path, server) as one:
        lookup = await one.look()

    assert lookup.failed is None
    assert lookup.shape is not None
    assert lookup.shape.layers[0].unpacked == 0


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "lacks it"])
async def test_layers_that_do_not_say_their_size_are_asked_up_to_the_first(
    hangs: bool, server: front.Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of 40 layers waited half a minute for each, and the image was not pulled."""
    monkeypatch.setattr(registry, "DOCUMENT_SECONDS", 0.5)
    monkeypatch.setattr(registry, "MEASURE_SECONDS", 0.5, raising=False)
    image = Image(server, *(random.Random(n).randbytes(200_000) for n in range(3)))
    paths = [f"/v2/fw/looked/blobs/{each['digest']}" for each in image.layers]
    _, config = server.files[f"/v2/fw/looked/blobs/{image.config['digest']}"]
    with running() as blobs:
        blobs.hangs, server.elsewhere = hangs, blobs.url
        blobs.files["/"] = ("text/plain", b"")
        async with looking(tmp_path, server) as one:
            await one.client.documents.put(image.config["digest"], config)
            shapes = [(await one.look()).shape for _ in range(2)]

        asked = [each.path for each in blobs.asked()]
    assert [[each.unpacked for each in shape.layers] for shape in shapes if shape] == [[0] * 3] * 2
    assert asked == [paths[0]] * (1 if hangs else 2)


# --- servers that do not answer -------------------------------------------------------------------


async def test_a_mirror_that_hangs_is_asked_last_for_a_while(
    server: front.Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lookup waited for it, three times half a minute."""
    monkeypatch.setattr(registry, "DOCUMENT_SECONDS", 0.5)
    Image(server)
    with running() as mirror:
        mirror.hangs = True
        async with looking(tmp_path, server, f'[host."{mirror.url}"]\n') as one:
            first = (await one.look()).shape
            asked = len(mirror.seen)
            again = (await one.look()).shape
            after = len(mirror.seen)
            monkeypatch.setattr(registry, "HUNG_SECONDS", 0.0)
            await one.look()
            later = len(mirror.seen)

    assert first == again
    assert first is not None
    assert (asked, after, later) == (1, 1, 2)
