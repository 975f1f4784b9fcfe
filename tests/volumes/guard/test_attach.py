"""Settings that cannot be used never make the guard weaker: 'volume guard attach' and the agent."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.files
from nodeagent import main
from tests.testbed import blockdev, cell, constants, faultfs, grave, waiting
from tests.testbed.agent import Agent
from volumes import settings
from volumes.guard import kernel, override, without_agent

pytestmark = pytest.mark.real

STARTS = int(os.environ.get("STARTS", "60"))
SEED = int(os.environ.get("SEED", "1"))


class Node:
    """A node's settings file with a guard that enforces, and starts from it."""

    def __init__(self, where: cell.Cell, folder: Path) -> None:
        self.where, self.folder = where, folder
        self.state = folder / "state"
        self.file, self.copy = folder / "nodeagent.yaml", folder / "settings.yaml"

    def text(self, **guard: Any) -> str:
        # On one line: no cut leaves a valid file that names another cgroup.
        given, _ = constants.divide(settings.GuardSettings, cell.settings(self.where, **guard))
        section = json.dumps({"guard": given})
        return f"state_dir: {self.state}\nvolumes: {section}\n"

    def attach(self, text: str | None, copied: bool = False) -> dict[str, Any]:
        self.file.unlink(missing_ok=True)
        if text is not None:
            self.file.write_text(text)
        found = main.Context(self.file, None).section("volumes", self.copy if copied else None)
        return asyncio.run(without_agent.attach(found))

    def present(self) -> kernel.Present:
        guard = self.where.guard()
        try:
            return guard.read()
        finally:
            guard.close()

    def detach(self) -> None:
        guard = self.where.guard()
        guard.detach()
        guard.close()


@pytest.fixture
def node(where: cell.Cell, tmp_path: Path) -> Iterator[Node]:
    made = Node(where, tmp_path)
    yield made
    made.detach()


def without_mode(node: Node) -> str:
    return node.text().replace('"mode": "enforce", ', "")


BROKEN = {
    "missing file": lambda node: None,
    "unknown key": lambda node: node.text() + "cache: {budgets: 1}\n",
    "key of a newer agent": lambda node: node.text(a_key_of_later=1),
    "wrong type": lambda node: node.text(drivers=7),
    "no YAML": lambda node: node.text() + "cache: [\n",
    "no section": lambda node: f"state_dir: {node.state}\n",
    "empty section": lambda node: f"state_dir: {node.state}\nvolumes:\n",
    "no mode": without_mode,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_settings_leave_an_enforcing_guard_as_it_is(node: Node, name: str) -> None:
    assert node.attach(node.text())["mode"] == "enforce"
    before = node.present()
    text = BROKEN[name](node)
    if name == "missing file":  # nothing says where the state is
        with pytest.raises(kit.errors.SettingsError, match="no such settings file"):
            node.attach(text)
    elif name.startswith(("no section", "empty", "no mode")):
        assert node.attach(text)["mode"] == "enforce"
    else:
        with pytest.raises(kit.errors.SettingsError):
            node.attach(text)
    now = node.present()
    assert (now.mode, now.majors, now.openers, now.words) == (
        *(before.mode, before.majors, before.openers, before.words),
    )
    assert [each.id for each in now.programs] == [each.id for each in before.programs]


@pytest.mark.parametrize("booted", [False, True])
def test_a_lost_block_of_the_guard_takes_no_driver_and_admits_no_opener(
    node: Node, booted: bool
) -> None:
    """Also where the guard is attached is as it was: the file does not say it any more."""
    node.attach(node.text(openers=["mount"]))
    before = node.present()
    lost = f"state_dir: {node.state}\nvolumes: {{}}\n"
    for _ in range(2):
        if booted:
            node.detach()
        assert node.attach(lost)["mode"] == "enforce"
        now = node.present()
        assert (now.majors, now.openers, now.words) == (
                before.majors, before.openers, before.words,
            )  # fmt: skip
        assert now.openers == {"mount"}


def test_a_lost_block_and_a_damaged_memory_leave_the_kernel_as_it_is(node: Node) -> None:
    node.attach(node.text(openers=["mount"]))
    before = node.present()
    memory = node.state / "volumes" / "guard-wanted.json"
    memory.write_text("{")
    # Where it is attached was in the damaged file, so the settings must say it here.
    place = {"cgroup": str(node.where.path), "pins": str(node.where.pins)}
    status = node.attach(f"state_dir: {node.state}\nvolumes: {json.dumps({'guard': place})}\n")
    assert "guard-wanted.json cannot be used" in "".join(status["damaged"])
    now = node.present()
    assert before.majors <= now.majors
    assert (now.mode, now.openers, now.words) == (before.mode, before.openers, before.words)
    assert memory.read_text() == "{"


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - {"missing file"}))
def test_after_a_boot_with_broken_settings_the_last_ones_count(node: Node, name: str) -> None:
    node.attach(node.text())
    before = node.present()
    node.detach()  # as a boot does
    status = node.attach(BROKEN[name](node))
    assert (status["mode"], status["proof"]) == ("enforce", "enforced")
    assert node.present().majors == before.majors


@pytest.mark.parametrize("name", BROKEN)
def test_nothing_is_attached_where_nothing_ever_was(node: Node, name: str) -> None:
    if name == "no mode":  # the default, on a node that is new
        assert node.attach(without_mode(node))["mode"] == "dry-run"
        return
    try:
        node.attach(BROKEN[name](node))
    except kit.errors.SettingsError:
        pass
    assert not node.present().attached


def test_last_good_copy_is_used_and_kept(node: Node) -> None:
    assert node.attach(node.text(openers=["mount"]), copied=True)["mode"] == "enforce"
    for name in ("unknown key", "missing file"):
        assert node.attach(BROKEN[name](node), copied=True)["mode"] == "enforce"
        assert node.present().openers == {"mount"}
    assert node.copy.read_text() == node.text(openers=["mount"])
    assert node.attach(node.text(mode="dry-run"), copied=True)["mode"] == "dry-run"  # by name
    assert node.copy.read_text() == node.text(mode="dry-run")


def test_null_takes_the_guard_off_by_name(node: Node) -> None:
    node.attach(node.text())
    # The section that is gone does not say where the guard is: what was last in force does.
    assert node.attach(f"state_dir: {node.state}\nvolumes: null\n")["mode"] == "off"
    assert not node.present().attached
    node.attach(f"state_dir: {node.state}\n")
    assert not node.present().attached


def test_mode_is_never_lower_after_any_start(node: Node) -> None:
    """Agents start with settings that are broken at random, some of them after a boot."""
    dice = random.Random(SEED)
    node.attach(node.text(), copied=True)
    good = node.text()
    for start in range(STARTS):
        name = dice.choice([*BROKEN, "cut", "cut", "good"])
        text = BROKEN[name](node) if name in BROKEN else good
        if name == "cut":
            # Not within the first line: a node that loses its state_dir has another memory.
            text = good[: dice.randrange(good.index("\n"), len(good))]
        copied, booted = dice.random() < 0.5, dice.random() < 0.2
        if booted and text is not None:
            node.detach()
        try:
            node.attach(text, copied)
        except kit.errors.SettingsError:
            pass
        said = f"start {start} of seed {SEED}: {name}, copy {copied}, boot {booted}"
        with grave.missing_denial():
            assert node.present().mode is kernel.Mode.ENFORCE, said


# --- the agent


def figures(agent: Agent) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{agent.port}/metrics", timeout=waiting.limit(60)
    ) as answer:
        return str(answer.read().decode())


def test_agent_starts_with_the_last_good_settings_and_says_so(
    where: cell.Cell, tmp_path: Path
) -> None:
    copy = tmp_path / "settings.yaml"
    made = Agent(tmp_path, {"volumes": cell.volumes(where)})
    made.arguments = ("--last-good", str(copy))
    made.start()
    try:
        waiting.until(copy.exists, 10, "a copy of the settings")
        made.stop()
        made.settings["a_key_of_later"] = 1
        made.start()
        assert made.get("/v1/volumes/guard")["mode"] == "enforce"
        assert "nodeagent_settings_in_force 0.0" in figures(made)
        assert "a_key_of_later" in "".join(made.get("/readyz")["reasons"])
        del made.settings["a_key_of_later"]
        made.write()
        waiting.until(lambda: "nodeagent_settings_in_force 1.0" in figures(made), 30, "all well")
    finally:
        made.stop()


@pytest.mark.parametrize("damaged", [False, True])
def test_agent_keeps_what_its_reloaded_settings_have_lost(
    where: cell.Cell, tmp_path: Path, damaged: bool
) -> None:
    with cell.agent(tmp_path, where, openers=["mount"]) as agent:
        before = where.guard().read()
        assert before.openers == {"mount"}
        if damaged:
            (agent.state / "volumes" / "guard-wanted.json").write_text("{")
        for start_anew in (False, True):
            # A damaged memory does not say where the guard is.
            place = {"cgroup": str(where.path), "pins": str(where.pins)} if damaged else {}
            agent.settings["volumes"] = {"guard": {**place, "lease": "80s"}}
            if start_anew:
                agent.stop()
                if damaged:
                    (agent.state / "volumes" / "guard-wanted.json").write_text("{")
                agent.start()
            else:
                agent.write()
            waiting.until(
                lambda: agent.get("/v1/volumes/guard")["settings_mode"], 10, "the settings"
            )
            # Its next reconcile: an earlier one may have been under way.
            first = agent.cli_json("volume", "guard", "set-mode", "settings", "--reason", "a test")
            now = where.guard().read()
            assert (first["mode"], now.mode) == ("enforce", kernel.Mode.ENFORCE)
            assert before.majors <= now.majors
            assert (now.openers, now.words) == (before.openers, before.words)
        if damaged:
            said = "".join(agent.get("/v1/volumes/guard")["damaged"])
            assert "guard-wanted.json cannot be used" in said
            rules = {f["rule"] for f in agent.findings()}
            assert "guard-state-damaged" in rules
        # And the kill switch is at the guard that is there, though the file does not say where.
        agent.cli_json("volume", "guard", "detach", "--reason", "a test")
        assert not where.guard().read().attached


def test_kill_switch_without_agent_finds_a_guard_whose_place_is_lost(node: Node) -> None:
    node.attach(node.text())
    lost = settings.GuardSettings()
    done = asyncio.run(override.set_mode(lost, node.state, "dry-run", "me", "why"))
    assert done.attached and node.present().mode is kernel.Mode.DRY_RUN
    asyncio.run(override.detach(lost, node.state, "me", "why"))
    assert not node.present().attached


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_an_operators_enforce_comes_back_after_a_boot_though_its_file_is_damaged(
    node: Node, text: str
) -> None:
    weak = node.text(mode="dry-run")
    node.attach(weak)
    known = constants.made(settings.GuardSettings, **cell.settings(node.where, mode="dry-run"))
    asyncio.run(override.set_mode(known, node.state, "enforce", "me", "why"))
    (node.state / "volumes" / "guard-override.json").write_text(text)
    for boot in (False, True):
        if boot:
            node.detach()
        status = node.attach(weak)
        assert "cannot be used" in str(status["damaged"]) or "newer" in str(status["damaged"])
        assert node.present().mode is kernel.Mode.ENFORCE, boot


# --- the kill switch and its disk


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A file system whose server can be stopped."""
    place = tmp_path / "fuse"
    place.mkdir()
    (tmp_path / "control").write_text("[]")
    (tmp_path / "backing").write_bytes(bytes(4096))
    server = subprocess.Popen(
        [sys.executable, faultfs.__file__, str(place), str(tmp_path / "backing"),
         str(tmp_path / "control")], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    try:
        yield place, server
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()
        server.stdout.close()
        blockdev.run("umount", "-l", str(place), check=False)


@pytest.mark.parametrize("trouble", ["full", "read-only", "hangs"])
@pytest.mark.parametrize("direct", [False, True], ids=["agent", "direct"])
def test_kill_switch_needs_no_disk(
    where: cell.Cell,
    tmp_path: Path,
    hanging: tuple[Path, "subprocess.Popen[bytes]"],
    trouble: str,
    direct: bool,
) -> None:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    blockdev.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(state))
    words = ("--direct",) if direct else ()
    try:
        with cell.agent(tmp_path, where) as agent:
            assert agent.get("/v1/volumes/guard")["mode"] == "enforce"
            if trouble == "full":
                filler = os.open(state / "filler", os.O_WRONLY | os.O_CREAT)
                with kit.files.closing(filler), contextlib.suppress(OSError):
                    while True:
                        os.write(filler, bytes(4096))
            elif trouble == "read-only":
                blockdev.run("mount", "--bind", str(state / "volumes"), str(state / "volumes"))
                blockdev.run("mount", "-o", "remount,bind,ro", str(state / "volumes"))
            else:
                (state / "volumes" / "guard-override.json").symlink_to(hanging[0] / "disk")
                (state / "volumes" / ".guard-override.json.new").symlink_to(hanging[0] / "disk")
                (state / "volumes" / "operator.log").symlink_to(hanging[0] / "disk")
                hanging[1].send_signal(signal.SIGSTOP)
            done = agent.cli_json("volume", "guard", "detach", "--reason", "an incident", *words)
            assert done["mode"] == "off"
            assert "until the next boot" in "".join(done["warnings"])
            waiting.until(
                lambda: agent.get("/v1/volumes/guard")["wanted_mode"] == "off", 60, "the agent"
            )
            assert not where.guard().read().attached
            agent.kill()
            if trouble == "read-only":
                blockdev.run("umount", str(state / "volumes"))
            elif trouble == "full":
                (state / "filler").unlink()
            else:
                hanging[1].send_signal(signal.SIGCONT)
                for link in filter(Path.is_symlink, list((state / "volumes").iterdir())):
                    link.unlink()
            agent.start()  # the next agent respects it
            assert agent.get("/v1/volumes/guard")["wanted_mode"] == "off"
    finally:
        hanging[1].send_signal(signal.SIGCONT)
        blockdev.run("umount", "-l", str(state), check=False)
