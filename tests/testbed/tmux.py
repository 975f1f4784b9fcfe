"""A real terminal: bash in a tmux of its own, typed into and read as a person would."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.testbed import leftovers, waiting

COMMAND_SECONDS = 20.0  # one call of tmux
ANSWER_SECONDS = 20.0  # for waiting.limit: a command of ours starts in a second
PROMPT = "node#"


class Terminal:
    def __init__(self, socket: Path, environment: dict[str, str]) -> None:
        self._socket = socket
        self._environment = environment

    def _tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), "-f", "/dev/null", *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=waiting.limit(COMMAND_SECONDS),
            check=True,
        ).stdout

    def start(self, width: int, height: int) -> None:
        # Not in the environment: the shell that tmux starts it with takes it out.
        shell = f"exec env 'PS1={PROMPT} ' bash --noprofile --norc -i"
        self._tmux("new-session", "-d", "-x", str(width), "-y", str(height), shell)
        self.wait(PROMPT)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: Enter, Tab, C-c."""
        self._tmux("send-keys", *keys)

    def enter(self, command: str) -> None:
        """Run a command on an empty screen."""
        self._tmux("send-keys", "-R")
        self._tmux("clear-history")
        self.type(command)
        self.press("Enter")

    def screen(self, *, styled: bool = False) -> str:
        """What is seen; ``styled``: with escape sequences for colours."""
        return self._tmux("capture-pane", "-p", *(["-e"] if styled else []))

    def size(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def wait(self, *texts: str, without: str = "") -> str:
        """The screen, once it has all of these and not ``without``."""

        def there() -> str:
            seen = self.screen()
            has = all(text in seen for text in texts) and not (without and without in seen)
            return seen if has else ""

        found: str = waiting.until(
            there, ANSWER_SECONDS, f"{texts} on the screen", pause=0.1, detail=self.screen
        )
        return found

    def idle(self) -> bool:
        """Whether the shell waits for a command."""
        seen = self.screen().rstrip("\n").split("\n")
        return seen[-1].rstrip() == PROMPT

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it may have ended by itself
            self._tmux("kill-server")


@contextlib.contextmanager
def opened(folder: Path, width: int = 120, height: int = 40) -> Iterator[Terminal]:
    """``nodeagent`` is found there as an installed one is. All of it ends with the block."""
    short = Path(tempfile.mkdtemp(prefix="nodeagent-"))  # a socket's path is short
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "screen-256color",
        "LANG": "C.UTF-8",
        leftovers.MARK: str(folder),
    }
    made = Terminal(short / "s", environment)
    try:
        made.start(width, height)
        yield made
    finally:
        made.end()
        shutil.rmtree(short, ignore_errors=True)
