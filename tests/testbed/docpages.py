"""The fenced blocks of a page of the docs, and shells that run them as a reader would.

A block belongs to the shell that its ``title`` names. What a reader sees is compared with the
``text`` block that follows: words and lines as on the page, where ``…`` stands for anything in a
line, a line ``...`` for any lines, and one space for any number of them.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import waiting

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
)
SHELL_LANGUAGES = ("sh", "bash", "shell", "console")
_FENCE = re.compile(r"^( *)```(\w*) *(.*)$")
_DONE = "block-is-done"
_FAILED = "command-failed"


@dataclass(frozen=True)
class Block:
    """``step``: the heading above it, ``chapter``: of the second level. ``before``: the text since
    the block before."""

    page: str
    line: int
    step: str
    chapter: str
    language: str
    title: str
    text: str
    before: str

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL_LANGUAGES


def blocks(page: Path) -> list[Block]:
    """The fenced blocks, in the page's order. ValueError when one is not closed."""
    found: list[Block] = []
    opened: tuple[int, str, str, str] | None = None
    step = chapter = ""
    lines: list[str] = []
    before: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                title = re.search(r'title="([^"]*)"', fence[3])
                opened = (number, fence[1], fence[2], title[1] if title else "")
                lines = []
            else:
                step = line.lstrip("# ") if re.match(r"#+ ", line) else step
                chapter = step if line.startswith("## ") else chapter
                before.append(line)
        elif fence and not fence[2]:
            at, indent, language, name = opened
            text = "\n".join(each.removeprefix(indent) for each in lines)
            said = "\n".join(before)
            found.append(Block(page.name, at, step, chapter, language, name, text, said))
            opened, before = None, []
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is not closed")
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def is_object(document: Mapping[str, object]) -> bool:
    """Whether a document of a YAML block is an object of a cluster, or a part of a pod. The section
    ``volumes`` of the settings is a map, a pod's volumes are a list."""
    part = document.keys() <= {"metadata", "spec", "volumes", "containers"}
    return "kind" in document or (part and not isinstance(document.get("volumes"), dict))


def pattern(expected: str) -> re.Pattern[str]:
    """What the whole output must match."""
    parts = []
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        else:
            words = (re.escape(word).replace("…", r"[^\n]*?") for word in line.split())
            parts.append(r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n")
    return re.compile("".join(parts))


def wait_begins(shell: "Shell", expected: str, seconds: float) -> None:
    """Wait until what the shell says so far begins as on the page."""

    def there() -> bool:
        return pattern(expected).match(shell.said().strip() + "\n") is not None

    waiting.until(there, seconds, f"the output of the page:\n{expected}", detail=shell.said)


def as_on_page(output: str, expected: str) -> bool:
    return pattern(expected).fullmatch(output.strip() + "\n") is not None


class Shell:
    """A bash that reads its commands one block after the other, as from a terminal."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by end)
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._begun = 0  # where the output of the last block begins
        self._blocks = 0
        self._type(f"set -E; trap 'echo {_FAILED} $?: $BASH_COMMAND' ERR; trap : INT\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def begin(self, text: str) -> None:
        """Run a block; it may go on."""
        self._begun = os.fstat(self._output.fileno()).st_size
        self._blocks += 1
        self._type(f"{text}\necho {self._done}\n")

    def said(self) -> str:
        """What the last block has printed."""
        size = os.fstat(self._output.fileno()).st_size - self._begun
        return os.pread(self._output.fileno(), size, self._begun).decode(errors="replace")

    @property
    def _done(self) -> str:
        """One for each block: that of a block before may come late."""
        return f"{_DONE}-{self._blocks}"

    def busy(self) -> bool:
        return self._blocks > 0 and f"{self._done}\n" not in self.said()

    def finish(self, seconds: float) -> str:
        """The output of the last block, once it has ended; AssertionError for one that failed."""

        def ended() -> bool:
            assert self._process.poll() is None, f"the shell ended: {self.said()}"
            return not self.busy()

        waiting.until(ended, seconds, "the block to end", detail=self.said)
        output = self.said().partition(f"{self._done}\n")[0]
        assert _FAILED not in output, output
        return output

    def interrupt(self, seconds: float) -> None:
        """Ctrl-C: the signal goes to all that the terminal runs. Waits for the prompt."""
        os.killpg(self._process.pid, signal.SIGINT)
        waiting.until(lambda: not self.busy(), seconds, "the end by Ctrl-C", detail=self.said)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(waiting.limit(10))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what it has not read
            self._process.stdin.close()
        self._output.close()
