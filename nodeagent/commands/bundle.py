"""The support bundle: what helps to find a fault, as one archive with an index.

Every text passes kit.redact before it is cut: half a secret would not be known as one. Only content
whose form we know is taken (JSON, lines of logs, the kernel's tables); the settings are the
effective ones, field by field, never the file's text. Bounded: ``LARGEST`` for one file,
``MOST_BYTES`` in all before compression.
"""

import asyncio
import importlib.metadata
import io
import json
import platform
import re
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
import kit.files
import kit.processes
import kit.redact
import kit.room
from nodeagent import configfile, rooms
from nodeagent.commands import bundle_files, doctor

LARGEST = 2**20
MOST_BYTES = 9 * 2**20
MOST_STATE_FILES = 200
LOG_LINES = 5000
ANSWER_SECONDS = 20.0
DOCTOR_SECONDS = 60.0
JOURNAL_SECONDS = 20.0
FILE_SECONDS = 10.0
STATE_SECONDS = 20.0
FORMAT = 1
STANDARD_OUTPUT = Path("-")

_KERNEL = ("version", "cmdline", "mountinfo", "filesystems", "partitions", "diskstats", "meminfo",
           "loadavg", "modules", "pressure/cpu", "pressure/io", "pressure/memory")  # fmt: skip
_KEY_END = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----")

# Directories of the state directory in which sources are mounted, and overlays made.
_OF_DATASETS = ("sources", "scratch")


class Bundle:
    """Files under one folder of the archive, and what the index says of each."""

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._files: dict[str, bytes] = {}
        self.index: list[dict[str, Any]] = []
        self.total = 0

    def add(self, name: str, source: str, text: str, *, newest: bool = False) -> None:
        """``text`` without secrets; of one that is too long the beginning, or the ``newest``."""
        data = clean(text).encode("utf-8", "replace")
        room = min(LARGEST, MOST_BYTES - self.total)
        kept = (data[-room:] if newest else data[:room]) if len(data) > room else data
        kept = kept if room > 0 else b""
        self._files[name] = kept
        self.total += len(kept)
        self._note(name, source, len(kept), len(data) - len(kept), "")

    def lacks(self, name: str, source: str, error: str) -> None:
        self._note(name, source, 0, 0, kit.redact.text(error))

    def _note(self, name: str, source: str, size: int, cut: int, error: str) -> None:
        self.index.append(
            {"name": name, "source": source, "bytes": size, "cut_bytes": cut, "error": error}
        )

    def pack(self, about: dict[str, Any]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            index = json.dumps({**about, "files": self.index}, indent=2).encode()
            for name, data in {"index.json": index, **self._files}.items():
                entry = tarfile.TarInfo(f"{self._stem}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        return packed.getvalue()


def clean(text: str) -> str:
    """``text`` without secrets: JSON by the names of its fields, everything by its form."""
    try:
        return json.dumps(kit.redact.value(json.loads(text)), indent=1)
    except (ValueError, RecursionError):
        pass
    end = _KEY_END.search(text)
    begin = _KEY_BEGIN.search(text)
    if end and (begin is None or begin.start() > end.start()):
        text = kit.redact.HIDDEN + text[end.end() :]  # the tail of a log began inside a key
    return "\n".join(_line(line) for line in kit.redact.text(text).split("\n"))


def _line(line: str) -> str:
    """A line of a JSON log, by the names of its fields."""
    if not line.startswith("{"):
        return line
    try:
        return json.dumps(kit.redact.value(json.loads(line)))
    except (ValueError, RecursionError):
        return line


async def make(
    target: Path,
    stem: str,
    config: Path,
    client: Callable[[], kit.room.Api],
    logs: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the archive to ``target``, readable by its owner alone, or to standard output. Gives
    the index.

    RefusedError when ``target`` exists, HostError when it cannot be written.
    """
    bundle = Bundle(stem)
    settings = await _add_settings(bundle, config)
    await _add_answers(bundle, client)
    await _add(bundle, "doctor.json", "nodeagent doctor", _doctor(config))
    for name in _KERNEL:
        path = Path("/proc/self" if name == "mountinfo" else "/proc") / name
        await _add(bundle, f"kernel/{name.replace('/', '-')}", str(path), _part(path))
    await _add(bundle, "os-release", "/etc/os-release", _part(Path("/etc/os-release")))
    if settings is not None:
        await _add_state(bundle, settings)
    for path in logs:
        await _add(bundle, f"logs/{path.name}", str(path), _part(path, newest=True), newest=True)
    if not logs:
        await _add(bundle, "logs/nodeagent.service", "journalctl", _journal(), newest=True)
    about = {
        "format": FORMAT,
        "made": time.time(),
        "node": platform.node(),
        "nodeagent": importlib.metadata.version("nodeagent"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    _write(target, bundle.pack(about))
    return {**about, "files": bundle.index}


async def _add(
    bundle: Bundle, name: str, source: str, text: Awaitable[str], *, newest: bool = False
) -> None:
    try:
        bundle.add(name, source, await text, newest=newest)
    except (kit.errors.AgentError, OSError, RuntimeError, TimeoutError) as error:
        bundle.lacks(name, source, str(error) or type(error).__name__)


async def _part(path: Path, *, newest: bool = False) -> str:
    """The file's beginning or end; twice what is kept, so that nothing is cut before redaction."""
    text: str = await kit.child.call(
        bundle_files.part, str(path), 2 * LARGEST, newest, deadline=FILE_SECONDS
    )
    return text


async def _add_settings(bundle: Bundle, config: Path) -> Any:
    try:
        settings = configfile.load(config)
    except kit.errors.SettingsError as error:
        bundle.lacks("settings.json", str(config), str(error))
        return None
    shown = settings.model_dump(mode="json", exclude_none=True)
    bundle.add("settings.json", f"{config}, effective", json.dumps(shown))
    return settings


async def _add_answers(bundle: Bundle, client: Callable[[], kit.room.Api]) -> None:
    """What the agent says of itself: each path of the API that only reads."""
    paths = ["/v1/status", "/v1/findings", "/v1/events", "/readyz"]
    for room in rooms.ROOMS:
        paths += [r.path for r in room.routes() if r.method == "GET" and "{" not in r.path]

    async def ask(path: str) -> str:
        async with asyncio.timeout(ANSWER_SECONDS):
            if path == "/metrics":
                return await client().text(path)
            return json.dumps(await client().call("GET", path))

    for path in paths:
        name = f"api/{path.removeprefix('/v1').strip('/').replace('/', '-')}.json"
        await _add(bundle, name, f"GET {path}", ask(path))
    await _add(bundle, "metrics.txt", "GET /metrics", ask("/metrics"))


async def _doctor(config: Path) -> str:
    async with asyncio.timeout(DOCTOR_SECONDS):
        return json.dumps([vars(each) for each in await doctor.examine(config)])


async def _journal() -> str:
    command = ("journalctl", "-u", "nodeagent", "-n", str(LOG_LINES), "--no-pager", "-o", "cat")
    done = await kit.processes.run(
        command, about="the journal", deadline=JOURNAL_SECONDS, largest=16 * LARGEST
    )
    if done.code != 0 or not done.out:
        raise kit.errors.HostError(
            "the journal", "it has no lines of nodeagent.service", "name the log with --log"
        )
    return done.out.decode("utf-8", "replace")


async def _add_state(bundle: Bundle, settings: Any) -> None:
    """A list of the state directory, and its JSON files and logs; no links, nothing of Secrets and
    nothing of datasets."""
    folder: Path = settings.state_dir
    leave_out = [str(folder / name) for name in _OF_DATASETS]
    for room in rooms.ROOMS:
        if (section := getattr(settings, room.name)) is not None:
            leave_out += map(str, room.data(section))
    limits = (MOST_STATE_FILES, 2 * LARGEST, 2 * MOST_BYTES)
    try:
        found = await kit.child.call(
            bundle_files.state, str(folder), leave_out, *limits, deadline=STATE_SECONDS
        )
    except (kit.errors.AgentError, OSError, RuntimeError) as error:
        bundle.lacks("state", str(folder), str(error))
        return
    for name, text in found["texts"].items():
        path = str(folder / name)
        bundle.add(f"state/{name}", path, text, newest=not name.endswith(".json"))
    for name, why in found["lacks"].items():
        bundle.lacks(f"state/{name}", str(folder / name), why)
    bundle.add("state.json", str(folder), json.dumps(found["listed"]))


def _write(target: Path, data: bytes) -> None:
    if target == STANDARD_OUTPUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with kit.files.new(target, "--file") as file:
        file.write(data)
