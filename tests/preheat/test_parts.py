"""The pure parts: references, wire format, costs, failure classes, credentials, windows, heals."""

import asyncio
import dataclasses
import gzip
import json
import struct
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent import configfile
from nodeagent.settings import Settings
from preheat import credentials, estimate, failure, heal, limiter, manifest, node, registry
from preheat import settings as preheat_settings
from preheat.runtimes import base, cri, leases, wire
from preheat.runtimes import messages as m

DIGEST = "sha256:" + "a" * 64

# --- references -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("reg.example/a/b:v1", "reg.example/a/b:v1"),
        ("reg.example:5000/a", "reg.example:5000/a:latest"),
        ("localhost/a:b", "localhost/a:b"),
        (f"reg.example/a:v1@{DIGEST}", f"reg.example/a@{DIGEST}"),
    ],
)
def test_references_have_one_form(text: str, canonical: str) -> None:
    assert manifest.parse(text).text == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ubuntu",
        "library/ubuntu:1",
        "reg.example/A:v1",
        "reg.example/a:",
        "reg.example/a@sha256:1",
        "reg.example:99999/a:b",
        "reg.example/a b",
        "-x.example/a",
        "reg.example//a",
        "x" * 600,
    ],
)
def test_short_and_malformed_references_are_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"reference|registry|port"):
        manifest.parse(text)


# --- wire format ----------------------------------------------------------------------------------


def values(kind: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is not None and origin.__name__ == "Mapping":
        return st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
    if arguments:
        return st.none() | values(next(a for a in arguments if a is not type(None)))
    simple = {
        str: st.text(max_size=20),
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
    }
    return simple[kind] if kind in simple else messages(kind)


_MADE: dict[str, st.SearchStrategy[Any]] = {}


def messages(kind: Any) -> st.SearchStrategy[Any]:
    if kind.__name__ not in _MADE:
        _MADE[kind.__name__] = _messages(kind)
    return _MADE[kind.__name__]


def _messages(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})


ALL = [
    each for each in vars(m).values() if isinstance(each, type) and issubclass(each, wire.Message)
]
EVERY = st.sampled_from([each for each in ALL if each is not wire.Message]).flatmap(messages)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(EVERY)
def test_messages_decode_to_what_was_encoded(message: wire.Message) -> None:
    assert type(message).decode(message.encode()) == message


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(EVERY, st.data())
def test_broken_bytes_are_an_error_of_the_format_and_nothing_else(
    message: wire.Message, data: st.DataObject
) -> None:
    raw = message.encode() + data.draw(st.binary(max_size=8))
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        type(message).decode(cut)
    except wire.WireError:
        pass


def test_known_bytes_of_the_format() -> None:
    """From the protocol buffers documentation: field 1 = 150, field 2 = "testing"."""
    assert m.Timestamp(seconds=150).encode() == bytes.fromhex("089601")
    assert m.Descriptor(digest="testing").encode() == bytes.fromhex("120774657374696e67")
    assert m.Timestamp(seconds=-1).encode() == bytes.fromhex("08ffffffffffffffffff01")
    unknown = bytes.fromhex("7a03616263") + m.Name(name="x").encode() + bytes.fromhex("f801ff01")
    assert m.Name.decode(unknown) == m.Name(name="x")


# --- holds ----------------------------------------------------------------------------------------


@given(
    st.sampled_from(["pull", "pin", "note"]),
    st.lists(st.text("abc:/@.", min_size=1, max_size=30), max_size=5),
    st.sampled_from([None, 1_900_000_000.0]),
    st.text("abc:0123", max_size=20),
)
def test_a_hold_is_the_same_after_a_way_through_lease_labels(
    role: Any, names: list[str], expires: float | None, keep: str
) -> None:
    hold = base.Hold(
        id=leases.lease_id(role, "r.e/a:b", DIGEST),
        role=role,
        ref="r.e/a:b",
        by="policy",
        target=manifest.Target("t", DIGEST, 5),
        image_id=DIGEST,
        names=tuple(names),
        state="paused",
        keep=keep,
        created=1_800_000_000.0,
        expires=expires,
    )
    cri._check_create_lease(m.CreateLeaseRequest(id=hold.id, labels=leases.labels(hold)))

    assert leases.read(m.Lease(id=hold.id, labels=leases.labels(hold))) == hold


def test_nonsense_in_lease_labels_is_no_hold() -> None:
    good = {"nodeagent/role": "pin", "nodeagent/by": "policy", "nodeagent/ref": "r"}
    for target in ("", "{}", "[]", "null", '{"media_type":"x","digest":"y","size":1}'):
        lease = m.Lease(id="x", labels=good | {"nodeagent/target": target})
        assert leases.read(lease) is None


# --- costs ----------------------------------------------------------------------------------------


def gzip_tail(raw: bytes) -> tuple[int, int]:
    packed = gzip.compress(raw)
    return struct.unpack("<I", packed[-4:])[0], len(packed)


def test_unpacked_sizes_are_read_not_guessed_where_the_format_says_them() -> None:
    assert estimate.gzip_size(*gzip_tail(bytes(100_000))) == (100_000, True)
    # Several members: the last one's length says nothing.
    modulo, _ = gzip_tail(b"end")
    assert estimate.gzip_size(modulo, 1_000_000) == (3_000_000, False)
    # A wrapped length of a large layer: the likeliest that fits, and marked as a guess.
    size, exact = estimate.gzip_size((9 << 30) % (1 << 32), 4 << 30)
    assert (size, exact) == (9 << 30, False)


def test_zstd_says_its_size_in_the_frame_header() -> None:
    magic = b"\x28\xb5\x2f\xfd"
    single_8 = magic + bytes([0b11100000]) + (123_456_789).to_bytes(8, "little")
    windowed_4 = magic + bytes([0b10000000, 0x58]) + (70_000).to_bytes(4, "little")
    two = magic + bytes([0b01100000]) + (1000 - 256).to_bytes(2, "little")
    assert estimate.zstd_content_size(single_8) == 123_456_789
    assert estimate.zstd_content_size(windowed_4) == 70_000
    assert estimate.zstd_content_size(two) == 1000
    assert estimate.zstd_content_size(magic + bytes([0, 0x58])) is None
    assert estimate.zstd_content_size(b"nonsense") is None


def shape_of(*layers: str) -> manifest.Shape:
    diffs = [manifest.digest_of(each.encode()) for each in layers]
    return manifest.Shape(
        manifest.Target("t", manifest.digest_of("".join(layers).encode()), 1),
        ((manifest.digest_of("".join(layers).encode()), 1),),
        tuple(
            manifest.Layer(diff, 100, "tar+gzip", chain)
            for diff, chain in zip(diffs, manifest.chain_ids(diffs), strict=True)
        ),
        DIGEST,
    )


def test_reuse_counts_layers_on_the_same_layers_only() -> None:
    shapes = {"base": shape_of("a", "b"), "app": shape_of("a", "b", "c"), "odd": shape_of("b", "a")}
    report = {each.ref: each for each in estimate.reuse(shapes, frozenset({"base"}))}
    assert (report["app"].shared, report["app"].total) == (200, 300)
    assert report["app"].bases == ("base",)
    assert report["odd"].shared == 0
    assert report["base"].shared == 0  # not with itself


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("write /x: no space left on device", "UNKNOWN", "disk"),
        ("unexpected commit digest sha256:1, expected sha256:2", "UNKNOWN", "corrupt"),
        ("failed size validation: 5 != 10: failed precondition", "UNKNOWN", "corrupt"),
        ("unexpected status code 401 Unauthorized", "UNKNOWN", "auth"),
        ("pull access denied, repository does not exist", "UNKNOWN", "auth"),
        ("failed to resolve reference: not found", "NOT_FOUND", "not_found"),
        ("dial tcp: connection refused", "UNKNOWN", "network"),
        ("unexpected EOF", "UNKNOWN", "network"),
        ("no match for platform in manifest", "NOT_FOUND", "not_found"),
        ("lease does not exist: not found", "NOT_FOUND", "runtime"),
        ("something nobody has seen", "UNKNOWN", "network"),
    ],
)
def test_what_runtimes_say_is_put_into_a_class(text: str, code: str, kind: str) -> None:
    found = failure.classify("r", base.RuntimeCallError("runtime", text, "", code))
    assert found.kind == kind


def test_waits_grow_are_bounded_and_obey_the_registry() -> None:
    error = failure.PullError("r", failure.Kind.NETWORK, "x")
    waits = [failure.after(error, n, 0.0).retry_at or 0 for n in range(1, 40)]
    assert waits[0] <= 1.25
    assert max(waits) <= 300 * 1.25
    asked = failure.PullError("r", failure.Kind.NETWORK, "x", wait=900.0)
    assert failure.after(asked, 1, 0.0).retry_at == 900.0
    assert failure.after(failure.PullError("r", failure.Kind.BAD_IMAGE, "x"), 1, 0).retry_at is None


# --- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "ref", "fits"),
    [
        ("reg.example", "reg.example/a:b", True),
        ("https://reg.example/v1/", "reg.example/a:b", True),
        ("*.example", "reg.example/a:b", True),
        ("*.example", "x.reg.example/a:b", False),
        ("reg.example:5000", "reg.example/a:b", False),
        ("reg.example/team", "reg.example/team/a:b", True),
        ("reg.example/team", "reg.example/teammate/a:b", False),
    ],
)
def test_patterns_match_as_the_kubelets_do(pattern: str, ref: str, fits: bool) -> None:
    assert credentials.matches(pattern, manifest.parse(ref)) is fits


def test_the_most_specific_entry_wins_and_secrets_have_no_repr() -> None:
    config = {
        "auths": {
            "reg.example": {"username": "u", "password": "wide"},
            "reg.example/team": {"username": "u", "password": "narrow"},
        }
    }
    login = credentials.from_docker_config(
        json.dumps(config).encode(), manifest.parse("reg.example/team/a:b")
    )
    assert login is not None
    assert login.password == "narrow"
    assert "narrow" not in repr(login)
    assert "narrow" not in repr(m.AuthConfig(password="narrow"))


async def test_a_provider_plugin_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    program = tmp_path / "slow"
    program.write_text('#!/bin/sh\nsleep 100 & echo $! >"$0.child"\nsleep 100\n')
    program.chmod(0o755)
    config = tmp_path / "c.yaml"
    provider = {"name": "slow", "matchImages": ["reg.example"], "apiVersion": "v1"}
    config.write_text(json.dumps({"providers": [provider]}))
    where = preheat_settings.CredentialSettings(
        provider_config=config, provider_dir=tmp_path, provider_timeout=0.5
    )
    with pytest.raises(credentials.CredentialError, match="no answer in"):
        await credentials.Credentials().login(manifest.parse("reg.example/a:b"), where)
    child = int((tmp_path / "slow.child").read_text())
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the plugin's child lives on")


# --- settings and node ----------------------------------------------------------------------------


def test_the_settings_of_the_issue_are_understood_and_dump_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "preheat:\n"
        "  runtime: containerd\n"
        "  socket: /run/containerd/containerd.sock\n"
        "  pin_budget: 200GiB\n"
        "  retain: {for: 24h}\n"
        "  images:\n"
        "    - {ref: reg.example/fw/torch:v1, pin: always, priority: 10}\n"
        "    - {ref: reg.example/fw/jax:v1, pin: {for: 72h}}\n"
        "    - {ref: reg.example/fw/tmp:v1, pin: never}\n"
    )
    loaded = configfile.load(file)
    file.write_text(configfile.dump(loaded))

    assert configfile.load(file) == loaded
    assert loaded.preheat is not None
    assert loaded.preheat.pin_budget == 200 * 1024**3


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": [{"ref": "ubuntu"}]},
        {"images": [{"ref": "r.e/a:b"}, {"ref": "r.e/a:b"}]},
        {"images": [{"ref": "r.e/a:b", "pin": "sometimes"}]},
        {"windows": ["25:00-01:00"]},
        {"runtime": "crio", "bytes_per_second": "1MiB"},
        {"platform": "amd64"},
        {"credentials": {"provider_dir": "/x"}},
        {"kubelet": {"gc_high": "70%", "gc_low": "80%"}},
        {"socket": "relative.sock"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Settings.model_validate({"preheat": wrong})


def test_windows_may_cross_midnight() -> None:
    windows = ("22:00-06:00",)
    assert preheat_settings.in_window(windows, 23 * 60)
    assert preheat_settings.in_window(windows, 5 * 60)
    assert not preheat_settings.in_window(windows, 12 * 60)
    assert preheat_settings.in_window((), 0)


def test_thousands_of_nodes_take_their_turns_evenly() -> None:
    turns = [node.turn(f"node{n}", "r.e/a:b", 300.0) for n in range(7500)]
    per_second = [0] * 300
    for turn in turns:
        per_second[int(turn)] += 1
    assert max(per_second) < 60  # 25 on average; all at once would be 7,500
    assert node.turn("node1", "r.e/a:b", 300.0) == turns[1]


def test_the_kubelets_own_file_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "kubelet.yaml"
    file.write_text(
        "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\n"
        'evictionHard: {imagefs.available: "20%"}\n'
    )
    found = node.thresholds(preheat_settings.KubeletSettings(config=file))
    assert (found.gc_high, found.gc_low, found.eviction_free) == (0.7, 0.6, 0.2)


def test_registry_hosts_are_those_that_containerd_asks(tmp_path: Path) -> None:
    folder = tmp_path / "reg.example"
    folder.mkdir()
    (folder / "hosts.toml").write_text(
        'server = "https://upstream.example"\n'
        '[host."http://mirror.example:5000"]\n  capabilities = ["pull", "resolve"]\n'
        '[host."https://push.example"]\n  capabilities = ["push"]\n'
        '[host."https://own.example"]\n  ca = "ca.crt"\n'
    )
    urls = [each.url for each in registry.hosts(tmp_path, "reg.example")]
    assert urls == [
        "http://mirror.example:5000",
        "https://own.example",
        "https://upstream.example",
    ]
    assert registry.hosts(tmp_path, "other.example")[0].url == "https://other.example"
    (folder / "hosts.toml").write_text("not toml [")
    with pytest.raises(ValueError, match=r"hosts\.toml"):
        registry.hosts(tmp_path, "reg.example")


# --- healing and limits ---------------------------------------------------------------------------


class FakeBox:
    """Counts heals; beside it the real one is in test_heal.py."""

    def __init__(self) -> None:
        self.healed: list[tuple[str, ...]] = []

    async def heal(self, hold: base.Hold) -> int:
        self.healed.append(hold.names)
        return len(hold.names)


async def test_heals_are_limited_within_any_hour() -> None:
    clock = [0.0]
    box = FakeBox()

    async def calm() -> bool:
        return False

    healer = heal.Healer(box, calm, 3, clock=lambda: clock[0])  # type: ignore[arg-type]
    hold = base.Hold("h", "pin", "r", "policy", names=("r", "id"), created=1)
    healer.learn([hold])
    times = []
    for _ in range(100):
        clock[0] += 120.0
        before = len(box.healed)
        await healer.removed("r")
        if len(box.healed) > before:
            times.append(clock[0])

    assert len(times) > 6
    assert all(
        later - earlier >= heal.HOUR for earlier, later in zip(times, times[3:], strict=False)
    )
    assert await healer.removed("somebody else's")


async def test_the_newest_pin_says_where_a_tag_points() -> None:
    box = FakeBox()

    async def calm() -> bool:
        return False

    healer = heal.Healer(box, calm, 3)  # type: ignore[arg-type]
    old = base.Hold("old", "pin", "r", "policy", names=("r", "id-old"), created=1)
    new = base.Hold("new", "pin", "r", "policy", names=("r", "id-new"), created=2)
    healer.learn([new, old])
    await healer.removed("id-old")
    await healer.removed("r")

    assert box.healed == [("id-old",), ("r", "id-new")]


async def test_the_limiter_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("preheat.limiter.asyncio.sleep", sleep)
    limit = limiter.Limiter(1000.0, clock=lambda: clock[0])
    for _ in range(100):
        await limit.take(100)
    assert 9.0 <= clock[0] <= 10.1


async def test_the_breaker_rests_longer_each_time_and_forgets() -> None:
    clock = [10_000.0]
    breaker = cri.Breaker(lambda: clock[0])
    rests = []
    for _ in range(6):
        breaker.trip()
        rests.append(breaker.rests)
        with pytest.raises(base.BreakerOpenError):
            breaker.check()
        clock[0] += breaker.rests
        breaker.check()
    assert rests == [1.0, 10.0, 60.0, 600.0, 3600.0, 3600.0]
    clock[0] += 10_000
    breaker.trip()
    assert breaker.rests == 1.0
