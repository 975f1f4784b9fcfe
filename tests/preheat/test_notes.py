"""What operators asked and the agent noted of an image: one says nothing of the other."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import kit.errors
from kit.room import Request
from preheat import api, settings
from preheat.component import Preheat
from preheat.registry import failure, resolver
from preheat.runtimes import base, containerd_api, cri
from tests.preheat.rig import Reported
from tests.preheat.test_status import REF, StillRuntime


class Keeping(StillRuntime):
    """A runtime with one image of ``REF`` that keeps holds under their ids, as leases do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.kept: dict[str, base.Hold] = {}
        self.present = True
        self.breaker = cri.Breaker(lambda: 0.0)

    async def inventory(self) -> base.ImageInventory:
        found = await super().inventory()
        records = found.records if self.present else ()
        holds = tuple(self.kept.values())
        return dataclasses.replace(found, records=records, holds=holds, in_use=frozenset())

    async def tend(self, _: base.ImageInventory) -> bool:
        if self.breaker.rests:  # a mark that is gone is set again
            self.breaker.check(containerd_api.UPDATE_IMAGE)
        return False

    async def begin(self, hold: base.Hold) -> base.Hold:
        is_note = hold.role == "note"
        self.breaker.check(containerd_api.CREATE_NOTE if is_note else containerd_api.CREATE_LEASE)
        made = dataclasses.replace(hold, id=base.hold_id(hold), created=hold.created or 1.0)
        self.kept[made.id] = made
        return made

    async def pin(self, hold: base.Hold) -> base.Hold:
        return await self.begin(hold)

    async def end(self, hold: base.Hold) -> None:
        self.kept.pop(hold.id, None)

    unpin = end

    def roles(self) -> set[str]:
        return {hold.role for hold in self.kept.values()}

    def states(self) -> set[str]:
        return {hold.state for hold in self.kept.values() if hold.role == "note"}


async def nothing(*_: Any) -> None:
    """The registry is not asked."""


@pytest_asyncio.fixture
async def kept(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Preheat, Keeping]]:
    """A room whose one image is there, with the pin rule that a test says."""
    wanted = {"images": [{"ref": REF, "pin": request.param}], "spread": 0}
    monkeypatch.setattr("preheat.registry.resolver.Resolver._ask", nothing)
    room = Preheat(
        settings.complete(settings.PreheatSettings.model_validate(wanted)), tmp_path, Reported()
    )
    runtime, loop = Keeping(tmp_path), room.reconciler
    loop.runtime = loop.pulls.runtime = runtime  # type: ignore[assignment]
    for part in (loop.local, loop.uses, loop.healer, loop.durability):
        part._runtime = runtime  # type: ignore[assignment]
    loop.local._shapes[runtime.shape.top.digest, loop.section.platform] = runtime.shape
    monkeypatch.setattr(loop.healer, "resync", nothing)
    monkeypatch.setattr(loop.durability, "look", nothing)
    monkeypatch.setattr(loop.durability, "tend", lambda *_: None)
    loop.trouble = ""
    try:
        await loop.cycle()
        yield room, runtime
    finally:
        await loop.stop()


@pytest.mark.parametrize("kept", ["always"], indirect=True)
async def test_a_released_image_that_is_paused_stays_released(
    kept: tuple[Preheat, Keeping],
) -> None:
    room, runtime = kept
    await room.unpin(REF)
    await room.pause(REF)
    await room.reconciler.cycle()
    both, pinned = runtime.states(), room.show(REF).pinned
    await room.resume(REF)
    resumed, after = runtime.states(), room.show(REF)
    await room.pin(REF)
    await room.reconciler.cycle()

    assert (both, pinned) == ({"released", "paused"}, False)
    assert (resumed, after.state, after.pinned) == ({"released"}, "released", False)
    assert runtime.states() == set()
    assert room.show(REF).pinned


@pytest.mark.parametrize("kept", ["never"], indirect=True)
async def test_an_image_that_was_pulled_once_is_not_pulled_again_for_a_pause(
    kept: tuple[Preheat, Keeping],
) -> None:
    room, runtime = kept
    await room.reconciler.note(REF, "policy", "done")
    await room.pause(REF)
    await room.resume(REF)
    runtime.present = False  # garbage collection took it
    await room.reconciler.cycle()

    assert runtime.states() == {"done"}
    assert room.reconciler.snapshot.requests[REF].done


@pytest.mark.parametrize("kept", ["always"], indirect=True)
async def test_notes_of_an_older_agent_are_read_and_ended(kept: tuple[Preheat, Keeping]) -> None:
    """All states of an image had one id."""
    room, runtime = kept
    old = base.Hold("note", REF, "operator", state="released", id="nodeagent-note-old", created=1.0)
    runtime.kept = {old.id: old}
    await room.reconciler.cycle()
    before = room.show(REF).state
    await room.pin(REF)

    assert before == "released"
    assert runtime.states() == set()


@pytest.mark.parametrize("kept", ["always", {"for": "1m"}], indirect=True)
async def test_an_open_breaker_keeps_no_pin(kept: tuple[Preheat, Keeping]) -> None:
    """One that an operator releases, or whose time is over. What is left to do waits, and is no
    failure of the runtime."""
    room, runtime = kept
    assert runtime.roles() == {"pin"}
    runtime.breaker.trip(cri.PULL_IMAGE)
    is_timed = room.show(REF).keep != "always"
    if is_timed:
        await room.reconciler.cycle()
    else:
        await room.unpin(REF)

    assert runtime.states() == {"expired" if is_timed else "released"}
    assert runtime.roles() == {"note"}
    with pytest.raises(kit.errors.SourceError, match="went away after a changing call"):
        await room.pin(REF)
    assert room.reconciler.trouble == ""


@pytest.mark.parametrize("kept", [{"for": "1m"}], indirect=True)
async def test_a_clock_that_is_set_back_brings_back_no_image_whose_time_was_over(
    kept: tuple[Preheat, Keeping],
) -> None:
    """It is behind for a while after a boot. A use from then on counts, and none before."""
    room, runtime = kept
    began, target = time.time(), runtime.shape.top
    runtime.last_used = {target.digest: began + 1800.0}
    runtime.kept.clear()
    await runtime.begin(
        base.Hold("note", REF, "policy", target, state="expired", created=began + 3600.0)
    )
    for _ in range(2):
        await room.reconciler.cycle()

    (note,) = runtime.kept.values()
    assert note.state == "expired"
    assert began <= runtime.last_used[target.digest] <= note.created <= time.time()
    assert not room.show(REF).pinned


@pytest.mark.parametrize("kept", ["always"], indirect=True)
async def test_what_filled_the_disk_is_planned_with_what_it_took(
    kept: tuple[Preheat, Keeping],
) -> None:
    room, runtime = kept
    runtime.present = False
    runtime.kept.clear()
    lookup = room.reconciler.resolver.of(REF)
    assert lookup is not None
    for shape, least in ((runtime.shape, 10**15), (None, 10**15)):
        lookup.shape = shape
        error = failure.PullError(REF, failure.Kind.NETWORK, "x")
        lookup.failed = None if shape else failure.after(error, resolver.PATIENCE, time.time())
        digest = shape.top.digest if shape else ""
        room.reconciler.pulls.failures[REF] = failure.PullFailure(
            failure.Kind.DISK,
            "full",
            1,
            0.0,
            at=time.time(),
            digest=digest,
            took=base.DiskUse(least),
        )
        await room.reconciler.cycle()
        assert room.reconciler.snapshot.requests[REF].need == least
        assert room.show(REF).state == "skipped"


@pytest.mark.parametrize("kept", ["always"], indirect=True)
async def test_who_waits_for_an_image_waits_for_its_registrys_answer(
    kept: tuple[Preheat, Keeping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the node may be what the tag named before."""
    room, runtime = kept
    answered = asyncio.Event()

    async def ask(_: resolver.Resolver, lookup: resolver.Lookup) -> None:
        await answered.wait()
        lookup.shape = runtime.shape

    monkeypatch.setattr(resolver.Resolver, "_ask", ask)
    await room.preheat(REF)
    stream = await api._watch(room, Request(query={"ref": REF}))
    states = [(await anext(stream.items)).state]
    answered.set()
    states += [row.state async for row in stream.items]

    assert (states[0], states[-1]) == ("looking", "ready")
