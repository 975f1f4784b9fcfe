"""Which programs and libraries a run starts and loads, so that none is there by chance.

``watch`` records them in this process by an audit hook, and in every Python process that is started
from it by ``hook/sitecustomize.py``, which Python finds by PYTHONPATH. Agents under test are such
processes. ``found`` reads the record. ``tests.testbed.origins`` judges it.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECORD = "NODEAGENT_TEST_STARTS"  # the folder of the record, in the environment
HOOK = Path(__file__).parent / "hook"
# Programs that run the program which their arguments name.
_WRAPPERS = {
    "env",
    "nsenter",
    "nice",
    "setpriv",
    "setsid",
    "stdbuf",
    "strace",
    "timeout",
    "unshare",
}
_SHELLS = {"sh", "bash", "dash"}


def watch() -> Path:
    """Record from now on; the folder of the record."""
    folder = Path(tempfile.mkdtemp(prefix="nodeagent-starts-"))
    os.environ[RECORD] = str(folder)
    os.environ["PYTHONPATH"] = python_path(os.environ)
    record(folder)
    return folder


def python_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH of ``environ``, with ``HOOK``."""
    paths = [str(HOOK), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, paths)))


def record(folder: Path) -> None:
    """Add this process's hook: it writes each thing once, as a line of a file of its own."""
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        things = set()
        if event == "subprocess.Popen":
            program, words, _, environment = arguments
            things = set(_programs([program, *words[1:]], environment))
        elif event in ("os.exec", "os.posix_spawn"):
            program, words, environment = arguments
            things = set(_programs([program, *words[1:]], environment))
        elif event == "ctypes.dlopen" and arguments[0]:
            things = {f"library {_text(arguments[0])}"}
        if new := things - seen:
            seen.update(new)
            with contextlib.suppress(OSError), (folder / str(os.getpid())).open("a") as file:
                file.write("".join(f"{each}\n" for each in new))

    sys.addaudithook(hook)


def found(folder: Path) -> set[str]:
    """What was recorded: ``program PATH``, ``library NAME`` and ``shell TEXT``."""
    return {line for file in folder.iterdir() for line in file.read_text().splitlines()}


def _programs(words: Iterable[Any], environment: Mapping[Any, Any] | None) -> Iterable[str]:
    """The program and those that it is told to run."""
    texts = [_text(word) for word in words]
    search = None if environment is None else _text(environment.get("PATH", os.defpath))
    started = _path(texts[0], search)
    if started:
        yield f"program {started}"
    name = Path(texts[0]).name
    rest = texts[1:]
    if any(word.endswith("/child_main.py") for word in rest) and "exec" in rest:
        yield from _programs(rest[rest.index("exec") + 1 :], environment)
    elif name in _WRAPPERS:
        # Values of options are no programs; what is one counts, and then its own words.
        for number, word in enumerate(rest):
            if not word.startswith("-") and _path(word, search):
                yield from _programs(rest[number:], environment)
                break
    elif name in _SHELLS and "-c" in rest[:-1]:
        yield f"shell {rest[rest.index('-c') + 1]!r}"


def _path(word: str, search: str | None) -> str:
    found = shutil.which(word, path=search)
    return os.path.realpath(found) if found else ""


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else str(value)
