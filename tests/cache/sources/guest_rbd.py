"""Runs inside the guest (see test_rbd_guest.py): datasets on real krbd and a real device mapper.

    guest_rbd.py CEPH_CONF MONITOR KEYRING KEY

Agent and reader are processes of their own, so that the agent can be killed. Says ``check: ...``
lines; the test on the outside compares them.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit.child
import kit.files
from cache.component import Cache
from cache.settings import CacheSettings
from cache.store import extents, mixed, ranges
from cache.store import watch as store_watch
from kit import child_main, messages
from linux import devmapper
from nodeagent import state
from tests.testbed import constants, waiting
from volumes.audit.inventory import scan
from volumes.audit.rules import mappings as mappings_rules
from volumes.audit.rules import mounting

CONF, MONITOR, KEYRING, _ = sys.argv[1:]
KINDS = {"train": "ext4", "other": "xfs"}
SSD = Path("/run/ssd")
STATE = Path("/run/state")
VIEWS = Path("/run/views")
WRITTEN = Path("/run/written")
RELOADS = int(os.environ.get("RELOADS", "200"))
KILLS = int(os.environ.get("KILLS", "1"))
PATIENCE = 240.0  # everything is emulated, beside other jobs
STARTED = time.monotonic()

Wanted = dict[str, bytes]


def say(text: object) -> None:
    print(f"time: {time.monotonic() - STARTED:.0f} s {text}", flush=True)
    print(f"check: {text}", flush=True)


def run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=waiting.limit(120), check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.returncode}: {done.stderr}")
    return done.stdout


def rbd(*arguments: str) -> str:
    return run("rbd", "-c", CONF, *arguments)


def until(condition: Callable[[], Any], what: str) -> Any:
    return waiting.until(condition, PATIENCE, what, pause=waiting.GUEST_PAUSE_SECONDS)


def prepare(name: str) -> Wanted:
    """An image with a file system and a snapshot; its files, which lie far apart."""
    node = rbd("map", "-o", "noudev", f"rbd/{name}").strip()
    run(f"mkfs.{KINDS[name]}", "-q", "-F" if KINDS[name] == "ext4" else "-f", node)
    WRITTEN.mkdir(exist_ok=True)
    run("mount", node, WRITTEN)
    chosen, wanted = random.Random(name), {}
    for number in range(12):
        data = chosen.randbytes(chosen.randrange(1, 800_000))
        (WRITTEN / f"f{number}").write_bytes(data)
        wanted[f"{name}/data/f{number}"] = data
        with (WRITTEN / f"nothing{number}").open("wb") as gap:
            os.posix_fallocate(gap.fileno(), 0, 3 * extents.EXTENT_BYTES)
    run("umount", WRITTEN)
    rbd("snap", "create", "--no-progress", f"rbd/{name}@v1")
    rbd("unmap", "-o", "noudev", node)
    return wanted


def make_anew(name: str, wanted: Wanted) -> Wanted:
    """Its snapshot is deleted and made again under the same name, with other bytes in its files."""
    node = rbd("map", "-o", "noudev", f"rbd/{name}").strip()
    run("mount", node, WRITTEN)
    chosen, changed = random.Random(f"{name} anew"), {}
    for path, data in wanted.items():
        if path.startswith(f"{name}/"):
            changed[path] = chosen.randbytes(len(data))
            with (WRITTEN / Path(path).name).open("r+b") as stream:  # at the same places
                stream.write(changed[path])
    run("umount", WRITTEN)
    rbd("unmap", "-o", "noudev", node)
    rbd("snap", "rm", "--no-progress", f"rbd/{name}@v1")
    rbd("snap", "create", "--no-progress", f"rbd/{name}@v1")
    return changed


def read(stream: Any) -> bytes:
    """All of an open file, past the page cache."""
    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(stream.fileno(), 2**20, 0)


def prepare_disk() -> None:
    """A disk that does not need the cluster."""
    file = Path("/run/disk")
    with file.open("wb") as stream:
        stream.truncate(512 * 2**20)
    run("mkfs.ext4", "-q", "-F", file)
    SSD.mkdir()
    run("mount", "-o", "loop", file, SSD)


def settings(rate: str) -> CacheSettings:
    def dataset(name: str) -> dict[str, Any]:
        source = {
            "kind": "rbd", "monitors": [MONITOR], "pool": "rbd", "image": name, "snapshot": "v1",
            "user": "admin", "secret_file": KEYRING, "client": "krbd",
        }  # fmt: skip
        # The other one shows its source alone until the fill of the first was disturbed enough.
        warm = name == "train" or rate == "0"
        return {"name": name, "freshness": "snapshot", "source": source, "warm": warm}

    made: CacheSettings = constants.made(
        CacheSettings,
        store=SSD / "store", views=VIEWS, source_timeout="120s", source_check="2s",
        refresh_interval="1s", fill={"bytes_per_second": rate},
        datasets=[dataset(name) for name in KINDS],
    )  # fmt: skip
    return made


class Forked:
    """A process of this program that ends when it is killed, and what it says of itself."""

    def __init__(self, name: str) -> None:
        self._file = Path(f"/run/{name}.json")
        self.pid = 0

    def start(self, life: Callable[[], None]) -> None:
        self._file.unlink(missing_ok=True)
        self.pid = os.fork()
        if not self.pid:
            try:
                life()
            except BaseException as error:
                print(f"{self._file}: {error!r}", flush=True)
            finally:
                os._exit(1)

    def tell(self, **said: Any) -> None:
        kit.files.save(self._file, json.dumps(said).encode())

    @property
    def said(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


async def call(function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
    """``kit.child.call`` in a fork: under emulation a new interpreter takes many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        child_main.die_with_parent()
        passed = json.loads(json.dumps(arguments))
        try:
            os.write(writing, messages.outcome(lambda: function(*passed)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        try:
            async with asyncio.timeout(waiting.limit(deadline)):
                said = await asyncio.to_thread(stream.read)
        except TimeoutError:
            raise kit.child.DeadlineError(function.__name__, "no answer", "") from None
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not said:
        raise RuntimeError(f"{function.__name__} ended without a word")
    return messages.result(said, Any)


class Reader(Forked):
    """Reads everything past the page cache, again and again, and compares each file."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__("reader")
        self._wanted = wanted
        self.start(self._life)

    def _life(self) -> None:
        errors = 0
        for rounds in itertools.count():
            self.tell(rounds=rounds, errors=errors)
            began = time.monotonic()
            for name, data in self._wanted.items():
                try:
                    errors += self._read(name) != data
                except OSError as error:
                    say(f"reader {name} {error}")
                    errors += 1
            time.sleep(2 * (time.monotonic() - began))  # the agent needs the processors more

    def _read(self, name: str) -> bytes:
        with (VIEWS / name).open("rb") as stream:
            return read(stream)

    def goes_on(self, what: str) -> None:
        before = self.said.get("rounds", 0)
        until(lambda: self.said.get("rounds", 0) > before + 1, f"reading {what}")


class Agent(Forked):
    def __init__(self) -> None:
        super().__init__("agent")

    def begin(self, rate: str) -> None:
        self.start(lambda: asyncio.run(self._life(rate)))

    async def _life(self, rate: str) -> None:
        store_watch.PATIENCE_SECONDS = 60.0
        kit.child.call = call
        cache = Cache(settings(rate), STATE, state.Findings())
        await cache.start()
        removed = False
        while True:
            self.tell(
                removed=removed,
                **{
                    name: {
                        "stage": str(each.stage), "state": each.generation.state,
                        "client": each.reached.client if each.reached else "",
                        "held": each.source_mounted, "trouble": str(each.trouble or ""),
                    }
                    for name, each in cache.datasets.items()
                },
            )  # fmt: skip
            await asyncio.sleep(0.2)
            if Path("/run/remove").exists() and not removed:
                for name in KINDS:
                    await cache.remove(name)
                removed = True

    def until(self, name: str, what: str, **wanted: str) -> None:
        try:
            until(lambda: wanted.items() <= self.said.get(name, {}).items(), f"{name} {what}")
        except BaseException:
            print(f"agent: {self.said}", flush=True)
            raise


def tables() -> dict[str, list[devmapper.Line]]:
    return {name: devmapper.table(name) for name in devmapper.names(mixed.PREFIX)}


def table_of(name: str) -> list[devmapper.Line]:
    return devmapper.table(mixed.at(VIEWS / name / "data"))


def parts(name: str) -> int:
    """How many devices its view's table shows."""
    return len({line.device for line in table_of(name)})


def copy_of(name: str) -> Path:
    (found,) = (SSD / "store" / name).glob("*/image")
    return found


def mappings() -> int:
    """Counted in sysfs: the rbd command takes seconds under emulation."""
    found = Path("/sys/bus/rbd/devices").glob("*/name")
    return sum(name.read_text().strip() in KINDS for name in found)


def reload_often(name: str) -> None:
    """Move ranges of a mixed table to and fro."""
    device = mixed.at(VIEWS / name / "data")
    before = devmapper.table(device)
    copy = next(line.device for line in before if line.device.startswith("7:"))
    source = next(line.device for line in before if not line.device.startswith("7:"))
    chosen = random.Random(1)
    for _ in range(RELOADS):
        lines: list[devmapper.Line] = []
        for line in before:
            step = line.length // 64 * 8 if line.device == copy else line.length
            for at in range(0, line.length, step):
                start, length = line.start + at, min(step, line.length - at)
                # The loop device ends with the last range of it.
                stays = line.device == source or (at and chosen.random() < 0.5)
                lines.append(devmapper.Line(start, length, source if stays else copy, start))
        devmapper.switch(device, lines, PATIENCE)
    devmapper.switch(device, before, PATIENCE)


def spoil(name: str) -> None:
    """A chunk that is stored is found to be bad: it goes back to the source, and is filled anew."""
    copy, device = copy_of(name), mixed.at(VIEWS / name / "data")
    before = ranges.shown_by(table_of(name), _loop_of(name))
    chunk = before[0].start
    with copy.with_name("chunks").open("r+b") as records:
        records.seek(extents.HEADER_BYTES + chunk * extents.RECORD_BYTES)
        records.write(bytes(extents.RECORD_BYTES))
    changed = mixed.blend(device, str(copy))
    after = ranges.shown_by(table_of(name), _loop_of(name))
    with copy.open("r+b") as stream:
        stream.seek(chunk * extents.EXTENT_BYTES)
        stream.write(b"rot" * 100_000)
    left = any(each.start <= chunk < each.end for each in after)
    say(f"bad chunk changed the table {changed} is still read from the copy {left}")


def audit() -> None:
    """What the audit of volumes thinks of what we map: it is in use, and nobody leaked it."""
    inventory = scan.scan(
        scan.Request(
            drivers=("rbd", "device-mapper"), kubelet="/run/kubelet", proc="/proc", sys="/sys",
            containers="/run/containers", deep=True,
        )
    )  # fmt: skip
    idle = [each.name for each in inventory.devices if mappings_rules.is_idle(inventory, each)]
    leaked = [each.name for each in inventory.devices if mounting.is_leaked(inventory, each)]
    own = [each.title for each in inventory.devices if each.mapping.startswith(mixed.PREFIX)]
    say(f"audit: ours {len(own)} idle {idle} leaked {leaked}")


def _loop_of(name: str) -> str:
    return next((line.device for line in table_of(name) if line.device.startswith("7:")), "")


def main() -> None:
    prepare_disk()
    wanted = {key: value for name in KINDS for key, value in prepare(name).items()}
    say(f"files {len(wanted)}")
    agent = Agent()
    agent.begin("2MiB")
    for name in KINDS:
        agent.until(name, "served", client="krbd with device mapper")
        until(lambda name=name: mixed.at(VIEWS / name / "data"), "a view")  # type: ignore[misc]
    say(f"served by a device of the source {parts('other') == 1}")
    reader = Reader(wanted)
    reader.goes_on("the source")
    watchers = json.loads(rbd("status", "rbd/train", "--format", "json"))["watchers"]
    locks = json.loads(rbd("lock", "ls", "rbd/train", "--format", "json"))
    say(f"mapped {mappings()} watchers {len(watchers)} locks {len(locks)}")
    agent.until("train", "mixed", stage="overlay")
    until(lambda: parts("train") == 2, "ranges of both")
    device = mixed.at(VIEWS / "train" / "data")
    agent.kill()
    reader.goes_on("without an agent")
    audit()
    began = time.monotonic()
    reload_often("train")
    print(f"time: {RELOADS} reloads took {time.monotonic() - began:.1f} s", flush=True)
    spoil("train")
    mixed.renewed(str(STATE / "sources" / "other" / "mount"))  # as after a bad chunk
    reader.goes_on("after reloads")
    chosen = random.Random()
    for _ in range(KILLS):
        agent.begin("2MiB")
        until(lambda: agent.said, "another agent")
        time.sleep(chosen.uniform(0, 12))  # whatever it does then
        agent.kill()
    agent.begin("0")
    for name in KINDS:
        agent.until(name, "complete", stage="store", state="complete")
    say(f"the same device {mixed.at(VIEWS / 'train' / 'data') == device}")
    say(f"a new device {len(tables()) > len(KINDS)}")
    say(f"lines {[len(table_of(name)) for name in KINDS]} of {[parts(name) for name in KINDS]}")
    until(lambda: not mappings(), "the mappings let go")
    run("ip", "link", "set", "eth0", "down")
    Path("/proc/sys/vm/drop_caches").write_text("3")
    reader.goes_on("without the cluster")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", "default", "via", "10.0.2.2")
    said = reader.said
    reader.kill()
    say(f"reader errors {said['errors']}")
    with (VIEWS / "train/data/f0").open("rb") as held:
        changed = make_anew("train", wanted)
        shown = "train/data/f0"
        until(lambda: (VIEWS / shown).read_bytes() == changed[shown], "the new snapshot")
        early = read(held) == wanted[shown]
        agent.until("train", "complete again", stage="store", state="complete")
        Path("/proc/sys/vm/drop_caches").write_text("3")
        say(f"a file held open keeps its snapshot {early} {read(held) == wanted[shown]}")
    right = all((VIEWS / path).read_bytes() == data for path, data in changed.items())
    say(f"snapshot made anew is shown {right}")
    writable = any(os.access(VIEWS / name / "data", os.W_OK) for name in KINDS)
    say(f"writable {writable}")
    Path("/run/remove").touch()
    until(lambda: agent.said.get("removed"), "removed datasets")
    until(lambda: not tables(), "the end of the devices")
    agent.kill()
    loops = [line for line in run("losetup", "-a").splitlines() if "/run/disk" not in line]
    folders = [name for name in KINDS if (STATE / "sources" / name).exists()]
    say(f"left mapped {mappings()} devices {tables()} loops {loops} folders {folders}")


main()
