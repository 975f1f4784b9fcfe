"""That each room brings its checks and traces in the form that the process needs."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import kit.errors
import kit.files
import kit.room
import volumes.doctor
from kit.room import Check
from kube.settings import RoomSettings, ThisNode
from nodeagent import configfile, rooms
from nodeagent.commands import doctor, uninstall, units
from volumes.node import raw_block

FULL = {
    "cache": {
        "datasets": [
            {"name": "a", "freshness": "frozen", "source": {"kind": "dir", "path": "/a"}},
            {
                "name": "b",
                "freshness": "snapshot",
                "source": {
                    "kind": "cephfs", "monitors": ["10.0.0.1:6789"], "path": "/", "snapshot": "v1",
                    "secret_file": "/s",
                },
            },
        ]
    },
    "preheat": {
        "credentials": {"docker_config": "/d"},
    },
    "volumes": {
        "clusters": [
            {"name": "c", "monitors": ["10.0.0.1:6789"], "secret_file": "/s"},
            {"name": "d", "conf": "/c"},
        ]
    },
}  # fmt: skip


def reachable(function: Callable[..., Any]) -> bool:
    """Whether a child process finds it by its name."""
    found = getattr(sys.modules[function.__module__], function.__qualname__, None)
    return found is function and not function.__qualname__.startswith("_")


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_checks_can_be_made_in_a_child(room: kit.room.Room) -> None:
    assert room.checks is not None
    section = room.settings.model_validate(FULL[room.name])
    found = room.checks(section, Path("/state"))
    names = [check.name for check in found]
    assert len(names) == len(set(names))
    assert any(check.wanted for check in found)
    for check in found:
        assert reachable(check.look), check.name
        assert json.loads(json.dumps(check.arguments)) == list(check.arguments), check.name
        assert check.cost, check.name
        assert 0 < check.deadline <= 60


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_traces_can_be_looked_for_in_a_child(room: kit.room.Room) -> None:
    assert room.traces is not None
    traces = room.traces()
    assert reachable(traces.find)
    assert reachable(traces.remove)
    section = cast(RoomSettings, room.settings()).at(ThisNode(name="n7"))
    given = json.loads(json.dumps(section.as_json()))
    assert cast(type[RoomSettings], room.settings).of_json(given) == section


def works() -> str:
    return "it works"


def lacks() -> str:
    raise kit.errors.HostError("the thing", "it is not there", "put it there")


def breaks() -> str:
    raise KeyError("a bug")


async def test_result_says_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(*_: Any) -> list[Check]:
        return [
            Check("well", works, (), "all"),
            Check("gone", lacks, (), "much"),
            Check("optional", lacks, (), "little", wanted=False),
            Check("bug", breaks, (), "something"),
        ]

    mine = kit.room.Room("cache", "", rooms.ROOMS[1].settings, lambda *_: None, checks=checks)  # type: ignore[arg-type]
    monkeypatch.setattr(rooms, "ROOMS", (mine,))
    file = tmp_path / "a.yaml"
    file.write_text(f"state_dir: {tmp_path}\ncache: {{}}\n")
    found = {each.name: each for each in await doctor.examine(file) if each.room == "cache"}
    words = {name: each.word for name, each in found.items()}
    assert words == {"well": "ok", "gone": "MISSING", "optional": "absent", "bug": "MISSING"}
    assert found["gone"].said == "the thing: it is not there"
    assert (found["gone"].cost, found["gone"].remedy) == ("much", "put it there")
    assert "a bug" in found["bug"].said
    file.write_text(f"state_dir: {tmp_path}\n")
    found = {each.name: each for each in await doctor.examine(file) if each.room == "cache"}
    assert not any(each.wanted for each in found.values())


async def test_no_settings_want_a_clock_that_something_synchronises(tmp_path: Path) -> None:
    found = {each.name: each for each in await doctor.examine(tmp_path / "none")}
    assert [found["root"].wanted, found["clock"].wanted] == [True, False]
    assert found["clock"].said.startswith(("synchronised", "the kernel says"))


async def test_unusable_settings_are_a_result(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cahce: {}\n")
    settings = next(each for each in await doctor.examine(file) if each.name == "settings")
    assert settings.word == "MISSING"
    assert "there is no such setting" in settings.said
    file.unlink()
    settings = next(each for each in await doctor.examine(file) if each.name == "settings")
    assert settings.word == "absent"


async def test_uninstall_is_refused_while_an_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "ROOMS", ())
    monkeypatch.setattr(units, "find", list)
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "settings.yaml").write_text("")
    (tmp_path / "precious").write_text("")
    settings = configfile.parse(f"state_dir: {state}\nadmin: {{socket: {tmp_path}/s}}\n", "x")
    removed: list[str] = []
    lock = kit.files.lock(state / "lock", 0)
    with pytest.raises(kit.errors.RefusedError, match="an agent runs"):
        await uninstall.run(settings, True, lambda each: removed.append(each.trace.name))
    os.close(lock)
    listed = await uninstall.run(settings, False, lambda each: removed.append(each.trace.name))
    assert removed == []
    done = await uninstall.run(settings, True, lambda each: removed.append(each.trace.name))
    assert [each.trace for each in done.found] == [each.trace for each in listed.found]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"]
    assert done.troubles == ()


def test_doctor_reads_the_tables_in_which_raw_volumes_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw_block, "spaces", lambda: (frozenset({1}), {b"1": 1, b"2": os.getpid()}))
    assert "and in a mount namespace of kubelet's own" in volumes.doctor.raw_volumes()
    no_process = 2**22 + 1
    monkeypatch.setattr(raw_block, "spaces", lambda: (frozenset({1}), {b"2": no_process}))
    with pytest.raises(kit.errors.HostError, match="kubelet's mount namespace.*CAP_SYS_PTRACE"):
        volumes.doctor.raw_volumes()
