"""A guarded corner of the machine: a child cgroup, commands in it, and an agent that guards it.

The guard is never attached above the child cgroup, so that nothing else on the machine meets it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.testbed import blockdev, ports
from volumes.guard import kernel

COMMAND = Path(sys.executable).with_name("nodeagent")
_JOIN = 'echo 0 > "$CELL/cgroup.procs" && exec "$@"'


class Cell:
    """``run`` runs commands in the cgroup, as kubelet and CSI drivers do: no terminal."""

    def __init__(self, path: Path, pins: Path) -> None:
        self.path = path
        self.pins = pins

    def run(
        self, *command: str, cgroup: Path | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", _JOIN, "sh", *command],
            env={**os.environ, "CELL": str(cgroup or self.path)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def popen(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", _JOIN, "sh", *command],
            env={**os.environ, "CELL": str(self.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def guard(self, object_file: Path | None = None) -> kernel.Kernel:
        """Handles on the guard of the cell, to be closed."""
        if object_file is None:
            return kernel.Kernel(self.path, self.pins)
        return kernel.Kernel(self.path, self.pins, object_file)


def _clear_stale(root: Path) -> None:
    """What a killed run left behind an hour ago or longer: its program with its cgroup."""
    for old in root.glob("nodeagent-test-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 3600 and not (old / "cgroup.procs").read_text():
                kernel.Kernel(old, Path("/nonexistent")).detach()
                for child in sorted(old.glob("**/"), reverse=True):
                    child.rmdir()


@contextlib.contextmanager
def cell(folder: Path) -> Iterator[Cell]:
    """A fresh child cgroup; whatever was attached to it is detached at the end."""
    _clear_stale(kernel.find_cgroup())
    path = kernel.find_cgroup() / f"nodeagent-test-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    pins = folder / "bpf" / "nodeagent"
    made = Cell(path, pins)
    try:
        yield made
    finally:
        guard = made.guard()
        guard.detach()
        blockdev.run("umount", str(pins.parent), check=False)
        deadline = time.monotonic() + 10
        while True:
            try:
                for child in sorted(path.glob("**/"), reverse=True):
                    child.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


class Agent:
    """A real agent process. ``guard`` are settings of volumes.guard."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.port = ports.free(1)[0]
        self.config = folder / "nodeagent.yaml"
        self.state_dir = folder / "state"
        self.log = folder / "agent.log"
        self.settings = {
            "admin": {"listen": f"127.0.0.1:{self.port}"},
            "state_dir": str(self.state_dir),
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def write(self) -> None:
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump(self.settings))
        os.replace(new, self.config)

    def start(self, **environment: str) -> None:
        """Returns when the agent has started its components."""
        self.write()
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(COMMAND), "--config", str(self.config), "run"],
                env={**os.environ, **environment}, cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while b'"agent started"' not in self.log.read_bytes().rpartition(b"agent stopped")[2]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"agent did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def get(self, path: str, timeout: float = 5.0) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
        return json.loads(text) if text[:1] in "{[" else text

    def cli(self, *arguments: str, check: bool = True) -> Any:
        """A command's JSON."""
        done = subprocess.run(
            [str(COMMAND), "--config", str(self.config),
             *arguments, "--json"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode and check:
            raise RuntimeError(f"{arguments}: rc {done.returncode}: {done.stderr}")
        return json.loads(done.stdout) if done.stdout else {"exit": done.returncode,
                                                            "stderr": done.stderr}  # fmt: skip

    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/v1/findings")["findings"]
        return found

    def device(self, path: str) -> dict[str, Any]:
        """What the agent knows of the device; empty when nothing."""
        for each in self.get("/v1/volumes/guard")["devices"]:
            if each["device"] == path:
                return dict(each)
        return {}

    def kill(self) -> None:
        """SIGKILL, as the OOM killer does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            with self.log.open("ab") as stream:
                stream.write(b"agent stopped (killed by the test)\n")

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            self.process = None


def wait_for(what: str, seconds: float, condition: Any) -> Any:
    """The condition's first true value; AssertionError naming ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g}s: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def agent(folder: Path, where: Cell, **guard: Any) -> Iterator[Agent]:
    """An agent that guards the cell's loop devices, started, and stopped at the end."""
    settings = {
        "mode": "enforce",
        "drivers": ["loop"],
        "names": [blockdev.NAMES],
        "cgroup": str(where.path),
        "pins": str(where.pins),
        "quiet": "0s",  # the faults of earlier tests are still in the kernel's log
        **guard,
    }
    made = Agent(folder, {"volumes": {"guard": settings}})
    made.start()
    try:
        yield made
    finally:
        made.stop()
