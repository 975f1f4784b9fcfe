"""Rounds of the audit with a scripted scan. Pure; test_leaked_mounts.py has real devices."""

import dataclasses
from pathlib import Path

import pytest

import kit.room
from linux import netlink
from tests.volumes.audit import world
from volumes import metrics
from volumes.audit import status
from volumes.audit.inventory import model, scan
from volumes.audit.logs import matcher
from volumes.settings import AuditSettings


async def test_a_short_lived_private_copy_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``unshare -m`` of two seconds, just when the namespaces are visited."""
    kubelet = world.place("/", device=(8, 1))
    copy = world.space(world.place("/", device=(8, 1), propagation="private"))
    deep_looks = 0
    lasts = False
    now = 1000.0

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        nonlocal deep_looks
        deep_looks += request.deep
        return dataclasses.replace(
            world.INVENTORY,
            deep=request.deep,
            devices=(),
            kubelet=kubelet,
            spaces=(copy,) if request.deep and (deep_looks == 1 or lasts) else (),
            spaces_at=now if request.deep else 0.0,
        )

    def found() -> list[str]:
        return [f.rule for f in audit.findings if f.rule == "private-propagation"]

    monkeypatch.setattr("time.time", lambda: now)
    for lasts in (False, True):
        deep_looks = 0
        audit = world.audit(world.scene().settings, tmp_path)
        monkeypatch.setattr(audit.scanner, "scan", look)
        for after, looks in ((0.0, 1), (10.0, 1), (6.0, 2), (20.0, 2)):
            now += after
            assert found() == []
            await audit.round()
            assert deep_looks == looks
            if looks == 2:
                break
        assert found() == (["private-propagation"] if lasts else [])


async def test_a_failed_visit_keeps_rules_unknown_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 2
    looks: list[bool] = []

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        looks.append(request.deep)
        if request.deep and looks.count(True) <= failures:
            raise scan.BlindError("volume audit", "no answer", "")
        hidden = ("3 processes may not be read",) if request.deep else ()
        return dataclasses.replace(world.INVENTORY, deep=request.deep, devices=(), deep_gaps=hidden)

    audit = world.audit(world.scene().settings, tmp_path)
    monkeypatch.setattr(audit.scanner, "scan", look)
    for _ in range(failures):
        assert await audit.round() is None
        assert {s.name: s.state for s in audit.states}["leaked-mount"] == "unknown"
    assert looks == [True] * failures
    assert await audit.round() is not None
    assert {s.name: s.state for s in audit.states}["leaked-mount"] == "ok"
    assert await audit.round() is not None
    assert looks == [True] * (failures + 1) + [False]
    assert status.overview(audit)["gaps"] == ["3 processes may not be read"]


async def test_a_quick_look_that_works_does_not_make_up_for_a_failed_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    leaked = dataclasses.replace(world.DEVICE, active=("ext4",))

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        looks.append(request.deep)
        if looks[1:] and request.deep:
            raise scan.BlindError("volume audit", "no answer", "")
        devices = (leaked,) if looks[1:] else ()
        return dataclasses.replace(world.INVENTORY, deep=request.deep, devices=devices, host=())

    audit = world.audit(world.scene().settings, tmp_path)
    monkeypatch.setattr(audit.scanner, "scan", look)
    assert await audit.round() is not None
    for _ in range(2):
        assert await audit.round() is None
        assert {s.name: s.state for s in audit.states}["leaked-mount"] == "unknown"
    assert looks == [True, False, True, False, True]


async def test_devices_that_uevents_name_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are read first, after a failed scan, after lost events, and before an action."""
    asked: list[tuple[str, ...] | None] = []
    waiting: list[list[str] | Exception] = []

    class Uevents:
        def read(self) -> list[netlink.Uevent]:
            found = waiting.pop(0) if waiting else []
            if isinstance(found, Exception):
                raise found
            return [netlink.Uevent("change", name, "disk") for name in found]

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        asked.append(request.changed)
        if request.changed == ("rbd7",):
            raise scan.BlindError("volume audit", "no answer", "")
        return dataclasses.replace(world.INVENTORY, deep=request.deep, devices=())

    audit = world.audit(world.scene().settings, tmp_path)
    audit._node._uevents = Uevents()  # type: ignore[assignment]
    audit._node.devices.append(audit._devices_changed)
    monkeypatch.setattr(audit.scanner, "scan", look)
    await audit.round()
    await audit.round()
    assert asked == [None, ()]
    waiting += [["rbd1", "rbd0"], ["rbd1"]]
    await audit.round()
    assert asked[2:] == [("rbd0", "rbd1")]
    assert not audit._wake.is_set(), "what a scan reads starts no other one"
    waiting += [["rbd7"]]
    await audit.round()
    await audit.round()
    assert asked[3:] == [("rbd7",), None]
    waiting += [netlink.Overflow()]
    await audit.round()
    await audit.round(full=True)
    await audit._plans_afresh()
    assert asked[5:] == [None, (), None]


async def test_a_disabled_audit_does_nothing(tmp_path: Path) -> None:
    disabled = AuditSettings(enabled=False)
    audit = world.audit(disabled, tmp_path)
    await audit.start()
    assert audit.health() == kit.room.Health(alive=True, ready=True)
    assert list(metrics.of_audit(audit)) == []
    assert audit.follower is None and audit.scanner.scans == 0
    assert await audit.reconcile(world.wanted(disabled)) == []
    assert await audit.reconcile(world.wanted(AuditSettings(enabled=True))) == ["audit.enabled"]
    assert audit.health().reasons == ()
    await audit.stop()


async def test_log_lines_about_devices_that_are_left_out_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that name no device do: what they are about may be watched."""
    asked: list[tuple[str, ...]] = []

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        asked.append(request.names)
        return dataclasses.replace(world.INVENTORY, deep=request.deep)

    audit = world.audit(AuditSettings.model_validate({"names": ["rbd0", "rbd1"]}), tmp_path)
    monkeypatch.setattr(audit.scanner, "scan", look)
    audit._load_patterns(audit.settings)
    named = ("rbd0", "rbd0p1", "rbd1", "rbd2", "rbd2p1", "")
    audit._log_hits(
        [matcher.Hit("block-io-error", "kernel", f"line {n}", {"device": n}) for n in named]
    )

    def about() -> set[str]:
        return {f.evidence.get("device", "") for f in audit.findings if f.rule.startswith("log-")}

    await audit.round()
    assert about() == {"rbd0", "rbd0p1", "rbd1", ""}
    new = audit.settings.model_copy(update={"names": ("rbd1",)})
    await audit.reconcile(world.wanted(new))
    await audit.round()
    assert {hit.device for hit in audit._scene().logs} == {"rbd1", ""}
    assert set(asked) == {("rbd0", "rbd1"), ("rbd1",)}


async def test_a_changed_file_of_patterns_counts_without_a_restart(tmp_path: Path) -> None:
    """And one that cannot be used leaves the patterns as they are."""
    file = tmp_path / "patterns.yaml"
    text = "- {id: mine, source: kernel, anchor: one, regex: one, severity: info,"
    text += " meaning: m, advice: a}"
    file.write_text(text.replace("one", "first"))
    configuration = AuditSettings.model_validate({"logs": {"patterns": str(file)}})
    audit = world.audit(configuration, tmp_path)
    audit._load_patterns(audit.settings)
    audit._follow_logs()
    before = audit.follower
    await audit.reconcile(world.wanted(configuration))
    assert audit.follower is before, "nothing changed"

    file.write_text("- 7")
    for _ in range(2):
        with pytest.raises(kit.errors.SettingsError, match=r"patterns\.yaml"):
            await audit.reconcile(world.wanted(configuration))
    assert audit._patterns.by_id["mine"].anchor == "first"
    other = tmp_path / "other"
    other.write_text(text)
    other.replace(file)
    await audit.reconcile(world.wanted(configuration))
    assert audit._patterns.by_id["mine"].anchor == "one"
    assert audit.follower is not before
    file.unlink()
    with pytest.raises(kit.errors.SettingsError, match="cannot be read"):
        await audit.reconcile(world.wanted(configuration))
    await audit.stop()
