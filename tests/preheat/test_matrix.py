"""Every registry that we know of with every containerd: what comes of it.

All registries of a test are there at once, and one room pulls from all of them.
"""

import base64
import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.component import Preheat
from tests.preheat.rig import MB, Rig, find, started, until
from tests.testbed import containerd, front, proxy, registry

LOGIN = ("team", "correct horse")
ANYBODY = front.Seen("GET", "/", "", 200, False, "another client", {})

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@dataclasses.dataclass
class Case:
    """One registry. ``prepare`` sets its trouble."""

    prepare: Callable[[front.Front], None] = lambda _: None
    login: str = ""  # the node's password
    shared: bool = False
    # containerd 1.x passes over a hosts.toml without a [host] table.
    hosts: str = 'server = "{url}"\n[host."{url}"]\n'
    trust: str = ""  # whose certificate it has
    size: int = MB
    expected: str = "ready"


def setting(**values: Any) -> Callable[[front.Front], None]:
    def prepare(server: front.Front) -> None:
        for name, value in values.items():
            setattr(server, name, value)

    return prepare


def limited(server: front.Front) -> None:
    server.login, server.bearer, server.anonymous_limit = LOGIN, True, 1
    server.seen.append(ANYBODY)


_PRIVATE: dict[str, Any] = {"login": LOGIN[1], "shared": True}
CASES = {
    "plain": Case(),
    "Basic login": Case(setting(login=LOGIN), **_PRIVATE),
    "login by token": Case(setting(login=LOGIN, bearer=True), **_PRIVATE),
    "wrong login": Case(
        setting(login=LOGIN), login="wrong donkey", shared=True, expected="failed: auth"
    ),
    "private, not to be shared": Case(setting(login=LOGIN), login=LOGIN[1], expected="refused"),
    "429 to anonymous clients, and a login": Case(limited, login=LOGIN[1]),
    "unknown kind of login": Case(
        setting(login=LOGIN, scheme="Moon x=1"), **_PRIVATE, expected="failed: auth"
    ),
    "private CA, client certificate": Case(
        hosts='server = "{url}"\n[host."{url}"]\nca = "{own}.ca.crt"\n'
        'client = [["{own}.crt", "{own}.key"]]\n',
        trust="own",
    ),
    "blobs from another host with another CA": Case(
        hosts='server = "{url}"\n[host."{url}"]\nca = "{own}.ca.crt"\n', trust="own"
    ),
    "mirror that needs `ns=`, registry away": Case(
        setting(namespace="case9.example"),
        hosts='server = "http://127.0.0.1:1"\n[host."{url}"]\n',
    ),
    "no ranges, dies in a blob": Case(
        setting(ranges=False, dies_after=3 * MB, deaths=1), size=5 * MB
    ),
    "slow": Case(setting(rate=MB)),
    "dies three times in a blob": Case(setting(dies_after=3 * MB, deaths=3), size=8 * MB),
    "documents that the agent cannot read": Case(
        setting(broken_documents=True), expected="ready, by the runtime"
    ),
    "refuses the agent, not containerd": Case(
        setting(refuses_agent=True), expected="ready, by the runtime"
    ),
    "away": Case(
        hosts='server = "http://127.0.0.1:1"\n[host."http://127.0.0.1:1"]\n',
        expected="failed: network",
    ),
    "no such tag": Case(setting(namespace="nobody.example"), expected="failed: not_found"),
}


def outcome(room: Preheat, ref: str) -> str:
    row = find(room, ref)
    if row is None:
        return ""
    if row.state == "ready":
        return "ready, by the runtime" if "the runtime pulls it" in row.reason else "ready"
    kind = f": {row.failure_kind}" if row.state == "failed" else ""
    return f"{row.state}{kind}"


@pytest.fixture
def servers(
    images: registry.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, front.Front]]:
    """A front for each case; blobs that are elsewhere come from "store"."""
    own, other = (front.authority(tmp_path, name) for name in ("own", "other"))
    monkeypatch.setenv("SSL_CERT_FILE", str(other.ca))
    made = {
        name: front.Front(images.port, own if case.trust else None) for name, case in CASES.items()
    }
    made["store"] = front.Front(images.port, other)
    with contextlib.ExitStack() as stack:
        for each in made.values():
            each.start()
            stack.callback(each.stop)
        for name, case in CASES.items():
            case.prepare(made[name])
        made["private CA, client certificate"].require(own.ca)
        made["blobs from another host with another CA"].elsewhere = made["store"].url
        yield made


def prepared(rig: Rig, servers: dict[str, front.Front], release: str) -> dict[str, Any]:
    """Push an image for each case and make its hosts.toml; the settings, images by case."""
    auths, wanted = {}, []
    for number, (name, case) in enumerate(CASES.items()):
        host = f"case{number}.example"
        place = rig.daemon.certs / host
        place.mkdir(parents=True)
        text = case.hosts.format(url=servers[name].url, own=rig.folder / "own")
        (place / "hosts.toml").write_text(text)
        layer = registry.layer(f"case{number}", case.size, 300 + number)
        rig.images.push(f"fw/case{number}", "v1", [layer], mark=release)
        wanted.append({"ref": f"{host}/fw/case{number}:v1", "share_private": case.shared})
        if case.login:
            auth = base64.b64encode(f"{LOGIN[0]}:{case.login}".encode()).decode()
            auths[host] = {"auth": auth}
    file = rig.folder / "docker.json"
    file.write_text(json.dumps({"auths": auths}))
    return {
        "images": wanted,
        "concurrency": 16,
        "credentials": {"docker_config": [str(rig.folder / "missing"), str(file)]},
    }


async def test_each_registry_has_its_outcome(
    images: registry.Registry,
    gate: proxy.Proxy,
    release: str,
    servers: dict[str, front.Front],
    tmp_path: Path,
) -> None:
    daemon = containerd.Containerd(tmp_path / "containerd", release)
    daemon.environment["SSL_CERT_FILE"] = str(tmp_path / "other.ca.crt")
    async with started(images, gate, daemon, tmp_path) as rig:
        more = prepared(rig, servers, release)
        refs = dict(zip(CASES, (each["ref"] for each in more["images"]), strict=True))
        expected = {name: case.expected for name, case in CASES.items()}
        async with rig.running(**more) as room:

            def found() -> dict[str, str]:
                return {name: outcome(room, ref) for name, ref in refs.items()}

            def wrong() -> dict[str, str]:
                return {name: text for name, text in found().items() if text != expected[name]}

            with contextlib.suppress(AssertionError):
                await until(lambda: not wrong(), 60.0, "the outcomes")
            got = found()
            shown = {name: find(room, ref) for name, ref in refs.items()}
            metrics = str(list(room.metrics()))

    assert {name: (got[name], shown[name]) for name in got if got[name] != expected[name]} == {}
    # What a half-fetched layer has is not fetched again, where the registry has ranges.
    assert servers["dies three times in a blob"].blob_bytes <= 1.3 * 8 * MB
    assert re.search(r"lookup_failures", metrics)
    assert "donkey" not in str(shown)
