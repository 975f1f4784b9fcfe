"""What the clusters' answers mean for the ledger; the cluster is a stand-in (tests/ceph has it)."""

import dataclasses
from dataclasses import dataclass

import pytest

import kit.errors
from ceph.protocol import Extents, ImageContent, ImageId
from ceph.settings import ClusterSettings
from linux.rbd_sysfs import RbdImage
from volumes.ledger import mirror
from volumes.ledger.store import Entry, Knowledge

ENTRY = Entry("rbd:f1/3//a").saw("ext4", "u", "", 1.0, "n")
SILENT = kit.errors.SourceError("cluster", "no answer within 5s", "")


@dataclass
class Stand:
    """One cluster. ``content``: its answer or error to every question about an image."""

    fsid_: str
    content_: ImageContent | kit.errors.AgentError
    up: bool = True
    fsid: str = ""
    failures: int = 0
    closed: bool = False
    written: str = ""
    key: str = "nodeagent.volume"

    async def connect(self) -> str:
        if not self.up:
            self.failures += 1
            raise SILENT
        self.fsid = self.fsid_
        return self.fsid

    async def content(
        self, image: ImageId, metadata_key: str, extents: Extents | None = None
    ) -> ImageContent:
        if isinstance(self.content_, kit.errors.AgentError):
            raise self.content_
        if metadata_key != self.key:
            return dataclasses.replace(self.content_, metadata=None)
        return self.content_

    async def set_metadata(self, image: ImageId, metadata_key: str, value: str) -> None:
        if isinstance(self.content_, kit.errors.AgentError):
            raise self.content_
        self.written = value

    async def close(self) -> None:
        self.closed = True


def _image(fsid: str = "f1") -> RbdImage:
    return RbdImage("rbd", "a", "", "", "a", fsid, 3)


def _mirror(monkeypatch: pytest.MonkeyPatch, *stands: Stand) -> mirror.Mirror:
    ahead = list(stands)
    monkeypatch.setattr(mirror, "ClusterClient", lambda settings, deadline: ahead.pop(0))
    settings = tuple(
        ClusterSettings(name=each.fsid_, monitors=("h:1",), secret_file="/k") for each in stands
    )
    return mirror.Mirror(settings, 5.0)


@pytest.mark.parametrize(("content", "extents", "expected"), [
    (ImageContent(None, 64, None), True,
     mirror.Answer(Knowledge.NONE, Knowledge.NONE, size=64)),
    (ImageContent(None, 64, (0, 4096)), True,
     mirror.Answer(Knowledge.NONE, Knowledge.CONTENT, size=64)),
    (ImageContent(ENTRY.dump()), False,
     mirror.Answer(Knowledge.CONTENT, Knowledge.NOT_ASKED, ENTRY)),
    (ImageContent(Entry("v").permit("me", 1.0).dump()), False,
     mirror.Answer(Knowledge.MAYBE, Knowledge.NOT_ASKED, Entry("v").permit("me", 1.0))),
])  # fmt: skip
async def test_ask_turns_content_into_knowledge(
    monkeypatch: pytest.MonkeyPatch, content: ImageContent, extents: bool, expected: mirror.Answer
) -> None:
    made = _mirror(monkeypatch, Stand("f1", content))
    assert await made.ask(_image(), Extents() if extents else None) == expected


@pytest.mark.parametrize("content", [
    ImageContent("{"), ImageContent('{"version": 99, "volume": "v"}'),
    kit.errors.NotFoundError("image", "is not there", ""), SILENT,
])  # fmt: skip
async def test_ask_errors_are_unknown_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, content: ImageContent | kit.errors.AgentError
) -> None:
    answer = await _mirror(monkeypatch, Stand("f1", content)).ask(_image())
    assert answer.mirror is Knowledge.UNKNOWN
    assert answer.why


async def test_ask_without_matching_cluster_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _mirror(monkeypatch, Stand("f2", ImageContent(None)))
    assert await made.ask(_image(), Extents()) == mirror.NOT_ASKED
    assert (await made.ask(_image(""), Extents())).mirror is Knowledge.UNKNOWN


async def test_ask_is_unknown_while_a_silent_cluster_may_be_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, other = Stand("f1", ImageContent(None), up=False), Stand("f2", ImageContent(None))
    made = _mirror(monkeypatch, silent, other)
    assert (await made.ask(_image("f1"), Extents())).extents is Knowledge.UNKNOWN
    assert (await made.ask(_image("f2"), Extents())).extents is Knowledge.NONE
    assert made.failures == 2
    silent.up = True
    assert (await made.ask(_image("f1"), Extents())).extents is Knowledge.NONE


async def test_write_needs_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand("f1", ImageContent(None))
    made = _mirror(monkeypatch, stand)
    assert await made.write(_image("f1"), ENTRY)
    assert stand.written == ENTRY.dump()
    assert not await made.write(_image("f2"), ENTRY)
    stand.content_ = SILENT
    with pytest.raises(kit.errors.SourceError):
        await made.write(_image("f1"), ENTRY)


async def test_metadata_of_a_newer_agent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand("f1", ImageContent('{"version": 99, "volume": "v"}'))
    made = _mirror(monkeypatch, stand)
    await made.ask(_image("f1"))
    assert "newer agent" in str(made.newer)
    assert not await made.write(_image("f1"), ENTRY)
    stand.content_ = ImageContent(ENTRY.dump())  # it was taken back
    await made.ask(_image("f1"))
    assert await made.write(_image("f1"), ENTRY)


async def test_apply_replaces_changed_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Stand("f1", ImageContent(None), up=False)
    made = _mirror(monkeypatch, first)
    await made.ask(_image())
    settings = ClusterSettings(name="f1", monitors=("h:2",), secret_file="/k")
    second = Stand("f1", ImageContent(None))
    monkeypatch.setattr(mirror, "ClusterClient", lambda settings, deadline: second)
    await made.apply((settings,), 5.0)
    assert first.closed
    assert (await made.ask(_image())).mirror is Knowledge.NONE
    assert made.failures == 1  # a counter never goes back
    await made.apply((settings,), 5.0)
    assert not second.closed
