"""A real agent process with folders, settings and a port of its own."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.testbed import constants, holding, leftovers, ports, starts, waiting

COMMAND = str(Path(sys.executable).parent / "nodeagent")
START_SECONDS = 30.0
STOP_SECONDS = waiting.limit(30.0)  # to hang for longer is an error
DONE = ("complete", "partial")
_STARTED = '"event": "agent started"'  # a finding has the words, too


class ApiError(Exception):
    """An error that the agent answered with."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.error = body["error"]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the admin socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("agent", timeout=waiting.limit(60))
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Agent:
    """A ``nodeagent run`` process below one folder. Change ``settings`` and ``write`` to reload.
    Constants of the product may stand among them; they count from the next start on.

    ``settings``: what the file holds beside the API's address and the state directory; by default
    a cache without datasets.
    """

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = ports.free(1)[0]  # metrics, probes and the status page
        # Somewhere short: a socket's path has at most 107 bytes.
        home = Path(tempfile.mkdtemp(prefix="nodeagent-", dir=None if os.geteuid() else "/run"))
        weakref.finalize(self, shutil.rmtree, home, ignore_errors=True)
        self.socket = home / "admin.sock"
        self.config = folder / "nodeagent.yaml"
        self.arguments: tuple[str, ...] = ()  # of 'nodeagent run'
        self.constants: dict[str, dict[str, Any]] = {}  # by module, of none of the settings
        self.log = folder / "log"
        self.store = folder / "store"
        self.views = folder / "views"
        self.state = folder / "state"
        self.holds = folder / "holds"  # of tests.testbed.held
        self.process: subprocess.Popen[bytes] | None = None
        empty_cache = {
            "store": str(self.store),
            "views": str(self.views),
            "reserve": "1%",
            "refresh_interval": "0.5s",
            "source_timeout": f"{waiting.limit(4.0):g}s",  # as by default, on a quiet machine
            "datasets": [],
        }
        self.settings: dict[str, Any] = {
            "admin": {"socket": str(self.socket), "metrics": f"127.0.0.1:{self.port}"},
            "state_dir": str(self.state),
            **({"cache": empty_cache} if settings is None else settings),
        }

    def put_store(self, path: Path) -> None:
        """Put the store elsewhere, for example on a disk of its own."""
        self.store = path
        self.cache["store"] = str(path)

    @property
    def cache(self) -> dict[str, Any]:
        section: dict[str, Any] = self.settings["cache"]
        return section

    def add_dir(self, name: str, path: Path, **more: Any) -> None:
        dataset = {
            "name": name,
            "freshness": "frozen",
            "source": {"kind": "dir", "path": str(path)},
        }
        self.cache["datasets"].append(dataset | more)

    def view(self, name: str) -> Path:
        return self.views / name / "data"

    def generations(self, name: str) -> list[Path]:
        return sorted((self.store / name).iterdir()) if (self.store / name).exists() else []

    def tree(self, name: str) -> Path:
        (generation,) = self.generations(name)
        return generation / "tree"

    # --- process ----------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        mine = {leftovers.MARK: str(self.folder), holding.FOLDER: str(self.holds)}
        mine |= constants.environment(self._divided()[1], self.constants)
        made = {**os.environ, **mine}
        if self.holds.exists() or constants.ENVIRONMENT in made:
            made["PYTHONPATH"] = starts.python_path(made)  # a benchmark has not the hook yet
        made.pop("GRPC_ENABLE_FORK_SUPPORT", None)  # of tests; the agent sets its own
        return made

    def _divided(self) -> tuple[dict[str, Any], list[Any]]:
        from nodeagent.settings import Settings

        return constants.divide(Settings, self.settings)

    def write(self) -> None:
        """Replace the file by a rename, as editors do."""
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump(self._divided()[0]))
        new.rename(self.config)

    def start(self, *within: str) -> "Agent":
        """``within``: a command that runs the agent, such as unshare."""
        self.write()
        before = self.said().count(_STARTED)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, COMMAND, "--config", str(self.config), "run", *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

        def started() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the agent ended: {self.said()[-2000:]}")
            return self.said().count(_STARTED) > before

        self.wait_for(started, START_SECONDS, "the agent to start")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, as the OOM killer does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM (nothing if it has ended already); its exit status."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def end(self) -> None:
        """End the agent in any state, with all it started and mounted. For finalisers."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.kill()
        leftovers.clear(self.folder, keep=True)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def passes(self) -> list[int]:
        """Process ids of fill passes and their workers."""
        found = []
        for pid in leftovers.processes(self.folder):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                name = Path(f"/proc/{pid}/comm").read_text()
                # A pass over an image is a fork, with the command of what it forked from.
                if b"cache.fill." in command or name.startswith("blocks:"):
                    found.append(pid)
        return found

    # --- the API and the command ----------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The answer, decoded when it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        open_to_all = path.partition("?")[0] in ("/", "/metrics", "/healthz", "/readyz")
        connection = (
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=waiting.limit(60))
            if open_to_all
            else UnixConnection(self.socket)
        )
        with contextlib.closing(connection):
            connection.request(method, path, data, named)
            response = connection.getresponse()
            text = response.read().decode()
        answer: Any = json.loads(text) if text[:1] in ("{", "[") else text
        if response.status >= 400 and "error" in answer:
            raise ApiError(response.status, answer)
        return answer

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> Any:
        return self.call("POST", path, body)

    def dataset(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.get(f"/v1/datasets/{name}")
        return shown

    def tell(self, name: str, verb: str, body: Any = None) -> dict[str, Any]:
        shown: dict[str, Any] = self.post(f"/v1/datasets/{name}/{verb}", body)
        return shown

    def remove(self, name: str) -> Any:
        return self.call("DELETE", f"/v1/datasets/{name}")

    def failures(self, name: str) -> dict[str, str]:
        page = self.get(f"/v1/datasets/{name}/failures?limit=1000")
        return {each["path"]: each["reason"] for each in page["failures"]}

    def cli(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, "--config", str(self.config), *words],
            capture_output=True,
            text=True,
            timeout=waiting.limit(seconds),
            check=False,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )

    def cli_json(self, *words: str) -> Any:
        """What a command that succeeds prints with ``--json``."""
        done = self.cli(*words, "--json")
        assert done.returncode == 0, f"{words}: {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/v1/findings")["findings"]
        return found

    def guarded(self, path: str) -> dict[str, Any]:
        """What the guard knows of a device; empty when it does not know it."""
        for each in self.get("/v1/volumes/guard")["devices"]:
            if each["device"] == path:
                return dict(each)
        return {}

    # --- waiting ----------------------------------------------------------------------------

    def wait_for(self, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """``waiting.until``, with the end of the log when it fails."""
        return waiting.until(true, seconds, what, pause=0.05, detail=lambda: self.said()[-3000:])

    def wait_state(self, name: str, *states: str, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until the dataset is in one of ``states`` (complete: and served by the store)."""

        def there() -> dict[str, Any] | None:
            try:
                shown = self.dataset(name)
            except ApiError as error:
                if error.status == 503:  # the room begins anew
                    return None
                raise
            if shown["state"] not in states:
                return None
            if shown["state"] == "complete" and shown["served_by"] != "store":
                return None
            return shown

        try:
            found: dict[str, Any] = self.wait_for(there, seconds, f"{name} to be {states}")
        except AssertionError as error:
            raise AssertionError(f"{error}\nnow: {self.dataset(name)}") from None
        return found

    def wait_served(self, name: str, *stages: str, seconds: float = 30.0) -> None:
        def there() -> bool:
            return self.dataset(name)["served_by"] in stages

        self.wait_for(there, seconds, f"{name} to be served by {stages}")
