"""What an eviction waits for before it deletes, what ends it before that, and what it says."""

import contextlib
import dataclasses
import types
from collections.abc import Awaitable
from typing import Any

import pytest
import structlog

import kit.errors
from cache.fill.protocol import Least, Limits
from cache.space import evictions
from cache.store import subset
from cache.views.view import Stage
from tests.cache import passes

HALF = subset.ALL // 2


class Fill:
    used = 0
    inodes = 0

    def record(self) -> dict[str, Any]:
        return {}


class Current:
    """The generation that serves, of which nothing else is asked."""

    id = "1"

    def show_kept_figures(self) -> None:
        """Nobody looks at them."""


class Evicted:
    """A dataset that is stored whole. Its overlay ``remembers`` the marks that it has looked up."""

    name, folder, view, layer = "a", "/store/a/1", "/views/a/data", "/store/a/1/tree"
    evicted = freed = published = 0

    def __init__(self) -> None:
        self.stage = Stage.STORE
        self.settings = types.SimpleNamespace(keep=False)
        self.source = types.SimpleNamespace(block=False)
        self.reached = types.SimpleNamespace(root="/source")
        self.figures = types.SimpleNamespace(counts=dict)
        self.current = Current()
        self.generation = types.SimpleNamespace(
            kept_share=subset.ALL, used=0, left_files=0, state="complete", evicting=False, damaged=0
        )
        self.durable: dict[str, Any] = {}
        self.marks, self.remembers = 3, False
        self.disk_takes = self.mounts = True

    def used(self) -> int:
        return 0

    def unfit(self) -> str:
        return ""

    async def may_overlay(self) -> bool:
        return True

    async def change(self, **changes: Any) -> None:
        vars(self.generation).update(changes)  # as the real one: in memory first
        if not self.disk_takes:
            raise OSError("the disk takes nothing")
        self.durable = dict(vars(self.generation))

    async def publish(self, stage: Stage) -> None:
        if not self.mounts:
            raise kit.errors.HostError("view", "it cannot be mounted", "")
        self.stage, self.remembers = stage, self.marks > 0
        self.published += 1

    async def refresh(self) -> None:
        """Nothing is mounted."""

    def is_filled(self) -> None:
        """Whole directories are marked, and readers look them up."""
        self.marks, self.remembers = 3, self.stage is Stage.OVERLAY


class World:
    """The dataset, who reads it, and passes that check what must hold when they run.

    ``fits``: the share that fits the ``node``'s budgets and the ``dataset``'s own, and what is left
    of what was ``asked`` for otherwise. ``chosen``: how often the manifest was read for that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dataset: Any = Evicted()
        self.reader, self.deleted, self.cut_off, self.chosen = True, 0, "", 0
        self.fits = {"node": HALF, "dataset": HALF, "asked": HALF}
        self.disk = False  # what it has free counts, beside the node's budget
        self.disk_fits = subset.ALL
        monkeypatch.setattr(evictions.Evictions, "_pass", self._pass)
        monkeypatch.setattr(evictions, "fall_back", self._shows)
        monkeypatch.setattr(evictions, "_wait_for_others", self._wait)
        monkeypatch.setattr(evictions, "of_its_own", lambda *_: self.limits("dataset"))
        self.restart()

    def restart(self) -> None:
        """Of the agent."""
        none: Any = None
        self.made = evictions.Evictions(none, lambda *_: self.limits("node"))

    def limits(self, whose: str) -> Limits:
        disk = self.disk and whose == "node"
        return dataclasses.replace(passes.LIMITS, budget=self.fits[whose], disk=disk)

    async def _shows(self, _: Any) -> bool:
        return False

    async def _wait(self, _: Any) -> None:
        if self.reader:
            raise kit.errors.HostError("eviction", "a reader is in an earlier view", "")

    async def _pass(
        self, dataset: Any, part: str, share: int, limits: Any = None, alone: bool = False
    ) -> Any:
        allowed, taken = limits or self.limits("node"), 0
        fits = min(allowed.budget - allowed.others, self.disk_fits if allowed.disk else subset.ALL)
        match part:
            case "choose":
                self.chosen += 1
            case "marks":
                assert dataset.durable["evicting"], "a killed agent would not know of it"
                taken, dataset.marks = dataset.marks, 0
            case "files":
                assert dataset.stage is Stage.OVERLAY, "the source is hidden"
                assert not dataset.remembers, "what is deleted would be ENOENT"
                assert not self.reader, "a reader is in an earlier view"
                self.deleted += 1
                dataset.is_filled()
        if part == self.cut_off:
            raise kit.errors.HostError("pass", "it was cut off", "")
        beyond = 5 if fits < subset.ALL else 0
        return types.SimpleNamespace(share=fits, beyond=beyond, fill=Fill(), evicted=taken)

    async def begin(self, cause: str = "budget") -> None:
        given: dict[str, dict[str, Any]] = {
            "budget": {},
            "own budget": {},
            "operator": {"limits": self.limits("asked"), "paused": "evicted"},
            "another dataset": {"limits": self.limits("asked")},
        }
        self.dataset.settings.keep = cause == "own budget"
        own = "limits" not in given[cause]
        await _tried(self.made.settle(self.dataset, grow=False, own=own, **given[cause]))

    async def retry(self) -> None:
        if self.dataset.generation.evicting:
            await _tried(self.made.finish(self.dataset))

    def raise_budgets(self, *whose: str) -> None:
        self.fits |= dict.fromkeys(whose or ("node", "dataset"), subset.ALL)


async def _tried(doing: Awaitable[Any]) -> None:
    with contextlib.suppress(kit.errors.HostError, OSError):
        await doing


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_an_operators_eviction_waits_for_whom_an_earlier_one_waits(world: World) -> None:
    """The earlier one has taken the marks and shown an overlay: nothing tells of its reader."""
    for cause in ("budget", "operator"):
        await world.begin(cause)
    assert world.dataset.generation.evicting
    assert not world.deleted


# --- raised budgets


@pytest.mark.parametrize(
    ("cause", "whose", "ends"),
    [
        ("budget", ("node", "dataset"), True),
        ("budget", ("dataset",), False),
        ("own budget", ("dataset",), True),  # of a kept one, while the node is short
        ("own budget", ("node",), False),
        ("operator", ("node", "dataset"), False),
        ("another dataset", ("node", "dataset"), False),
    ],
)
async def test_raised_budget_ends_an_eviction_that_waits_for_readers(
    world: World, cause: str, whose: tuple[str, ...], ends: bool
) -> None:
    await world.begin(cause)
    world.raise_budgets(*whose)
    await world.retry()
    assert world.dataset.durable["evicting"] != ends
    world.reader = False
    await world.retry()
    assert world.deleted == (0 if ends else 1)
    assert world.dataset.durable["kept_share"] == (subset.ALL if ends else HALF)
    assert not world.dataset.durable["evicting"]
    assert world.dataset.durable.get("wanted", False) == ends, "the next agent fills it, too"


async def test_a_budget_that_is_raised_a_little_takes_out_less(world: World) -> None:
    await world.begin()
    world.fits["node"], world.reader = HALF + HALF // 2, False
    await world.retry()
    assert (world.deleted, world.dataset.durable["kept_share"]) == (1, HALF + HALF // 2)


async def test_a_budget_that_is_lowered_again_has_an_eviction_of_its_own(world: World) -> None:
    await world.begin()
    world.fits["node"], world.reader = HALF // 2, False
    await world.retry()
    assert (world.deleted, world.dataset.durable["kept_share"]) == (1, HALF)


@pytest.mark.parametrize("first", ["waits", "ended", "unreachable"])
@pytest.mark.parametrize("cause", ["operator", "another dataset"])
async def test_what_was_asked_for_is_given_whatever_a_budgets_eviction_was(
    world: World, monkeypatch: pytest.MonkeyPatch, first: str, cause: str
) -> None:
    """One before it, for a budget: it waits, was ended by a raised budget, or never began."""

    async def unreachable(_: Any) -> None:
        raise kit.errors.HostError("source", "it does not answer", "")

    with monkeypatch.context() as patched:
        if first == "unreachable":
            patched.setattr(evictions, "_reach", unreachable)
        await world.begin()
    world.raise_budgets()
    if first == "ended":
        await world.retry()
        world.dataset.is_filled()
    await world.begin(cause)
    await world.retry()
    assert world.dataset.generation.evicting
    assert world.dataset.durable["kept_share"] == HALF


async def test_a_budgets_eviction_does_not_weaken_what_was_asked_for(world: World) -> None:
    await world.begin("operator")
    await world.begin("budget")
    world.raise_budgets()
    await world.retry()
    assert world.dataset.durable["evicting"]


async def test_files_that_are_being_deleted_go_though_the_budget_is_raised(world: World) -> None:
    world.reader, world.cut_off = False, "files"
    await world.begin()
    world.raise_budgets()
    world.cut_off = ""
    await world.retry()
    assert (world.deleted, world.dataset.durable["kept_share"]) == (2, HALF)


async def test_a_failed_request_leaves_the_eviction_that_waits_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(_: Any) -> None:
        raise kit.errors.HostError("source", "it does not answer", "")

    await world.begin()
    with monkeypatch.context() as patched:
        patched.setattr(evictions, "_reach", unreachable)
        await world.begin("operator")
    world.raise_budgets()
    await world.retry()
    assert not world.dataset.durable["evicting"]


async def test_after_a_restart_an_eviction_goes_on(world: World) -> None:
    """Nothing tells the new agent that nothing of it was deleted."""
    await world.begin()
    world.restart()
    world.raise_budgets()
    world.reader = False
    await world.retry()
    assert world.deleted == 1


async def test_an_eviction_is_durable_before_marks_go_though_the_disk_took_nothing(
    world: World,
) -> None:
    world.dataset.disk_takes = False
    await world.begin()
    world.dataset.disk_takes, world.reader = True, False
    await world.retry()
    assert world.deleted == 1


async def test_an_operator_is_given_no_more_than_asked_while_a_budgets_eviction_waits(
    world: World,
) -> None:
    world.fits |= {"node": HALF // 2, "asked": HALF}
    await world.begin()
    world.reader = False
    await world.begin("operator")
    assert (world.deleted, world.dataset.durable["kept_share"]) == (1, HALF)


async def test_files_that_are_being_deleted_are_not_given_back_by_who_asks_for_less(
    world: World,
) -> None:
    world.reader, world.cut_off, world.fits["node"] = False, "files", HALF // 2
    await world.begin()
    world.cut_off = ""
    await world.begin("operator")
    assert world.dataset.durable["kept_share"] == HALF // 2


@pytest.mark.parametrize("asked", ["budget", "another dataset"])
async def test_a_dataset_that_is_kept_from_now_gives_nothing_to_the_nodes_budget(
    world: World, asked: str
) -> None:
    await world.begin(asked)
    world.raise_budgets("dataset")  # it has none of its own
    world.dataset.settings.keep = True
    await world.retry()
    assert world.dataset.durable["evicting"] == (asked != "budget")
    assert not world.deleted


async def test_a_kept_dataset_that_its_own_fill_made_smaller_stays_so(world: World) -> None:
    """It would be filled and evicted again and again: what fits is the node's to say."""
    world.dataset.settings.keep = True
    await _tried(world.made.settle(world.dataset, grow=False))
    world.raise_budgets("dataset")
    await world.retry()
    assert world.dataset.durable["evicting"]


# --- what a retry costs


async def test_retries_choose_again_only_when_there_is_more_room(world: World) -> None:
    """Choosing reads and hashes the whole manifest."""
    await world.begin()
    for _ in range(5):
        await world.retry()
    world.fits["node"] -= 1
    for _ in range(5):
        await world.retry()
    assert world.chosen == 1
    world.fits["node"] += 11
    for _ in range(5):
        await world.retry()
    assert (world.chosen, world.dataset.durable["kept_share"]) == (2, HALF + 10)


async def test_less_is_taken_out_also_when_the_disk_took_nothing_at_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(**_: Any) -> None:
        raise kit.errors.HostError("store", "its disk is in trouble", "")

    await world.begin()
    world.fits["node"], world.reader = HALF + HALF // 2, False
    with monkeypatch.context() as patched:
        patched.setattr(world.dataset, "change", refuse)
        await world.retry()
    await world.retry()
    assert (world.deleted, world.dataset.durable["kept_share"]) == (1, HALF + HALF // 2)


@pytest.mark.parametrize(("seconds", "ends"), [(1e9, False), (1e-9, True)])
async def test_what_the_disk_has_free_is_looked_at_again_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, ends: bool
) -> None:
    monkeypatch.setattr(evictions, "DISK_SECONDS", seconds)
    world.disk, world.disk_fits, world.fits["node"] = True, HALF, subset.ALL
    await world.begin()
    world.disk_fits = subset.ALL
    for _ in range(5):
        await world.retry()
    assert world.dataset.durable["evicting"] != ends
    assert world.chosen == 1 + ends


LIMITS = dataclasses.replace(
    passes.LIMITS, budget=10, others=5, inodes=10, other_inodes=5, reserve=0.1,
    least=Least(share=0.1, bytes=10, inodes_share=0.1, inodes=10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "roomier"),
    [
        ({}, False),
        ({"budget": 11, "others": 6}, False),
        ({"budget": 9}, False),
        ({"budget": 11}, True),
        ({"others": 4}, True),
        ({"inodes": 11}, True),
        ({"other_inodes": 4, "budget": 1}, True),
        ({"other_inodes": 6}, False),
        ({"reserve": 0.2}, False),
        ({"reserve": 0.05}, True),
        ({"disk": False}, True),
        *(
            ({"least": dataclasses.replace(LIMITS.least, **{name: value})}, roomier)
            for name in ("share", "bytes", "inodes_share", "inodes")
            for value, roomier in ((20, False), (0, True))
        ),
    ],
)
async def test_which_limits_leave_more_room(
    world: World, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], roomier: bool
) -> None:
    allowed = LIMITS
    monkeypatch.setattr(world, "limits", lambda _: allowed)
    await world.begin()
    allowed = dataclasses.replace(LIMITS, **changed)
    await world.retry()
    assert world.chosen == 1 + roomier


# --- overlays


@pytest.mark.parametrize("restarted", [False, True])
async def test_retries_show_one_overlay(world: World, restarted: bool) -> None:
    """Pods that come while it waits keep what the view shows then, and are not waited for."""
    await world.begin()
    if restarted:
        world.restart()
    for _ in range(5):
        await world.retry()
    assert world.dataset.published == 1 + restarted
    world.reader = False
    await world.retry()
    assert world.deleted == 1


async def test_an_overlay_that_never_saw_a_mark_stays(world: World) -> None:
    world.dataset.stage, world.dataset.marks, world.reader = Stage.OVERLAY, 0, False
    await world.begin()
    assert (world.deleted, world.dataset.published) == (1, 0)


async def test_marks_that_come_while_it_waits_are_looked_past(world: World) -> None:
    await world.begin()
    world.dataset.is_filled()
    world.reader = False
    await world.retry()
    assert (world.deleted, world.dataset.published) == (1, 2)


@pytest.mark.parametrize("trouble", ["publish fails", "marks are cut off"])
@pytest.mark.parametrize("then", ["retry", "operator", "raised", "restart"])
@pytest.mark.parametrize("before", ["good", "waits", "ended"])
async def test_nothing_goes_below_an_overlay_that_remembers_marks(
    world: World, before: str, trouble: str, then: str
) -> None:
    """An eviction before went well, waits, or was ended; the next one takes the marks away and
    comes no further."""
    world.reader = before != "good"
    await world.begin()
    if before == "ended":
        world.raise_budgets()
        await world.retry()
    world.dataset.is_filled()  # the overlay is shown still
    world.fits["node"], world.reader = HALF // 2, False
    deleted = world.deleted
    world.dataset.mounts = trouble != "publish fails"
    world.cut_off = "marks" if trouble == "marks are cut off" else ""
    if before == "waits":
        await world.retry()
    else:
        await world.begin()
    assert (world.dataset.marks, world.deleted) == (0, deleted)
    world.dataset.mounts, world.cut_off = True, ""
    match then:
        case "operator":
            await world.begin("operator")
        case "raised":
            world.raise_budgets()
            await world.retry()
            assert not world.dataset.durable["evicting"]
            world.fits["node"] = HALF // 2
            await world.begin()
        case "restart":
            world.restart()
            await world.retry()
        case _:
            await world.retry()
    assert world.deleted == deleted + 1


async def test_a_raised_budget_waits_for_the_overlay_that_forgets_marks(world: World) -> None:
    world.dataset.stage, world.dataset.remembers = Stage.OVERLAY, True
    world.dataset.mounts = False
    await world.begin()
    world.raise_budgets()
    await world.retry()
    assert world.dataset.durable["evicting"]
    world.dataset.mounts = True
    await world.retry()
    assert (world.dataset.durable["evicting"], world.dataset.remembers) == (False, False)


async def test_marks_that_a_withdrawal_took_away_are_looked_past(world: World) -> None:
    """It came no further: bad files are known, and the overlay remembers."""
    world.dataset.stage, world.dataset.remembers = Stage.OVERLAY, True
    world.dataset.marks, world.dataset.generation.damaged, world.reader = 0, 1, False
    await world.begin()
    assert (world.deleted, world.dataset.published) == (1, 1)


# --- the log


async def test_the_same_wait_is_said_once_a_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(why: str) -> None:
        world.made.tell(world.dataset, kit.errors.HostError("eviction", why, ""))

    with structlog.testing.capture_logs() as said:
        for why in ("a reader", "a reader", "a reader", "its source", "its source"):
            say(why)
        assert [each["why"].split(": ")[1] for each in said] == ["a reader", "its source"]
        monkeypatch.setattr(evictions, "TOLD_SECONDS", 0.0)  # a minute has gone
        say("its source")
    assert len(said) == 3
