"""What ceph-csi's pod does before it stages volumes, with directories in place of the host's."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
UNGUARDED = "no format guard after 1 s: volumes are staged unguarded\n"
OFF = "the format guard is switched off\n"
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
            capture_output=True, text=True, timeout=30, check=False,
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
