"""Mirrors, authorities and headers as containerd has them: what hosts.toml says, and asked."""

import contextlib
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.image import manifest
from preheat.registry import client as registry
from preheat.registry import documents, hosts
from preheat.registry.failure import Kind, PullError
from tests.testbed import front
from tests.testbed import registry as real

NAME = "reg.example"


def write(root: Path, text: str, name: str = NAME) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.toml").write_text(text)
    return folder


def test_hosts_come_in_their_order_with_all_that_their_tables_say(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        'server = "https://upstream.example"\n'
        'ca = "/etc/own.crt"\n'
        '[host."http://mirror.example:5000"]\n  capabilities = ["pull", "resolve"]\n'
        '[host."https://blobs.example/v2/cache"]\n  capabilities = ["pull"]\n'
        "  override_path = true\n"
        '[host."https://own.example/prefix"]\n  ca = ["a.crt", "b.crt"]\n  skip_verify = true\n'
        '  client = [["c.cert", "c.key"]]\n'
        '[host."https://own.example/prefix".header]\n  X-Team = ["a", "b"]\n  X-Key = "k"\n',
    )
    first, blobs, own, last = hosts.of([tmp_path], NAME)

    assert first.url == "http://mirror.example:5000/v2"
    assert first.abilities == {"pull", "resolve"}
    assert first.namespace == blobs.namespace == own.namespace == last.namespace == NAME
    assert blobs.url == "https://blobs.example/v2/cache"
    assert blobs.abilities == {"pull"}
    assert own.url == "https://own.example/prefix/v2"
    assert own.cas == (str(folder / "a.crt"), str(folder / "b.crt"))
    assert own.clients == ((str(folder / "c.cert"), str(folder / "c.key")),)
    assert own.headers == (("X-Team", "a"), ("X-Team", "b"), ("X-Key", "k"))
    assert "X-Key" not in repr(own), "a header may be a login"
    assert not own.verify
    assert last.url == "https://upstream.example/v2"
    assert last.cas == ("/etc/own.crt",)
    assert [each.origin for each in (first, blobs, own, last)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("name", "url", "namespace"),
    [
        ("reg.example", "https://reg.example/v2", ""),
        (manifest.HUB, f"https://{manifest.HUB_SERVER}/v2", ""),
        ("127.0.0.1:5000", "http://127.0.0.1:5000/v2", ""),
        ("localhost:443", "https://localhost:443/v2", ""),
    ],
)
def test_a_registry_without_directory_is_asked_itself(
    tmp_path: Path, name: str, url: str, namespace: str
) -> None:
    (own,) = hosts.of([tmp_path], name)
    assert (own.url, own.namespace, own.origin) == (url, namespace, True)


def test_the_own_server_follows_the_mirrors_and_is_asked_once(tmp_path: Path) -> None:
    write(tmp_path, '[host."https://mirror.example"]\n')
    assert [each.url for each in hosts.of([tmp_path], NAME)] == [
        "https://mirror.example/v2", "https://reg.example/v2",
    ]  # fmt: skip
    write(tmp_path, 'server = "http://one.example"\n[host."http://one.example"]\n')
    (one,) = hosts.of([tmp_path], NAME)
    assert one.origin


@pytest.mark.parametrize("name", ["reg.example_5000_", "reg.example:5000", "_default"])
def test_directories_by_port_name_or_default_in_the_first_root_that_has_one(
    tmp_path: Path, name: str
) -> None:
    one, two, three = (tmp_path / each for each in "abc")
    write(two, 'server = "https://two.example"\n', name)
    write(three, 'server = "https://three.example"\n', "reg.example_5000_")
    roots = hosts.roots(f"{one}:{two}:{three}")
    assert hosts.of(roots, "reg.example:5000")[-1].url == "https://two.example/v2"


def test_certificates_in_the_layout_of_docker(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    for name in ("ca.crt", "one.cert", "one.key", "two.cert"):
        (folder / name).touch()
    (own,) = hosts.of([tmp_path], NAME)
    assert own.cas == (str(folder / "ca.crt"),)
    assert own.clients == (
        (str(folder / "one.cert"), str(folder / "one.key")), (str(folder / "two.cert"), ""),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["not toml [", "host = 5", '[host."https://a"]\ncapabilities = ["fly"]', '[host."https://"]',
     '[host."https://a"]\nclient = [["a", "b", "c"]]', '[host."https://a"]\nca = 5'],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ValueError, match=r"hosts\.toml"):
        hosts.of([tmp_path], NAME)


# --- asked ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def fronted(images: real.Registry, trust: front.Authority | None = None) -> Iterator[front.Front]:
    server = front.Front(images.port, trust)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def look(root: Path, name: str, tag: str = "v1") -> manifest.Shape:
    """Look ``name`` up with a new client."""
    with tempfile.TemporaryDirectory() as folder:
        client = registry.Registry([root], documents.Documents(Path(folder)))
        try:
            return await ask(client, name, tag)
        finally:
            await client.close()


async def ask(client: registry.Registry, name: str, tag: str = "v1") -> manifest.Shape:
    ref = manifest.parse(f"{NAME}/{name}:{tag}")
    return await client.shape(ref, await client.resolve(ref, None), "linux/amd64", None)


@pytest.fixture
def pushed(images: real.Registry) -> real.Pushed:
    return images.push("fw/hosts", "v1", [real.layer("hosts", 100_000, 7)])


async def test_a_mirror_that_needs_the_namespace_answers(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    with fronted(images) as mirror:
        mirror.namespace = NAME
        write(tmp_path, f'server = "http://127.0.0.1:1"\n[host."{mirror.url}"]\n')
        shape = await look(tmp_path, "fw/hosts")

    assert shape.top.digest == pushed.top
    assert {each.query for each in mirror.asked()} == {f"ns={NAME}"}


async def test_a_private_authority_is_trusted_beside_the_systems(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a registry that sends its blobs from an object store."""
    own, other = (front.authority(tmp_path, name) for name in ("own", "other"))
    monkeypatch.setenv("SSL_CERT_FILE", str(other.ca))
    with fronted(images, own) as server, fronted(images, other) as store:
        server.elsewhere = store.url
        write(tmp_path, f'server = "{server.url}"\nca = "{own.ca}"\n')
        shape = await look(tmp_path, "fw/hosts")

    assert shape.image_id == pushed.config
    assert store.asked()


async def test_rotated_authorities_and_certificates_take_effect_at_once(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    old = front.authority(tmp_path / "ca", "own")
    before = old.ca.read_bytes()
    with fronted(images, old) as server:
        write(tmp_path, f'server = "{server.url}"\nca = "{old.ca}"\n')
        client = registry.Registry([tmp_path], documents.Documents(tmp_path / documents.FOLDER))
        try:
            first = await ask(client, "fw/hosts")
            new = front.authority(tmp_path / "ca", "own")
            server.rotate(new)
            second = await ask(client, "fw/hosts")
            new.ca.write_bytes(before)
            with pytest.raises(PullError, match=r"(?i)certificate") as caught:
                await ask(client, "fw/hosts")
        finally:
            await client.close()

    assert first == second
    assert caught.value.kind is Kind.NETWORK


async def test_client_certificates_and_headers_are_sent(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    own = front.authority(tmp_path, "own")
    with fronted(images, own) as server:
        server.require(own.ca)
        server.wanted_header = ("X-Team", "a")
        text = f'server = "{server.url}"\nca = "{own.ca}"\n'
        write(tmp_path, text)
        with pytest.raises(PullError) as caught:
            await look(tmp_path, "fw/hosts")
        text += f'client = [["{own.certificate}", "{own.key}"]]\n[header]\n  X-Team = "a"\n'
        write(tmp_path, text)
        shape = await look(tmp_path, "fw/hosts")

    assert caught.value.kind is Kind.NETWORK
    assert shape.top.digest == pushed.top


async def test_what_a_mirror_lacks_comes_from_the_registry(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    with fronted(images) as mirror, fronted(images) as server:
        mirror.namespace = "other.example"
        write(tmp_path, f'server = "{server.url}"\n[host."{mirror.url}"]\n')
        shape = await look(tmp_path, "fw/hosts")
        with pytest.raises(PullError) as missing:
            await look(tmp_path, "fw/hosts", "nobody-pushed-it")
        server.login = ("a", "b")
        with pytest.raises(PullError) as secret:
            await look(tmp_path, "fw/hosts")

    assert shape.top.digest == pushed.top
    assert missing.value.kind is Kind.NOT_FOUND
    assert secret.value.kind is Kind.AUTH


async def test_a_bad_ca_file_is_named_and_only_that_server_is_not_asked(
    images: real.Registry, pushed: real.Pushed, tmp_path: Path
) -> None:
    (tmp_path / "bad.crt").write_text("nonsense")
    with fronted(images) as server:
        write(
            tmp_path, f'server = "{server.url}"\n[host."https://127.0.0.1:1"]\nca = "../bad.crt"\n'
        )
        assert (await look(tmp_path, "fw/hosts")).top.digest == pushed.top
    write(tmp_path, 'server = "https://127.0.0.1:1"\nca = "../bad.crt"\n')
    with pytest.raises(PullError, match=r"bad\.crt"):
        await look(tmp_path, "fw/hosts")


def test_tls_without_verification_still_sends_client_certificates(tmp_path: Path) -> None:
    own = front.authority(tmp_path, "own")
    pair = (str(own.certificate), str(own.key))
    made = hosts.context(hosts.Host("https://a/v2", clients=(pair,), verify=False))
    assert made.verify_mode is ssl.CERT_NONE
