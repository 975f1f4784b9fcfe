"""The command line itself: exit codes, and commands that must work without an agent."""

import resource
import sys
from pathlib import Path

import pytest

import kit.errors
import kit.traces
from kit import terminal
from nodeagent import app, configfile, main
from nodeagent.commands import uninstall


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nodeagent", *words])
    try:
        main.main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def test_local_errors_have_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NODEAGENT_API", raising=False)
    assert run(monkeypatch, "--api", "http://127.0.0.1:1", "dataset", "list") == 9
    assert "no agent answers there" in capsys.readouterr().err
    assert run(monkeypatch, "--config", "/no/such", "dataset", "list") == 3
    assert run(monkeypatch, "--config", "/no/such", "run") == 3
    assert run(monkeypatch, "dataset", "lisst") == 2
    assert run(monkeypatch, "datasset") == 2


EVIL = "\x1b[2J\x1b[31m ok"  # what a job may call its process


def test_errors_and_words_that_were_given_do_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise kit.errors.InUseError("view /v", f"in use by pid 7 ({EVIL}): its root", "end it")

    monkeypatch.setattr(terminal, "call", fails)
    assert run(monkeypatch, "dataset", "remove", "a") == kit.errors.InUseError.exit_code
    assert run(monkeypatch, f"data{EVIL}") == 2
    said = capsys.readouterr().err
    assert said.count("\\x1b[2J\\x1b[31m ok") == 2
    assert "\x1b" not in said


def test_an_error_that_nobody_expected_does_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a child's last words: \x1b[2J password: hunter2")

    monkeypatch.setattr(configfile, "load", broken)
    assert run(monkeypatch, "config", "check", "/x") == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("RuntimeError: a child's last words: \\x1b[2J password: ***\n")


def test_uninstall_lists_users_whose_names_do_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = kit.traces.Trace("mount", "/v/a", users=(f"pid 7 ({EVIL}): its root",))
    stays = kit.traces.Trace("file", "/v/b", stays=EVIL)
    found = [uninstall.FoundTrace("cache", each) for each in (trace, stays)]

    async def report(*_: object) -> uninstall.Report:
        return uninstall.Report(tuple(found), (EVIL,))

    monkeypatch.setattr(uninstall, "run", report)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert run(monkeypatch, "--config", str(tmp_path / "none"), "uninstall") == 10
    said = capsys.readouterr()
    assert (said.out + said.err).count("\\x1b[2J") == 3
    assert "\x1b" not in said.out + said.err


def test_help_of_each_group_lists_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for group, command in (("dataset", "warm"), ("image", "preheat"), ("volume", "probe")):
        assert run(monkeypatch, group, "-h") == 0
        shown = capsys.readouterr().out
        assert f"nodeagent {group} [OPTIONS] COMMAND" in shown
        assert f"\n  {command} " in shown


@pytest.mark.parametrize("text", [None, "volumes: [", "volumes: {guard: {mode: nonsense}}"])
def test_offline_defaults_when_the_file_is_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """A kill switch works with a broken settings file, and says that it ignored it."""
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    section, state_dir = main.Context(file, None).offline("volumes")
    assert section.guard.mode
    assert state_dir == Path("/var/lib/nodeagent/state")
    assert ("using the defaults" in capsys.readouterr().err) is (text is not None)


def test_offline_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("state_dir: /x\nvolumes: {guard: {mode: enforce}}\n")
    section, state_dir = main.Context(file, None).offline("volumes")
    assert (section.guard.mode, state_dir) == ("enforce", Path("/x"))
    file.write_text("state_dir: /x\n")  # no section: its defaults, with the file's state_dir
    section, state_dir = main.Context(file, None).offline("volumes")
    assert (section.guard.mode, state_dir) == (type(section)().guard.mode, Path("/x"))


def test_the_agent_leaves_no_core_with_keys_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def agent(_: app.Agent) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_CORE)[0])

    config = tmp_path / "a.yaml"
    config.write_text(f"state_dir: {tmp_path}\n")
    monkeypatch.setattr(app.Agent, "run", agent)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("nodeagent.logs.configure", lambda: None)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert run(monkeypatch, "--config", str(config), "run") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert seen == [0]
