"""A real Prometheus that scrapes agents of a test."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.testbed import ports, waiting

SCRAPE_SECONDS = 1


class QueryError(Exception):
    """What Prometheus has against a query."""


class Prometheus:
    """Scrapes ``targets`` (HOST:PORT by the name that is their label ``instance`` and ``node``).

    ``more``: of the scrape, as in Prometheus' file."""

    def __init__(self, folder: Path, targets: dict[str, str], **more: Any) -> None:
        folder.mkdir(parents=True)
        self._address = f"127.0.0.1:{ports.free(1)[0]}"
        static = [
            {"targets": [at], "labels": {"instance": name, "node": name}}
            for name, at in targets.items()
        ]
        often = f"{SCRAPE_SECONDS}s"
        scrape = {"job_name": "nodeagent", "static_configs": static, **more}
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump({"global": {"scrape_interval": often}, "scrape_configs": [scrape]})
        )
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        waiting.until(self._ready, 30, "Prometheus to be ready", detail=self._said)

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._said()
        try:
            with urllib.request.urlopen(
                f"http://{self._address}/-/ready", timeout=waiting.limit(5)
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series of an instant query now. QueryError where it is none."""
        return self._get("query", query=query)

    def over(self, query: str, begin: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a query between two Unix times, a value every ``step`` seconds."""
        return self._get("query_range", query=query, start=begin, end=end, step=step)

    def _get(self, what: str, **words: Any) -> list[dict[str, Any]]:
        address = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(address, timeout=waiting.limit(30)) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{words['query']}: {error.read().decode()}") from None
        return found

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(waiting.limit(30))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(waiting.limit(10))
