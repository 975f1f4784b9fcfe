"""A node with 500 volumes, 5,000 mounts and 300 mount namespaces: what watching them costs.

It runs in process and mount namespaces of its own, so that what other programs mount meanwhile is
not measured. What the agent takes at rest is measured where it hears of no disks of others either.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from linux import mounts, syscalls
from tests.bench import harness
from tests.testbed import blockdev, cell, waiting
from tests.testbed.agent import Agent
from tests.volumes.audit import churn
from tests.volumes.audit import stage as stages

LOOP_MS = 50.0
RSS_MIB = 250.0  # the most that docs/deploy.md promises while auditing
IDLE_PERCENT = 0.3
VERDICT_SECONDS = 1.0
# Numbers of their own: there are more volumes than blockdev has numbers for a run.
_LOOPS = random.Random().randrange(10, 99)
_NAMES = f"loop{_LOOPS}???"
_BIND = 4096
_NETWORK = 0x40000000  # CLONE_NEWNET
_ISOLATED = (
    "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc",
    str(blockdev.APART), "--",
)  # fmt: skip


@contextlib.contextmanager
def _crowd(spaces: int) -> Iterator[None]:
    """Mount namespaces of their own, with 20 mounts and a process each."""
    program = churn.CROWD.replace("(1 << 19)", "(1 << 18)")  # private: they do not follow the host
    assert program != churn.CROWD
    crowd = subprocess.Popen(
        [sys.executable, "-c", program, str(spaces), str(spaces)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert crowd.stdout is not None and crowd.stdin is not None
    try:
        assert crowd.stdout.readline() == "ready\n"
        yield
    finally:
        crowd.stdin.close()
        crowd.wait(timeout=waiting.limit(60))
        crowd.stdout.close()


@contextlib.contextmanager
def _node(place: harness.Workplace, folder: Path) -> Iterator[tuple[stages.Stage, str]]:
    """The stage, and what there is on it."""
    volumes, mounted = place.size(500, 4), place.size(5000, 20)
    spaces = place.size(300, 3)
    with _crowd(spaces), stages.staged(folder / "stage") as stage:
        first = blockdev.blank(folder / "first", 4 * blockdev.MiB)
        blockdev.run("mkfs.ext4", "-q", "-O", "^has_journal", str(first))
        devices = []
        for number in range(volumes):
            image = folder / f"image-{number}"
            blockdev.run("cp", "--sparse=always", str(first), str(image))
            blockdev.run("tune2fs", "-U", str(uuid.uuid4()), str(image))
            devices.append(stage.attach(image, number=1000 * _LOOPS + number))
        stage.share_kubelet()  # undone before the devices, which its mounts hold
        for device in devices:
            target, handle = stage.staged(device, image=device)
            for _ in range(mounted // volumes - 1):
                _publish(stage, target, handle)
        yield stage, f"{volumes} volumes, {mounted} mounts, {spaces} namespaces"


def _publish(stage: stages.Stage, staged: Path, handle: str) -> None:
    """As ``Stage.published``; all go at once with the kubelet's tree."""
    home = stage.kubelet / "pods" / str(uuid.uuid4()) / "volumes/kubernetes.io~csi/pvc-1"
    (home / "mount").mkdir(parents=True)
    record = {"volumeHandle": handle, "specVolID": "pvc-1", "driverName": "rbd.csi.ceph.com"}
    (home / "vol_data.json").write_text(json.dumps(record))
    mounts.mount(str(staged), home / "mount", "", _BIND)


async def _loop_ms(stage: stages.Stage, rounds: int) -> list[float]:
    """CPU of the loop's thread for a full look with its rules and findings."""
    found = []
    configuration = stages.settings(
        stage, settle="1s", interval="1h", look_timeout="60s", names=[_NAMES]
    )
    async with stages.watching(stage, configuration) as watch:
        for _ in range(rounds):
            before = time.thread_time()
            assert await watch.audit.round(full=True) is not None
            found.append((time.thread_time() - before) * 1000)
    return found


def _status_kib(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
    return int(match[1]) if match else 0


def _family(agent: Agent) -> list[int]:
    listed = blockdev.run("pgrep", "-P", str(agent.pid), check=False).stdout
    return [agent.pid, *map(int, listed.split())]


def _cpu(agent: Agent) -> float:
    """Seconds of CPU of the agent, of its children that run and of those that have ended."""
    ticks = 0
    for pid in _family(agent):
        with contextlib.suppress(OSError):  # it ended just now, and is counted with its parent
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _verdict_seconds(stage: stages.Stage, agent: Agent, folder: Path) -> float:
    """From the attach to the decision, as the agent's log has it, while a full look runs."""
    image = blockdev.blank(folder / f"late-{uuid.uuid4().hex}", 64 * blockdev.MiB)
    look = threading.Thread(target=agent.post, args=("/v1/audit/pass",))
    look.start()
    time.sleep(0.05)
    began = time.time()
    device = stage.attach(image)

    def decided() -> float | None:
        for line in reversed(agent.said().splitlines()):
            if '"device decided"' in line and f'"{device}"' in line:
                at = datetime.fromisoformat(json.loads(line)["timestamp"])
                if at.timestamp() >= began:
                    return at.timestamp()
        return None

    at: float = waiting.until(decided, 60, f"the verdict on {device}")
    look.join()
    return at - began


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """In a network namespace that belongs to a user namespace: the kernel sends no uevents there,
    neither of this node's disks nor of those that other programs attach meanwhile."""
    holder = subprocess.Popen(["unshare", "--user", "--net", "sleep", "infinity"])
    try:
        with Path("/proc/self/ns/net").open() as ours:
            theirs = Path(f"/proc/{holder.pid}/ns/net")
            waiting.until(lambda: theirs.stat().st_ino != os.fstat(ours.fileno()).st_ino, 30, "it")
            with theirs.open() as other:
                _enter(other.fileno())
            blockdev.run("ip", "link", "set", "lo", "up")
            try:
                yield
            finally:
                _enter(ours.fileno())
    finally:
        holder.kill()
        holder.wait()


def _enter(descriptor: int) -> None:
    syscalls.checked(syscalls.libc.setns(descriptor, _NETWORK), "setns")


@contextlib.contextmanager
def _agent(stage: stages.Stage, folder: Path, note: str, interval: int) -> Iterator[Agent]:
    """An agent that has looked at every device."""
    own = stages.settings(stage, names=[_NAMES, blockdev.NAMES])
    audit = own.model_dump(mode="json", exclude_unset=True)
    audit |= {"settle": "1s", "interval": f"{interval}s"}
    folder.mkdir()
    with cell.cell(folder) as where:
        guard = cell.settings(where, names=[_NAMES, blockdev.NAMES], mode="dry-run")
        agent = Agent(
            folder / "agent",
            {
                "kubelet": {"root_dir": str(stage.kubelet)},
                "volumes": {"guard": guard, "audit": audit},
            },
        )
        agent.start()
        try:
            agent.post("/v1/audit/pass")
            waiting.until(lambda: _all_seen(agent, note), 300, "every device to be looked at")
            yield agent
        finally:
            agent.stop()


def _measured(place: harness.Workplace) -> harness.Results:
    """In namespaces of our own."""
    interval = place.size(300, 5)  # the default: at rest there is one full look in this time
    with _node(place, place.folder) as (stage, note):
        looks = asyncio.run(_loop_ms(stage, place.rounds))
        yield "scale_loop_per_look", harness.at_most(looks, LOOP_MS, "ms", note)
        with _agent(stage, place.folder / "heard", note, interval) as agent:
            late = [_verdict_seconds(stage, agent, place.folder) for _ in range(place.rounds)]
            yield "scale_uevent_to_verdict", harness.at_most(late, VERDICT_SECONDS, "s", note)
        with _silence(), _agent(stage, place.folder / "rest", note, interval) as agent:
            # At rest no lease is open (the blank devices above get one), and what is looked at
            # more often after a change has had its time.
            if not place.tiny:
                time.sleep(75.0)
                waiting.until(lambda: not _leased(agent), 180, "the leases of blank devices to end")
            before, own = _cpu(agent), _status_kib(agent.pid, "VmRSS")
            time.sleep(interval)
            used = (_cpu(agent) - before) / interval * 100
            rest = f"{note}; over {interval} s, a full look in it"
            yield "scale_idle", harness.at_most([used], IDLE_PERCENT, "% of a core", rest)
            sizes = [
                _status_kib(pid, "VmRSS") / 1024
                for pid in _family(agent)
                if Path(f"/proc/{pid}").exists()
            ]
            note = f"{note}; the agent {own / 1024:.0f}, with children {sum(sizes):.0f}"
            yield "scale_rss", harness.at_most([sum(sizes)], RSS_MIB, "MiB", note)


def scale(place: harness.Workplace) -> harness.Results:
    with place.room("scale") as folder:
        size = "tiny" if place.tiny else "full"
        command = [*_ISOLATED, sys.executable, "-m", __name__, str(folder), size]
        answer = folder / "answer"
        with answer.open("w") as out:
            subprocess.run(command, stdout=out, check=True, cwd=harness.ROOT)
        for line in answer.read_text().splitlines():
            name, entry = json.loads(line)
            yield name, harness.Entry(**entry | {"spread": tuple(entry["spread"])})


def main() -> None:
    """The measurement itself, in its namespaces: FOLDER, tiny or full. Entries as lines of JSON."""
    folder, size = sys.argv[1:]
    for name, entry in _measured(harness.Workplace(Path(folder), tiny=size == "tiny")):
        harness.say(f"  {name} {entry.ours:.2f} {entry.unit}")
        print(json.dumps([name, dataclasses.asdict(entry)]), flush=True)


def _leased(agent: Agent) -> list[str]:
    devices = agent.get("/v1/volumes/guard")["devices"]
    time.sleep(0.5)
    return [each["device"] for each in devices if each["may_be_formatted"]]


def _all_seen(agent: Agent, note: str) -> bool:
    devices = agent.get("/v1/volumes/guard")["devices"]
    wanted = int(note.split()[0])
    time.sleep(0.5)
    return sum(1 for each in devices if each["verdict"]) >= wanted


GROUPS = {"scale": scale}

if __name__ == "__main__":
    main()
