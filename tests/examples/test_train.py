"""The program of the PyTorch Job, and Slurm's scripts: on a dataset that a real agent serves."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import waiting
from tests.testbed.agent import Agent

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = EXAMPLES / "train.py"
FILES = {f"c{n % 7}/{n}.jpg": bytes([n % 251]) * (n * 37 + 1) for n in range(200)}


def train(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True, text=True, check=False, timeout=waiting.limit(60),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def slurm(name: str, node: Agent, holds: Path, **job: str) -> str:
    """What one of Slurm's scripts prints."""
    nodeagent = f'exec {Path(sys.executable).parent}/nodeagent --config {node.config} "$@"'
    return script(name, nodeagent, node.views, holds, **job)


def script(name: str, nodeagent: str, views: Path, holds: Path, **job: str) -> str:
    """``nodeagent``: what the command does. Slurm gives its scripts no PATH."""
    command = holds.parent / "command"
    command.write_text(f"#!/bin/sh\n{nodeagent}\n")
    command.chmod(0o755)
    given = {
        "NODEAGENT": str(command), "NODEAGENT_VIEWS": str(views),
        "NODEAGENT_HOLDS": str(holds), "NODEAGENT_HOLD_SECONDS": "120",
        "NODEAGENT_HOLD_EVERY": "0.2",
    }  # fmt: skip
    done = subprocess.run(
        ["/bin/bash", str(EXAMPLES / "slurm" / name)], env=given | job, capture_output=True,
        text=True, check=False, timeout=waiting.limit(60), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, "Slurm would drain the node"
    return done.stdout + done.stderr


def held(holds: Path, job: str) -> list[tuple[int, str]]:
    """The processes that hold datasets for a job, and which."""
    lines = (holds / job).read_text().splitlines()
    return [(int(pid), name) for pid, _, name in (line.partition(" ") for line in lines)]


class Scripts:
    """Slurm's scripts beside a command that notes what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.views, self.holds, self.calls = (folder / n for n in ("views", "holds", "calls"))
        self.calls.touch()
        self.state = "filling"

    def run(self, name: str, **job: str) -> str:
        does = (
            f'echo "$2 $3" >>{self.calls}\n'
            f'[ "$2" != show ] || printf "name       %s\\nstate      {self.state}: why\\n" "$3"'
        )
        return script(name, does, self.views, self.holds, **{"SLURM_JOB_ID": "17", **job})

    def prolog(self, datasets: str) -> str:
        return self.run("prolog.sh", SLURM_JOB_COMMENT=f"dataset={datasets}")


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    try:
        yield made
    finally:
        made.run("epilog.sh")


@pytest.mark.parametrize(
    ("state", "warmed"),
    [
        ("cold", True), ("filling", True), ("partial", True), ("failed", True),
        ("complete", True), ("paused", False), ("cancelled", False), ("evicted", False),
        ("removed", False),
    ],
)  # fmt: skip
def test_a_job_does_not_undo_what_an_operator_stopped(
    scripts: Scripts, state: str, warmed: bool
) -> None:
    (scripts.views / "coco").mkdir(parents=True)
    scripts.state = state
    scripts.prolog("coco")
    asked = ["show coco", "warm coco"] if warmed else ["show coco"]
    assert scripts.calls.read_text().splitlines() == asked
    ((pid, name),) = held(scripts.holds, "17")
    assert name == "coco", "held all the same"
    scripts.run("epilog.sh")
    waiting.until(lambda: not Path(f"/proc/{pid}/cwd").exists(), 10, "the end, though it came soon")


def test_scripts_touch_no_view_and_its_hold_enters_it(scripts: Scripts) -> None:
    """A program that asks for a view of a dead CephFS hangs. In this test there is no view yet."""
    (scripts.views / "coco").mkdir(parents=True)
    scripts.prolog("coco")
    place = scripts.views / "coco" / "data"
    assert f"export DATASET_COCO={place}" in scripts.run("task-prolog.sh")
    place.mkdir()
    ((pid, _),) = held(scripts.holds, "17")
    waiting.until(lambda: os.readlink(f"/proc/{pid}/cwd") == str(place), 10, "the hold")


def test_a_second_prolog_of_a_job_adds_to_the_first_ones_holds(scripts: Scripts) -> None:
    for name in ("coco", "imagenet", "a.b", "a-b"):
        (scripts.views / name).mkdir(parents=True)
    scripts.prolog("coco,a-b")
    first = held(scripts.holds, "17")
    scripts.prolog("imagenet,a.b,coco")
    both = held(scripts.holds, "17")
    assert both[:2] == first
    assert [name for _, name in both] == ["coco", "a-b", "imagenet", "a.b"]
    told = (scripts.holds / "17.datasets").read_text().splitlines()
    assert told == ["coco", "a-b", "imagenet", "a.b"]
    os.kill(both[0][0], signal.SIGKILL)
    waiting.until(lambda: not Path(f"/proc/{both[0][0]}").exists(), 10, "the hold's end")
    scripts.prolog("coco")
    assert [name for _, name in held(scripts.holds, "17")] == [name for _, name in both] + ["coco"]
    pids = [pid for pid, _ in held(scripts.holds, "17")]
    scripts.run("epilog.sh")
    waiting.until(lambda: not any(Path(f"/proc/{p}/cwd").exists() for p in pids), 10, "the end")
    assert list(scripts.holds.iterdir()) == []


def test_a_place_without_data_is_said(tmp_path: Path) -> None:
    missing, empty = train(str(tmp_path / "no")), train(str(tmp_path))
    assert missing.returncode == empty.returncode == 1
    assert "is no directory" in missing.stderr and "has no files" in empty.stderr


@pytest.mark.real
def test_program_reads_each_file_of_a_view(area: Path, node: Agent) -> None:
    source = area / "source"
    for name, data in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    node.add_dir("coco", source)
    node.start()
    node.wait_state("coco", "complete", seconds=60)
    from_source = train("--epochs", "2", str(source))
    from_view = train("--epochs", "2", "--workers", "2", str(node.view("coco")))
    assert from_view.returncode == 0, from_view.stderr
    size = sum(map(len, FILES.values()))
    said = re.findall(r"(\d+) files, (\d+) bytes, .* checksums (\w+)", from_view.stdout)
    assert said == re.findall(r"(\d+) files, (\d+) bytes, .* checksums (\w+)", from_source.stdout)
    assert [each[:2] for each in said] == [(str(len(FILES)), str(size))] * 2
    has_torch = importlib.util.find_spec("torch") is not None
    assert ("by PyTorch" in from_view.stdout) == has_torch


@pytest.mark.real
def test_slurm_holds_the_datasets_of_a_job_until_its_end(area: Path, node: Agent) -> None:
    source, holds = area / "source", area / "slurm"
    source.mkdir()
    (source / "a").write_bytes(b"a" * 1000)
    node.add_dir("coco-17", source, warm=False)
    node.start()
    node.wait_for(lambda: node.view("coco-17").is_dir(), 30, "the view")
    comment = {"SLURM_JOB_ID": "17", "SLURM_JOB_COMMENT": "dataset=coco-17,No_name,lost,../x"}
    slurm("prolog.sh", node, holds, **comment)
    node.wait_state("coco-17", "complete", seconds=60)
    told = slurm("task-prolog.sh", node, holds, SLURM_JOB_ID="17")
    assert f"export DATASET_COCO_17={node.view('coco-17')}" in told
    assert "does not serve the dataset 'lost'" in told and "No_name" not in told
    ((pid, _),) = held(holds, "17")
    # The mount that it stood in first was replaced when the dataset was complete.
    waiting.until(
        lambda: os.readlink(f"/proc/{pid}/cwd") == str(node.view("coco-17")), 10, "the hold"
    )
    refused = node.cli("dataset", "evict", "coco-17")
    assert refused.returncode != 0, "the job's data could go while it runs"

    stranger = subprocess.Popen(["sleep", "100"])
    try:
        with (holds / "17").open("a") as file:
            file.write(f"{stranger.pid}\nnonsense\n")
        slurm("epilog.sh", node, holds, SLURM_JOB_ID="17")
        assert stranger.poll() is None, "a number that is another process's by now"
    finally:
        stranger.kill()
        stranger.wait()
    waiting.until(lambda: not Path(f"/proc/{pid}/cwd").exists(), 10, "the hold's end")
    assert list(holds.iterdir()) == []
    assert slurm("prolog.sh", node, holds, SLURM_JOB_ID="18") == ""  # a job without a comment
