"""What operators see: the status page, the alert rules, the plan as the last cycle left it."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
import yaml

from kit import terminal
from preheat import api, settings, status
from preheat.component import Preheat
from preheat.image import manifest
from preheat.planning import desired, plan
from preheat.planning.desired import Request
from preheat.pulling.reconciler import Snapshot
from preheat.registry import estimate, failure, resolver
from preheat.runtimes import base
from tests.preheat.registry.test_estimate import shape_of
from tests.preheat.rig import Reported

RULES = Path(__file__).parents[2] / "deploy/alerts"
REF = "r.e/fw/a:v1"


@pytest.fixture
def room(tmp_path: Path) -> Preheat:
    """A room that was never started: it has what a test gives it."""
    section = settings.PreheatSettings.model_validate({"images": [{"ref": REF}]})
    return Preheat(section, tmp_path, Reported())


def node(**more: Any) -> plan.Node:
    return plan.Node(*(1000, 900, 0.85, 0.8, 0.1, 300), **more)


# --- alert rules ----------------------------------------------------------------------------------


def test_alert_rules_fire_and_clear() -> None:
    for command in ("check", "test"):
        file = RULES / f"preheat.{'rules' if command == 'check' else 'test'}.yaml"
        words = ["promtool", command, "rules", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=RULES)
        assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load((RULES / "preheat.rules.yaml").read_text())["groups"][0]["rules"]
    tested = yaml.safe_load((RULES / "preheat.test.yaml").read_text())["tests"]
    for rule in rules:
        cases = [
            bool(case["exp_alerts"])
            for test in tested
            for case in test["alert_rule_test"]
            if case["alertname"] == rule["alert"]
        ]
        assert cases == [False, True, False], rule["alert"]


def test_alert_rules_use_metrics_that_exist(room: Preheat) -> None:
    there = {f"nodeagent_{each.name}" for each in room.metrics()}
    there |= {each.name for each in room.metrics()}
    text = (RULES / "preheat.rules.yaml").read_text()
    used = set(re.findall(r"nodeagent_preheat_\w+", text))
    assert used
    assert {name.removesuffix("_total") for name in used} <= there


# --- the status page ------------------------------------------------------------------------------


def test_page_shows_each_image_and_the_disk(room: Preheat) -> None:
    until = time.time() + 3600
    requests = {
        REF: Request(REF, "policy", digest="sha256:d", present=True, measured=True),
        "r.e/b:v1": Request("r.e/b:v1", "policy", present=True, dropped_until=until),
        "r.e/c:v1": Request("r.e/c:v1", "operator", digest="sha256:c", blocked="x"),
    }
    skip = plan.Skip("r.e/c:v1", plan.Reason.DISK, "it needs 5 bytes", 5, 1)
    room.reconciler.snapshot = Snapshot(
        requests=requests, node=node(), at=1.0, decided=plan.Plan(skips=(skip,), pause="full")
    )
    room.reconciler.trouble = ""
    (section,) = api.sections(room)

    assert section.title == "Images"
    assert "300 B" in section.summary
    assert "Nothing is pulled: full" in section.summary
    shown = {row[0].text: row for row in section.rows}
    assert shown.keys() == requests.keys()
    assert (shown[REF][1].text, shown[REF][1].tone) == ("ready", "good")
    assert "dropped from policy; released at" in shown["r.e/b:v1"][3].below[0].text
    assert [row[2].text for row in section.rows].count("size not known yet") == 3
    room.reconciler.trouble = "it does not answer"
    assert api.sections(room)[0].summary == "it does not answer"


@pytest.mark.parametrize(
    ("more", "tells"),
    [
        ({}, True),
        ({"keep": "never"}, False),
        ({"measured": True, "digest": "sha256:d"}, False),
    ],
)
def test_an_image_that_cannot_be_read_tells_why_it_is_not_pinned(
    room: Preheat, more: dict[str, Any], tells: bool
) -> None:
    lookup = resolver.Lookup(manifest.parse(REF))
    error = failure.PullError(REF, failure.Kind.BAD_IMAGE, "config is not a descriptor")
    lookup.failed = failure.after(error, 1, 0.0)
    room.reconciler.resolver._lookups[REF] = lookup
    request = Request(REF, "policy", **{"present": True, **more})
    room.reconciler.snapshot = Snapshot(requests={REF: request}, node=node(), at=1.0)
    row = status.image(room.reconciler, request)
    assert row.state == "ready"
    assert ("not pinned: the agent does not know" in row.reason) is tells
    assert "config is not a descriptor" in row.reason or not tells


def test_page_is_bounded(room: Preheat) -> None:
    requests = {f"r.e/{n}:v1": Request(f"r.e/{n}:v1", "policy") for n in range(api.MOST_ROWS + 5)}
    room.reconciler.snapshot = Snapshot(requests=requests, node=node(), at=1.0)
    room.reconciler.trouble = ""
    (section,) = api.sections(room)
    assert len(section.rows) == api.MOST_ROWS
    assert "5 more are not shown" in section.summary


# --- the plan -------------------------------------------------------------------------------------


def test_plan_is_what_the_last_cycle_made(room: Preheat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for it works on nothing: with 500 images that took seconds of the loop."""
    shared = (estimate.Reuse(REF, 300, 200, ("r.e/base:v1",)),)
    room.reconciler.snapshot = Snapshot(node=node(thresholds_assumed=True), shared=shared, at=5.0)
    monkeypatch.setattr(estimate, "shared", None)
    found = status.image_plan(room.reconciler)

    assert found.reuse == shared
    assert found.disk.thresholds_assumed is True


def having(shapes: dict[str, manifest.Shape]) -> base.ImageInventory:
    return base.ImageInventory(
        records=tuple(base.Record(name, shape.top) for name, shape in shapes.items()),
        shapes={shape.top.digest: shape for shape in shapes.values()},
    )


def test_reuse_counts_layers_on_the_same_layers_only() -> None:
    shapes = {"base": shape_of("a", "b"), "app": shape_of("a", "b", "c"), "odd": shape_of("b", "a")}
    report = {each.ref: each for each in estimate.shared(having(shapes), frozenset({"base"}))}
    assert (report["app"].shared, report["app"].total) == (200, 300)
    assert report["app"].bases == ("base",)
    assert report["odd"].shared == 0
    assert report["base"].shared == 0  # not with itself


def test_reuse_is_bounded_in_images_and_bases() -> None:
    shapes = {f"i{n:04}": shape_of("a", f"b{n}") for n in range(estimate.MOST_IMAGES + 50)}
    report = estimate.shared(having(shapes), frozenset(shapes))
    assert len(report) == estimate.MOST_IMAGES
    assert {len(each.bases) for each in report} == {estimate.MOST_BASES}
    assert {each.shared for each in report} == {100}


def test_reuse_is_of_tagged_images() -> None:
    shape = shape_of("a")
    names = (REF, f"r.e/fw/a@{shape.top.digest}", shape.top.digest)
    found = estimate.shared(having(dict.fromkeys(names, shape)), frozenset())
    assert [each.ref for each in found] == [REF]


# --- forms of output ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "narrow 1\n"),
        (["-o", "wide"], "wide 1\n"),
        (["-o", "yaml"], "a: 1\n"),
        (["-o", "json"], '{\n  "a": 1\n}\n'),
        (["--json"], '{\n  "a": 1\n}\n'),
    ],
)
def test_commands_print_the_form_that_is_asked_for(arguments: list[str], text: str) -> None:
    group = click.Group("x")

    @terminal.command(group, "show")
    def show(_ctx: Any) -> terminal.Shown:
        return (
            {"a": 1},
            lambda value: [f"narrow {value['a']}"],
            lambda value: [f"wide {value['a']}"],
        )

    done = click.testing.CliRunner().invoke(group, ["show", *arguments])
    assert done.output == text
    assert "Print a table" in click.testing.CliRunner().invoke(group, ["show", "--help"]).output


def test_dropped_text_has_the_time() -> None:
    request = desired.Request(REF, "policy", dropped_until=0.0)
    assert request.dropped_text == "dropped from policy; released at 1970-01-01 00:00 UTC"


# --- counters -------------------------------------------------------------------------------------


class StillRuntime:
    """A runtime in which one pinned image is in use, and which keeps what is noted."""

    honours_pins: bool | None = True
    release_after: float | None = None

    def __init__(self, folder: Path, last_used: dict[str, float]) -> None:
        self.shape = shape_of("a", "b")
        self.folder = folder
        self.last_used = last_used
        self.content = self.layers = self

    async def inventory(self) -> base.ImageInventory:
        hold = base.Hold(
            *("pin", REF, "policy", self.shape.top),
            id="nodeagent-pin-1",
            image_id=self.shape.image_id,
            names=(REF,),
            created=1.0,
        )
        return base.ImageInventory(
            records=(base.Record(REF, self.shape.top),),
            content=dict(self.shape.documents),
            snapshots=frozenset(layer.chain_id for layer in self.shape.layers),
            holds=(hold,),
            in_use=frozenset({self.shape.image_id}),
            last_used=dict(self.last_used),
            images_path=str(self.folder),
        )

    async def tend(self, _: base.ImageInventory) -> bool:
        return False

    async def usage(self, _: str) -> base.DiskUse:
        return base.DiskUse(100)

    async def close(self) -> None:
        """Nothing to close."""

    async def begin(self, hold: base.Hold) -> base.Hold:
        return hold

    async def note_use(self, digest: str, when: float) -> None:
        self.last_used[digest] = when


async def test_a_use_that_an_earlier_agent_noted_is_not_counted_again(
    room: Preheat, tmp_path: Path
) -> None:
    noted: dict[str, float] = {}
    for expected in (200 + 1, 0):  # two layers and a document; then the agent that comes after
        again = Preheat(room.reconciler.section, tmp_path, Reported())
        runtime = StillRuntime(tmp_path, noted)
        loop = again.reconciler
        loop.runtime = loop.pulls.runtime = runtime  # type: ignore[assignment]
        loop.local._runtime = runtime  # type: ignore[assignment]
        loop.uses._runtime = runtime  # type: ignore[assignment]
        shape = runtime.shape
        loop.local._shapes[shape.top.digest, loop.section.platform] = shape
        loop.section = loop.section.model_copy(update={"images": ()})
        try:
            await loop.cycle()
            await loop.cycle()
            assert loop.uses.used_bytes == expected
            (row,) = again.images()
            assert (row.state, row.pinned, row.in_use) == ("ready", True, True)
            assert row.dropped_until is not None
            assert status.image_plan(loop).reuse
        finally:
            await loop.stop()


def test_runtime_that_is_away_is_advised_on_once(room: Preheat) -> None:
    gone = base.RuntimeGoneError(
        "container runtime (Version)", "/s: gone", base.LOOK, "UNAVAILABLE"
    )
    room.reconciler.trouble = str(gone)
    (found,) = [each for each in status.findings(room.reconciler) if each.rule == "preheat-runtime"]
    assert found.message == "container runtime (Version): /s: gone"
    assert found.advice.startswith(base.LOOK)
