"""A pod as the cache sees one: a mount namespace of its own, with <views>/<name> as a volume."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, leftovers, waiting

REPO = Path(__file__).parent.parent.parent
READY_SECONDS = 30.0


class Pod:
    """Like hostPath with mountPropagation HostToContainer: a recursive slave bind of the parent."""

    def __init__(self, folder: Path, handed: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.volume = folder / "volume"
        self.volume.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        script = (
            f"mount --rbind {shlex.quote(str(handed))} {shlex.quote(str(self.volume))} && "
            f"mount --make-rslave {shlex.quote(str(self.volume))} && "
            f"echo up && exec sleep 3600"
        )
        self.holder = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "slave",
                str(blockdev.APART),
                str(folder),
                str(handed),
                "--",
                "sh",
                "-c",
                script,
            ],
            stdout=subprocess.PIPE,
            env=self._environment,
            cwd="/",
        )
        self._processes.append(self.holder)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != b"up\n":
            raise RuntimeError("the pod did not start")

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, leftovers.MARK: str(self.folder), "PYTHONPATH": str(REPO)}

    @property
    def data(self) -> str:
        """The dataset as processes in the pod name it."""
        return f"{self.volume}/data"

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "--mount", "--target", str(self.holder.pid), "--", *words]

    def run(self, *words: str, seconds: float = 60.0) -> str:
        """A command in the pod; its output."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=True,
            timeout=waiting.limit(seconds), env=self._environment,
        )  # fmt: skip
        return done.stdout

    def spawn(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            cwd="/",
        )
        self._processes.append(process)
        return process

    def reader(self, manifest: Path, seed: int | str) -> "PodReader":
        return PodReader(self, manifest, seed)

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(waiting.limit(10))
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        leftovers.end(self.folder)


class PodReader:
    """tests.testbed.reader in a pod."""

    def __init__(self, pod: Pod, manifest: Path, seed: int | str) -> None:
        self._report = pod.folder / f"report-{seed}"
        self.process = pod.spawn(
            sys.executable, "-m", "tests.testbed.reader", pod.data, str(manifest),
            str(self._report), str(seed),
        )  # fmt: skip

        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError("the reader ended")
            return Path(f"{self._report}.ready").exists()

        waiting.until(ready, READY_SECONDS, "the reader to start")

    def reads(self) -> int:
        """Files read so far."""
        return int.from_bytes(Path(f"{self._report}.reads").read_bytes(), "little")

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"!")
        self.process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """End a looping reader; what it saw."""
        self.process.terminate()
        return self.result(waiting.limit(60))

    def result(self, seconds: float) -> dict[str, Any]:
        self.process.wait(seconds)
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found


@contextlib.contextmanager
def pod(folder: Path, handed: Path) -> Iterator[Pod]:
    made = Pod(folder, handed)
    try:
        yield made
    finally:
        made.end()
