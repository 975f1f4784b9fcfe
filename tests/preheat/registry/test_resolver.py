"""Lookups at a real registry: what they cost, whose logins they use, and what is private."""

import base64
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat import settings
from preheat.registry import client as registry
from preheat.registry import credentials, documents, failure, resolver, schedule
from tests.testbed import front
from tests.testbed import registry as real

NAME = "reg.example"
REF = f"{NAME}/fw/looked:v1"
LOGIN = ("team", "correct horse")


@dataclasses.dataclass
class Node:
    """What one agent has for its lookups."""

    folder: Path
    server: front.Front
    section: settings.PreheatSettings
    lookups: resolver.Resolver
    client: registry.Registry

    async def look(self, ref: str = REF) -> resolver.Lookup:
        """Look ``ref`` up now."""
        known = self.lookups.of(ref)
        if known is not None:
            known.at, known.failed = 0.0, None
        self.lookups.request({ref: True})
        found = self.lookups.of(ref)
        assert found is not None and found.task is not None
        await found.task
        return found

    async def close(self) -> None:
        await self.lookups.close()
        await self.client.close()


def node(folder: Path, server: front.Front, mirror: str = "", **more: Any) -> Node:
    certs = folder / "certs" / NAME
    certs.mkdir(parents=True, exist_ok=True)
    (certs / "hosts.toml").write_text(f'server = "{server.url}"\n{mirror}')
    section = settings.PreheatSettings.model_validate(
        {"spread": 0, "platform": "linux/amd64", **more}
    )
    client = registry.Registry([folder / "certs"], documents.Documents(folder / documents.FOLDER))
    turns = schedule.Schedule(section)
    lookups = resolver.Resolver(client, credentials.Credentials(), turns, lambda: None)
    return Node(folder, server, section, lookups, client)


@contextlib.contextmanager
def fronted(images: real.Registry) -> Iterator[front.Front]:
    server = front.Front(images.port)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(images: real.Registry) -> Iterator[front.Front]:
    with fronted(images) as made:
        yield made


@pytest.fixture
def pushed(images: real.Registry) -> real.Pushed:
    return images.push("fw/looked", "v1", [real.layer("looked", 100_000, 8, level=1)])


def docker_config(folder: Path, password: str = LOGIN[1]) -> dict[str, Any]:
    auth = base64.b64encode(f"{LOGIN[0]}:{password}".encode()).decode()
    file = folder / "docker.json"
    file.write_text(json.dumps({"auths": {NAME: {"auth": auth}}}))
    return {"credentials": {"docker_config": str(file)}}


def methods(server: front.Front) -> list[str]:
    found = [each.method for each in server.asked() if each.path != "/token"]
    server.seen.clear()
    return found


# --- what a lookup costs --------------------------------------------------------------------------


async def test_an_unchanged_tag_costs_one_head_over_restarts_too(
    server: front.Front, pushed: real.Pushed, images: real.Registry, tmp_path: Path
) -> None:
    one = node(tmp_path, server)
    first = (await one.look()).shape
    begun = methods(server)
    again = (await one.look()).shape
    refreshed = methods(server)
    await one.close()
    other = node(tmp_path, server)
    restarted = (await other.look()).shape
    after = methods(server)
    moved = images.push("fw/looked", "v1", [real.layer("moved", 1000, 9)])
    new = (await other.look()).shape
    fetched = methods(server)
    images.push("fw/looked", "v1", list(pushed.layers))
    await other.close()

    assert first is not None and new is not None
    assert first == again == restarted
    assert first.top.digest == pushed.top
    assert new.top.digest == moved.top
    assert begun == fetched == ["HEAD", "GET", "GET", "GET"]  # index, manifest, config
    assert refreshed == after == ["HEAD"]


async def test_a_damaged_document_is_only_a_miss(
    server: front.Front, pushed: real.Pushed, tmp_path: Path
) -> None:
    one = node(tmp_path, server)
    first = (await one.look()).shape
    await one.close()
    store = documents.Documents(tmp_path / documents.FOLDER)
    await store._do(lambda cache: cache.set(pushed.top, ""))
    await store._do(lambda cache: cache.set(pushed.config, '{"torn'))
    await store.close()
    methods(server)
    other = node(tmp_path, server)
    second = (await other.look()).shape
    damaged = methods(server)
    await other.close()
    (tmp_path / documents.FOLDER / "cache.db").write_bytes(b"x" * 4096)
    third_node = node(tmp_path, server)
    third = (await third_node.look()).shape
    await third_node.look()
    gone = methods(server)
    await third_node.close()

    assert first == second == third
    assert damaged == ["HEAD", "GET", "GET"]
    assert gone == ["HEAD", "GET", "GET", "GET", "HEAD"]


# --- logins ---------------------------------------------------------------------------------------


async def test_a_lookup_keeps_no_login(
    server: front.Front, pushed: real.Pushed, tmp_path: Path
) -> None:
    server.login, server.bearer = LOGIN, True
    one = node(tmp_path, server, **docker_config(tmp_path))
    lookup = await one.look()
    await one.close()

    assert lookup.shape is not None
    assert lookup.private
    assert LOGIN[1] not in str(dataclasses.asdict(dataclasses.replace(lookup, task=None)))


async def test_a_missing_docker_config_fails_only_images_that_need_it(
    server: front.Front, pushed: real.Pushed, tmp_path: Path
) -> None:
    one = node(tmp_path, server, credentials={"docker_config": str(tmp_path / "missing")})
    public = await one.look()
    ready, private = public.shape, public.private
    server.login = LOGIN
    secret = await one.look()
    await one.close()

    assert ready is not None
    assert private is False
    assert secret.failed is not None
    assert "missing" in secret.failed.message


@pytest.mark.parametrize("bearer", [True, False], ids=["token", "basic"])
async def test_the_login_is_used_when_anonymous_clients_are_over_their_limit(
    server: front.Front, pushed: real.Pushed, tmp_path: Path, bearer: bool
) -> None:
    """An anonymous token may say that the image is public; without one it is not known."""
    server.login, server.bearer, server.anonymous_limit = LOGIN, bearer, 1
    server.seen.append(front.Seen("GET", "/", "", 200, False, "another client", {}))
    one = node(tmp_path, server, **docker_config(tmp_path))
    lookup = await one.look()
    await one.close()

    assert lookup.shape is not None
    assert lookup.private is (False if bearer else None)
    assert lookup.has_login
    assert (lookup.failed is None) is bearer


async def test_a_token_service_that_asks_for_a_wait_gets_it(
    server: front.Front, pushed: real.Pushed, tmp_path: Path
) -> None:
    server.login, server.bearer, server.token_wait = LOGIN, True, "120"
    began = time.time()
    one = node(tmp_path, server, **docker_config(tmp_path))
    lookup = await one.look()
    await one.close()

    assert lookup.failed is not None
    assert lookup.failed.kind is failure.Kind.BUSY
    assert lookup.failed.retry_at is not None
    assert lookup.failed.retry_at >= began + 119


async def test_a_public_image_is_asked_for_with_the_login_and_without_a_wrong_one(
    server: front.Front, pushed: real.Pushed, tmp_path: Path
) -> None:
    """Paid limits count for the login."""
    server.login, server.bearer, server.anonymous_limit = LOGIN, True, 1000
    one = node(tmp_path, server, **docker_config(tmp_path))
    public = await one.look()
    named = server.asked()[-1].headers.get("Authorization")
    docker_config(tmp_path, "wrong donkey")
    unnamed = await one.look()
    await one.close()

    assert public.private is unnamed.private is False
    assert unnamed.failed is None
    assert named == "Bearer named"


# --- private --------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [True, False], ids=["login", "none"])
async def test_a_private_image_stays_private_when_a_mirror_answers_without_asking(
    images: real.Registry, server: front.Front, pushed: real.Pushed, tmp_path: Path, login: bool
) -> None:
    server.login = LOGIN
    more = docker_config(tmp_path) if login else {}
    with fronted(images) as mirror:
        mirror.namespace = NAME
        one = node(tmp_path, server, f'[host."{mirror.url}"]\n', **more)
        closed = await one.look()
        private, shape = closed.private, closed.shape
        server.login = None
        closed.private = None  # as after a restart
        opened = await one.look()
        await one.close()

    assert shape is not None
    assert private is True
    assert opened.private is False


async def test_an_image_of_a_mirror_is_not_known_to_be_public_while_its_registry_is_away(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    with fronted(images) as mirror:
        away = front.Front(1)
        one = node(tmp_path, away, f'[host."{mirror.url}"]\n', **docker_config(tmp_path))
        named = await one.look()
        found = named.shape, named.private, named.has_login, named.failed
        await one.close()
        other = node(tmp_path, away, f'[host."{mirror.url}"]\n')
        nameless = await other.look()
        await other.close()
        away._loop.close()

    assert found[0] is not None
    assert found[1:3] == (None, True)
    assert found[3] is not None
    assert nameless.shape is not None
    assert (nameless.private, nameless.has_login, nameless.failed) == (None, False, None)
