"""A real agent for a benchmark: its own settings, port, store and views below one folder."""

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.bench import harness
from tests.testbed import ports

_NODEAGENT = harness.ROOT / ".venv" / "bin" / "nodeagent"
_STOP_SECONDS = 30


class Agent:
    """Talks to one by its admin API."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], url: str) -> None:
        self.folder = folder
        self.pid = process.pid
        self._process = process
        self._url = url

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer; RuntimeError with the agent's own words for an error."""
        request = urllib.request.Request(self._url + path, method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from error

    def dataset(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.call("GET", f"/v1/datasets/{name}")
        return shown

    def post(self, name: str, verb: str) -> None:
        self.call("POST", f"/v1/datasets/{name}/{verb}", {})

    def wait_complete(self, name: str, seconds: float) -> dict[str, Any]:
        """The dataset once it is complete and served by the store itself."""
        shown: dict[str, Any] = {}

        def complete() -> bool:
            nonlocal shown
            shown = self.dataset(name)
            if shown["state"] in ("partial", "failed", "cancelled"):
                raise RuntimeError(f"dataset {name} is {shown['state']}: {shown['why']}")
            return bool(shown["state"] == "complete" and shown["served_by"] == "store")

        harness.wait_for(f"dataset {name} complete", complete, seconds)
        return shown

    def view(self, name: str) -> Path:
        return self.folder / "views" / name / "data"

    def tree(self, name: str) -> Path:
        """The tree of its only generation in the store."""
        (found,) = (self.folder / "store" / name).glob("*/tree")
        return found

    def processes(self) -> list[int]:
        """The agent and all that descends from it."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int(_stat(int(entry.name))[1])
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def rss(self) -> float:
        """MiB of the whole process tree."""
        pages = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_seconds(self) -> float:
        """CPU that the tree has used, children that have ended and were waited for included."""
        seconds = 0.0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                ticks = sum(int(field) for field in _stat(pid)[13:15])  # of ended children
                seconds += ticks / os.sysconf("SC_CLK_TCK")
                # In nanoseconds: at rest a tick of 10 ms would be most of what there is.
                for task in Path(f"/proc/{pid}/task").iterdir():
                    seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        return seconds


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (number 3)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@contextlib.contextmanager
def running(folder: Path, cache: dict[str, Any]) -> Iterator[Agent]:
    """An agent with these ``cache`` settings beside store, views and state below ``folder``."""
    (port,) = ports.free(1)
    settings = {
        "admin": {"listen": f"127.0.0.1:{port}"},
        "state_dir": str(folder / "state"),
        "cache": {"store": str(folder / "store"), "views": str(folder / "views"), **cache},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nodeagent.yaml"
    file.write_text(yaml.safe_dump(settings))
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [str(_NODEAGENT), "--config", str(file), "run"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=harness.ROOT,
        )  # fmt: skip
    agent = Agent(folder, process, f"http://127.0.0.1:{port}")
    try:
        harness.wait_for("the agent's API", lambda: _answers(agent, process), 30)
        yield agent
    except BaseException:
        harness.say((folder / "agent.log").read_text(errors="replace")[-3000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        harness.clear(folder)  # views and sources outlive an agent by design; not this one's


def _answers(agent: Agent, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"the agent ended with {process.returncode}")
    try:
        # The API answers a moment before the cache has started.
        return bool(agent.call("GET", "/v1/datasets")["datasets"])
    except (OSError, RuntimeError):
        return False
