"""The log child: ``python -m volumes.logs.worker``.

Its configuration is the first line of standard input; it ends when that closes. Every half
second it writes one JSON line: hits and counters. A flood or a hung disk stays in here.
"""

import asyncio
import dataclasses
import json
import os
import sys
from typing import Any

from linux import kmsg
from volumes.logs import follow, journal, sieve

FLUSH_SECONDS = 0.5
RETRY_SECONDS = 30.0
RECORDS_AT_ONCE = 500


class Worker:
    def __init__(self, configuration: dict[str, Any]) -> None:
        self._configuration = configuration
        self._sieves: dict[str, sieve.Sieve] = {}
        # Why a source cannot be read; "" when it can; not there while that is not known yet.
        self._states: dict[str, str] = {}
        self._kernel: kmsg.Kmsg | None = None

    def _sieve(self, name: str, kind: str) -> sieve.Sieve:
        if name not in self._sieves:
            self._sieves[name] = sieve.Sieve(
                source=name,
                patterns=[p for p in self._configuration["patterns"] if p["source"] == kind],
                devices=self._configuration["devices"],
                budget=self._configuration["lines_per_second"],
            )
        return self._sieves[name]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._until_closed())
            tasks.create_task(self._tell())
            if self._configuration["kernel"]:
                tasks.create_task(self._follow_kernel())
            for source in self._configuration["sources"]:
                if source.get("files"):
                    tasks.create_task(self._follow_files(source["name"], source["files"]))
                else:
                    tasks.create_task(self._follow_unit(source["name"], source["unit"]))

    async def _until_closed(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()
        os._exit(0)  # the agent has gone; nothing here needs an orderly end

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            answer = {
                "hits": [vars(hit) for each in self._sieves.values() for hit in each.flush()],
                "sources": {
                    name: {**dataclasses.asdict(each.counters), "state": self._states.get(name)}
                    for name, each in self._sieves.items()
                },
            }
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    async def _follow_kernel(self) -> None:
        matcher = self._sieve("kernel", "kernel")
        try:
            log = kmsg.Kmsg(from_now=True, user=self._configuration.get("user_records", False))
        except OSError as error:
            self._states["kernel"] = f"/dev/kmsg: {error.strerror}"
            return
        self._states["kernel"] = ""
        wake = asyncio.Event()
        asyncio.get_running_loop().add_reader(log.fd, wake.set)
        while True:
            await wake.wait()
            wake.clear()
            records = log.read(RECORDS_AT_ONCE)
            matcher.counters.lost = log.lost
            if records:
                matcher.feed("".join(f"{r.text}\n" for r in records).encode())
            await asyncio.sleep(0.01)  # a flood is read in large steps

    async def _follow_files(self, name: str, pattern: str) -> None:
        matcher = self._sieve(name, "userspace")

        def lost(count: int) -> None:
            matcher.counters.lost += count

        def state(text: str) -> None:
            self._states[name] = text

        follower = follow.Follower(pattern, matcher.feed, lost, state)
        while True:
            try:
                await follower.run()
            except OSError as error:
                self._states[name] = f"{pattern}: {error.strerror}"
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow_unit(self, name: str, unit: str) -> None:
        matcher = self._sieve(name, "userspace")

        def state(text: str) -> None:
            self._states[name] = text

        directories = tuple(self._configuration.get("journals", journal.DIRECTORIES))
        unit_log = journal.Journal(unit, matcher.feed, state, directories)
        while True:
            try:
                await unit_log.run()
            except OSError as error:
                state(f"journalctl: {error.strerror}")
            await asyncio.sleep(RETRY_SECONDS)


def main() -> None:
    os.nice(5)
    configuration = json.loads(sys.stdin.readline())
    asyncio.run(Worker(configuration).run())


if __name__ == "__main__":
    main()
