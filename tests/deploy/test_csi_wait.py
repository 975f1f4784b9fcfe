"""What ceph-csi's pod does before it stages volumes, with directories in place of the host's."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.testbed import waiting
from volumes import settings
from volumes.guard import kernel, override, pins

REPO = Path(__file__).parents[2]
UNGUARDED = "no format guard after 1 s: volumes are staged unguarded\n"
OFF = "the format guard is switched off\n"
SWITCHED_OFF = override.Override(kernel.Mode.OFF, "a", "b", 1.0)
WANTED, OVERRIDE = "state/volumes/guard-wanted.json", "state/volumes/guard-override.json"


class Wait:
    def __init__(self, folder: Path) -> None:
        self.state, self.bpf = folder / "host-state", folder / "bpf"
        (self.state / "state/volumes").mkdir(parents=True)
        (self.bpf / "nodeagent").mkdir(parents=True)
        patch = yaml.safe_load((REPO / "deploy/guard/csi-wait.yaml").read_text())
        (init,) = patch["spec"]["template"]["spec"]["initContainers"]
        script = init["command"][-1].replace("/state/state/", f"{self.state}/state/")
        script = script.replace("/state/unguarded", f"{self.state}/unguarded")
        self.script = script.replace("/bpf/nodeagent", f"{self.bpf}/nodeagent")
        self.fifos: list[Path] = []

    def hangs(self, name: str) -> None:
        """Whoever reads it waits for ever."""
        os.mkfifo(self.state / name)
        self.fifos.append(self.state / name)

    def says(self, seconds: str = "1") -> str:
        done = subprocess.run(
            ["sh", "-c", self.script], env={**os.environ, "WAIT_SECONDS": seconds},
            capture_output=True, text=True, timeout=waiting.limit(30), check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def wait(tmp_path: Path) -> Iterator[Wait]:
    made = Wait(tmp_path)
    yield made
    for fifo in made.fifos:  # nobody is left behind
        try:
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass  # nobody reads


@pytest.mark.parametrize("hangs", [WANTED, OVERRIDE])
def test_a_state_disk_that_hangs_holds_no_volume_up_for_ever(wait: Wait, hangs: str) -> None:
    (wait.state / WANTED).write_text("{}") if hangs != WANTED else None
    wait.hangs(hangs)
    assert wait.says() == UNGUARDED


def test_the_pin_counts_while_the_state_disk_hangs(wait: Wait) -> None:
    wait.hangs(WANTED)
    (wait.bpf / "nodeagent/program").touch()
    assert wait.says("100000") == ""


@pytest.mark.parametrize(
    ("files", "seconds", "says"),
    [
        ({}, "100000", ""),
        ({WANTED: '{"mode": "enforce"}'}, "1", UNGUARDED),
        ({WANTED: '{"mode": "off"}'}, "100000", OFF),
        ({WANTED: '{"mode": "enforce"}', OVERRIDE: '{"mode": "off"}'}, "100000", OFF),
        ({WANTED: '{"mode": "off"}', OVERRIDE: '{"mode": "enforce"}'}, "1", UNGUARDED),
        ({WANTED: "{}", "unguarded": ""}, "100000", ""),
    ],
)
def test_waits_only_where_a_guard_is_wanted(
    wait: Wait, files: dict[str, str], seconds: str, says: str
) -> None:
    for name, text in files.items():
        (wait.state / name).write_text(text)
    assert wait.says(seconds) == says


async def test_the_kill_switch_counts_while_the_state_disk_hangs(
    wait: Wait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait.hangs(WANTED)
    await held(wait, tmp_path, monkeypatch, SWITCHED_OFF)
    assert wait.says("100000") == OFF


@pytest.mark.parametrize(
    ("disk", "memory", "seconds", "says"),
    [
        ("enforce", SWITCHED_OFF, "100000", OFF),
        ("off", override.Override(kernel.Mode.ENFORCE, "a", '"mode": "off"', 1.0), "1", UNGUARDED),
        ("off", None, "1", UNGUARDED),  # the operator took it back; the settings want a guard
    ],
)
async def test_what_memory_holds_counts_before_a_disk_that_took_nothing(
    wait: Wait, disk: str, memory: override.Override | None, seconds: str, says: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (wait.state / WANTED).write_text('{"mode": "enforce"}')
    (wait.state / OVERRIDE).write_text(f'{{"mode": "{disk}"}}')
    await held(wait, tmp_path, monkeypatch, memory)
    assert wait.says(seconds) == says


async def held(
    wait: Wait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: override.Override | None
) -> None:
    """As an operator's command that finds no state directory to write to."""
    monkeypatch.setattr(pins, "file_system", lambda _: None)
    file = tmp_path / "file"
    file.touch()
    guard = settings.GuardSettings(pins=wait.bpf / "nodeagent")
    assert (await override.save(guard, file, given))[0]
