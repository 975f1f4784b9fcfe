"""A soak on a real kubelet: datasets, images and readers of every kind that users have told of, and
faults by turns. ``make soak-field`` runs it, ``SOAK_SECONDS`` says how long (3600).

It has namespaces of its own for network and mounts, so it does not take the lock of the real tests.
Needs root and about half a core. The result is a table, and build/field-soak.json: errors that no
page of the docs names, wrong bytes, lines that repeat, what grows.
"""

import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy import field_ceph, field_judge, field_readers, field_sources
from tests.deploy.field_judge import Fault
from tests.testbed import (
    blockdev,
    containerd,
    image,
    installed,
    kubernetes,
    leftovers,
    registry,
    waiting,
)
from tests.testbed.agent import ApiError

SECONDS = float(os.environ.get("SOAK_SECONDS", "3600"))
SEED = os.environ.get("SOAK_SEED", "1")
ONLY = [each for each in os.environ.get("SOAK_FAULTS", "").split(",") if each]
PACE = min(1.0, max(0.15, SECONDS / 3600))  # of what faults last
RESULT = installed.REPO / "build" / "field-soak.json"
SSD = f"/{installed.STATE}/ssd"
BUDGET = "1GiB"
SSD_BYTES = 2 * 2**30
SAMPLE_SECONDS, PROGRESS_SECONDS = 10.0, 60.0
AWAY_SECONDS = 20.0  # of a source: longer than cache.source_timeout, so that the agent notices
RESTARTS_UNTIL = 0.4  # of the time: then one process is watched for long
MORE_KILLS = 4  # of the agent in a round of faults, while it is restarted at all
CALM_SECONDS = 120.0
WELL = {"complete", "partial"}
DRIVER = "nodeagent.io"
IMAGES = 10


def say(text: str) -> None:
    moment = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
    print(f"{moment} {text}", flush=True)


# --- what is watched -------------------------------------------------------------------------


@dataclass
class Sample:
    at: float
    pod: str
    memory: int  # bytes that are nobody's file, of all processes of the container
    main: int  # of the agent's first process
    processes: int
    descriptors: int
    threads: int
    series: int


@dataclass
class Watch:
    """Samples of the agent, and its log, while the block runs."""

    node: installed.Node
    log: Path
    samples: list[Sample] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    missed: int = 0
    _end: threading.Event = field(default_factory=threading.Event)
    _open: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._every, args=(SAMPLE_SECONDS, self._sample)),
            threading.Thread(target=self._every, args=(1.0, self._follow)),
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._end.set()
            for each in threads:
                each.join()
            self._follow()

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._end.wait(seconds):
            try:
                work()
            except Exception as error:  # the agent is on its way
                self.missed += 1
                if self.missed < 20:
                    say(f"not watched: {type(error).__name__}: {str(error)[:100]}")

    def _sample(self) -> None:
        found = self.node.kube.pods(installed.SPACE, installed.PODS)
        (status,) = [s for pod in found for s in pod["status"].get("containerStatuses", [])]
        identity = status["containerID"].removeprefix("containerd://")
        pids = {
            int(pid)
            for folder in self.node.kube.cgroups(identity)
            for pid in (folder / "cgroup.procs").read_text().split()
        }
        series = self.node.agent.get("/metrics")
        self.samples.append(_sampled(sorted(pids), identity[:12], series))

    def _follow(self) -> None:
        """The logs of all containers of the agent; one that is deleted is read to its end."""
        pattern = f"var/log/pods/{installed.SPACE}_*/nodeagent/*.log"
        for path in self.node.kube.root.glob(pattern):
            if str(path) not in self._open:
                self._open[str(path)] = path.open(errors="replace")
        for stream in self._open.values():
            for text in stream.read().splitlines():
                words = text.split(" ", 3)
                if len(words) == 4:
                    self._take(words[0], words[3])

    def _take(self, moment: str, text: str) -> None:
        at = datetime.datetime.fromisoformat(moment[:26] + "+00:00").timestamp()
        self.lines.append((at, text))
        with self.log.open("a") as stream:
            stream.write(f"{moment} {text}\n")


def _sampled(pids: list[int], pod: str, series: str) -> Sample:
    memory, threads, descriptors = {}, 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{pid}/status").read_text()
            fields = dict(re.findall(r"^(RssAnon|Threads):\s+(\d+)", said, re.MULTILINE))
            memory[pid] = int(fields.get("RssAnon", 0)) * 1024
            if pid == pids[0]:
                threads = int(fields["Threads"])
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    count = sum(line[:1] not in ("#", "") for line in series.splitlines())
    return Sample(
        time.time(), pod, sum(memory.values()), memory.get(pids[0], 0), len(memory), descriptors,
        threads, count,
    )  # fmt: skip


# --- readers ---------------------------------------------------------------------------------


class Readers:
    """On the node one process of each kind, and pods."""

    def __init__(self, node: installed.Node, sources: field_sources.Sources, folder: Path) -> None:
        self.node, self.sources, self.folder = node, sources, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        folder.chmod(0o777)
        self.pods: dict[str, tuple[str, str]] = {}  # kind: pod, dataset

    def start(self) -> None:
        for kind in field_readers.KINDS:
            plan = {
                name: {"root": f"/{installed.STATE}/views/{name}/data",
                       "manifest": str(each.manifest)}
                for name, each in self.sources.all.items()
                if self._takes(kind, name, len(each.kept))
            }  # fmt: skip
            file = self.folder / f"{kind}.plan"
            file.write_text(json.dumps(plan))
            self._processes[kind] = subprocess.Popen(
                ["nsenter", "-t", str(self.node.kube.pid), "-m", "-p",
                 sys.executable, "-m", "tests.deploy.field_readers", kind, str(file),
                 str(self.folder / kind), SEED],
                stdin=subprocess.DEVNULL, cwd=installed.REPO,
                stderr=(self.folder / f"{kind}.err").open("ab"),
                env={**os.environ, leftovers.MARK: str(self.folder),
                     "PYTHONPATH": str(installed.REPO), "PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip

    def _takes(self, kind: str, dataset: str, files: int) -> bool:
        if kind == "git":
            return dataset == "git-a"
        if kind == "user":
            return dataset.startswith(("squash", "plain-b", "stopped"))
        small = kind not in field_readers.WHOLE or files < field_readers.SMALL
        return small and not dataset.startswith("squash")  # root may not read all of it

    def start_pods(self) -> None:
        """Each reads a whole dataset, or a directory of it, by its sums."""
        restricted = {
            "runAsUser": 65534, "runAsNonRoot": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        grouped = {"fsGroup": field_sources.GROUP, "supplementalGroups": [field_sources.GROUP]}

        def host(name: str) -> dict[str, Any]:
            view = f"/{installed.STATE}/views/{name}"
            return {"hostPath": {"path": view, "type": "Directory"}}

        def csi(name: str, **attributes: str) -> dict[str, Any]:
            given = {"dataset": name, **attributes}
            return {"csi": {"driver": DRIVER, "readOnly": True, "volumeAttributes": given}}

        # Kind: dataset, volume, where the sums are, fields of the mount, of the container, the pod.
        wanted: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], Any, Any]] = {
            "pod hostpath": ("plain-a", host("plain-a"), "/data/data", {}, {}, {}),
            "pod hostpath user": ("plain-b", host("plain-b"), "/data/data", {}, restricted, {}),
            "pod direct": ("plain-c", csi("plain-c"), "/data", {}, restricted, {}),
            "pod parent": ("plain-d", csi("plain-d", layout="parent"), "/data/data", {}, {}, {}),
            "pod complete": ("plain-e", csi("plain-e", wait="complete"), "/data", {}, {}, {}),
            "pod subpath": ("plain-g", csi("plain-g"), "/data", {"subPath": "d1"}, {}, {}),
            "pod fsgroup": ("group-a", csi("group-a"), "/data", {}, restricted,
                            {"securityContext": grouped}),
            "pod userns": ("plain-f", csi("plain-f", wait="complete"), "/data", {}, {},
                           {"hostUsers": False}),
        }  # fmt: skip
        for kind, (dataset, volume, place, mount, security, spec) in wanted.items():
            name = kind.replace(" ", "-")
            given = {"name": "data", "mountPath": "/data", "readOnly": True, **mount}
            if not mount:
                given["mountPropagation"] = "HostToContainer"
            made = installed.pod_of(
                name, self.node.kube.busybox, _POD.format(place=place, pause=12),
                container={"volumeMounts": [given], "securityContext": security},
                volumes=[{"name": "data", **volume}], **spec,
            )  # fmt: skip
            self.node.kube.apply(made)
            self.pods[kind] = (name, dataset)

    def image_pod(self, number: int) -> None:
        """A pod of an image that is held; it says the sum of a file of it."""
        name = f"image-{number}"
        script = "/bin/busybox sha256sum /data/file; exec /bin/busybox sleep 5"
        made = installed.pod_of(name, image_name(number % IMAGES), script,
                                container={"imagePullPolicy": "Never"})  # fmt: skip
        made["spec"]["restartPolicy"] = "Never"
        self.node.kube.apply(made)
        self.pods[f"image {number}"] = (name, f"image-{number % IMAGES}")

    def rest(self, *names: str) -> None:
        """Nobody reads these from now on."""
        new = self.folder / "resting.new"
        new.write_text("\n".join(names))
        new.rename(self.folder / "resting")

    def end(self) -> None:
        for process in self._processes.values():
            pids = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            with contextlib.suppress(OSError):
                for pid in pids.read_text().split():
                    os.kill(int(pid), 9)
            process.kill()
            process.wait()

    # --- what they saw -----------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        found = {}
        for kind in field_readers.KINDS:
            with contextlib.suppress(OSError, ValueError):
                found[kind] = json.loads((self.folder / f"{kind}.state").read_text())
        return found

    def ended(self) -> list[str]:
        return [kind for kind, process in self._processes.items() if process.poll() is not None]

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for kind in field_readers.KINDS:
            with contextlib.suppress(FileNotFoundError):
                found += map(json.loads, (self.folder / kind).read_text().splitlines())
        return found + self._pod_events()

    def rounds(self) -> Counter[str]:
        """Of pods: whole rounds."""
        found: Counter[str] = Counter()
        for kind, (name, _) in self.pods.items():
            said = sum(words[3].startswith("round") for words in self._lines(name))
            found[kind.split()[0] if kind.startswith("image") else kind] += said
        return found

    def _lines(self, pod: str) -> list[list[str]]:
        logs = self.node.kube.root.glob(f"var/log/pods/default_{pod}_*/main/*.log")
        text = "".join(each.read_text(errors="replace") for each in sorted(logs))
        return [w for w in (line.split(" ", 3) for line in text.splitlines()) if len(w) == 4]

    def _pod_events(self) -> list[dict[str, Any]]:
        found = []
        for kind, (name, dataset) in self.pods.items():
            for moment, _, _, text in self._lines(name):
                if not text.startswith("ERROR"):
                    continue
                at = datetime.datetime.fromisoformat(moment[:26] + "+00:00").timestamp()
                what = "wrong bytes" if _MISMATCH.search(text) else "pod"
                found.append({"began": at - 15, "at": at, "reader": kind, "dataset": dataset,
                              "step": "read", "what": what, "path": "", "text": text})  # fmt: skip
        return found


# One round: every file is there and is what its sum says.
_POD = """\
trap 'exit 0' TERM
while :; do
  if out=$(cd {place} && /bin/busybox sha256sum -c SUMS 2>&1); then echo round
  else echo "ERROR $(echo "$out" | /bin/busybox grep -v ': OK$' | /bin/busybox head -n 6 |
    /bin/busybox tr '\\n' ';')"; fi
  /bin/busybox sleep {pause}
done
"""
_MISMATCH = re.compile(r"computed checksums? did NOT match")


def image_name(number: int) -> str:
    return f"{kubernetes.HOST}/soak/{chr(ord('a') + number)}:1"


# --- faults ----------------------------------------------------------------------------------


class Faults:
    """Each method that begins with ``fault_`` is one, named by the rest."""

    def __init__(self, soak: "Soak") -> None:
        self.soak = soak
        self.generator = random.Random(SEED)
        self.done: list[Fault] = []
        self.said: list[str] = []
        self.counts: Counter[str] = Counter()
        self.now = ""
        self.images = 0
        self.rest("plain-i", "sparse-a")

    def names(self, *, restarts: bool) -> list[str]:
        every = [name.removeprefix("fault_") for name in dir(self) if name.startswith("fault_")]
        found = [each for each in every if not ONLY or each in ONLY]
        return [e for e in found if restarts or e not in ("agent_killed", "pod_restarted")]

    def once(self, name: str) -> None:
        began = time.time()
        self.now = name.replace("_", " ")
        self.counts[self.now] += 1
        self.tell("begins")
        try:
            getattr(self, f"fault_{name}")()
        except Exception as error:  # also of the testbed: the soak goes on, and tells
            self.tell(f"NOT DONE: {type(error).__name__}: {str(error)[:300]}")
        self.hold(12)  # the agent may not have seen it yet
        unwell = self.soak.calm()
        if unwell:
            self.tell(f"not well {CALM_SECONDS:.0f} s later: {unwell}")
        self.done.append(Fault(self.now, began, time.time() + 5))
        self.now = ""

    def tell(self, text: str) -> None:
        line = f"{self.now}: {text}"
        self.said.append(f"{time.time():.0f} {line}")
        say(line)

    def hold(self, seconds: float) -> None:
        time.sleep(seconds * PACE)

    def ask(self, dataset: str, verb: str, body: Any = None, tries: int = 3) -> bool:
        """Whether the agent accepted it. A refusal goes to the report."""
        for _ in range(tries):
            try:
                self.soak.node.agent.tell(dataset, verb, body)
            except ApiError as error:
                refused = f"{dataset} {verb}: {error.error}"
                time.sleep(1)
            else:
                return True
        self.tell(f"refused: {refused[:300]}")
        return False

    def wait(self, dataset: str, *states: str, seconds: float = 60.0) -> None:
        """Wait until it is in one of these states. If it never is, the report says so."""
        end = time.monotonic() + seconds
        shown: dict[str, Any] = {}
        while time.monotonic() < end:
            shown = self.soak.node.agent.dataset(dataset)
            if shown["state"] in states and not shown.get("phase"):
                return
            time.sleep(0.5)
        self.tell(f"{dataset} is {shown['state']} ({shown.get('why')}) and not {states}")

    # --- the agent

    def fault_agent_killed(self) -> None:
        self.soak.node.kill()
        self.soak.node.all_ready()

    def fault_pod_restarted(self) -> None:
        self.soak.node.delete()
        self.soak.node.all_ready()

    # --- sources

    def fault_source_changed(self) -> None:
        for name in field_sources.CHANGING:
            source = self.soak.sources.all[name]
            self.tell(f"{name}: {source.change(self.generator)}")
            self.hold(5)
            if self.ask(name, "rescan"):
                self.hold(8)
        self.wait("change-a", *WELL)
        if self.counts[self.now] % 2 == 0 and self.ask("change-a", "rollback"):
            self.hold(10)
            self.ask("change-a", "rescan")

    def fault_snapshot_made(self) -> None:
        if self.soak.ceph:
            self.tell(self.soak.ceph.followed(self.generator))
            self.hold(30)

    def fault_image_updated(self) -> None:
        """Another snapshot of an RBD image, and sometimes back."""
        if self.soak.ceph:
            name = self.soak.ceph.updated(self.generator)
            if self.ask(field_ceph.IMAGE, "update", {"snapshot": name}):
                self.wait(field_ceph.IMAGE, "complete")
            if self.counts[self.now] % 2 == 0 and self.ask(field_ceph.IMAGE, "rollback"):
                self.wait(field_ceph.IMAGE, "complete")

    def fault_Ceph_frozen(self) -> None:
        if self.soak.ceph:
            with self.soak.ceph.cluster.frozen("mds", "osd", "mon"):
                time.sleep(AWAY_SECONDS)

    def fault_rescan_without_change(self) -> None:
        for name in ("git-a", "links-a", "plain-c"):
            self.ask(name, "rescan")
        self.hold(15)

    def fault_source_hung(self) -> None:
        with self.soak.sources.disk_fault(hang=True):
            time.sleep(AWAY_SECONDS)

    def fault_source_fails(self) -> None:
        with self.soak.sources.disk_fault(errno=5):
            self.ask("hung-a", "warm")
            self.hold(15)
        self.ask("hung-a", "warm")

    def fault_source_stopped(self) -> None:
        with self.soak.sources.stopped("stopped-a", "squash-a"):
            time.sleep(AWAY_SECONDS)

    def fault_source_dies(self) -> None:
        with self.soak.sources.dead("stopped-a"):
            self.hold(15)

    def fault_root_squashed(self) -> None:
        with self.soak.sources.refusing():
            self.ask("squash-a", "warm")
            self.hold(25)
        self.ask("squash-a", "warm")
        self.wait("squash-a", *WELL)

    # --- the SSD

    def fault_SSD_gone(self) -> None:
        self.soak.unmount_ssd()
        self.hold(40)
        self.soak.mount_ssd()

    def fault_SSD_swapped(self) -> None:
        if len(self.soak.devices) > 4:
            self.tell("left out: enough of them")
            return
        self.soak.unmount_ssd()
        self.soak.new_ssd()
        self.hold(5)
        self.soak.mount_ssd()

    # --- space

    def fault_budget_moved(self) -> None:
        cache = self.soak.node.values["settings"]["cache"]
        for budget in ("20MiB", "12MiB", BUDGET):
            cache["budget"] = budget
            self.soak.upgrade()
            self.hold(20)
        for name in self.soak.sources.all:
            shown = self.soak.node.agent.dataset(name)
            if shown["state"] != "complete":
                self.ask(name, "warm")

    def fault_budget_of_a_dataset_moved(self) -> None:
        (found,) = [e for e in self.soak.datasets() if e["name"] == "partial-a"]
        for budget in ("1GiB", "2MiB", "800KiB", "1600KiB"):
            found["budget"] = budget
            self.soak.upgrade()
            self.ask("partial-a", "warm")
            self.hold(10)

    def fault_evicted(self) -> None:
        """Of what rested since the last time: what is read is not evicted."""
        for name in self.resting:
            self.ask(name, "evict", {"to": self.generator.choice([0, 200_000, 700_000])})
        evicted, names = self.resting, ["plain-h", "plain-i", "plain-j", "sparse-a", "links-a"]
        self.rest(*self.generator.sample(names, 2))
        self.hold(20)  # they are read again
        for name in evicted:
            self.ask(name, "warm")

    def rest(self, *names: str) -> None:
        self.resting = list(names)
        self.soak.readers.rest(*names)

    # --- work

    def fault_verify(self) -> None:
        names = self.generator.sample(sorted(self.soak.sources.all), 4)
        for name in names:
            self.ask(name, "verify", {"source": self.generator.random() < 0.5})
            self.hold(8)

    def fault_settings_changed(self) -> None:
        """Another priority, which interrupts other fills."""
        datasets = self.soak.datasets()
        (found,) = [e for e in datasets if e["name"] == "plain-j"]
        found["priority"] = 5 - found.get("priority", 0)
        self.soak.upgrade()
        self.hold(10)

    def fault_image_removed(self) -> None:
        for number in self.generator.sample(range(IMAGES - 2), 2):
            self.soak.node.kube.on_node("ctr", "-n", "k8s.io", "images", "rm", image_name(number))
        self.hold(10)

    def fault_image_used(self) -> None:
        for _ in range(2):
            self.soak.readers.image_pod(self.images)
            self.images += 1
            self.hold(10)


# --- all of it -------------------------------------------------------------------------------


class Soak:
    def __init__(self, kube: kubernetes.Kubernetes, folder: Path, stack: contextlib.ExitStack):
        self.kube, self.folder, self.stack = kube, folder, stack
        self.sources = field_sources.Sources(kube, folder / "sources", stack)
        self.devices: list[str] = []
        self.node: installed.Node
        self.readers: Readers
        self.ceph: field_ceph.CephSources | None = None
        self.sums: dict[int, str] = {}

    def new_ssd(self) -> None:
        """A disk with an empty file system is the one that is mounted from now on."""
        file = blockdev.blank(self.folder / f"ssd{len(self.devices)}.img", SSD_BYTES)
        number = random.Random().randrange(900_000, 1_000_000)  # not one that the guard looks at
        device = self.stack.enter_context(blockdev.loop(file, number))
        blockdev.run("mkfs.ext4", "-q", "-m", "0", device)
        self.devices.append(device)

    def mount_ssd(self) -> None:
        self.kube.on_node("mkdir", "-p", SSD)
        self.kube.on_node("mount", self.devices[-1], SSD)

    def unmount_ssd(self) -> None:
        self.kube.on_node("umount", "-l", SSD)

    def push_images(self) -> None:
        program = containerd.RUNTIMES / "bookworm" / "bin" / "busybox"
        base = registry.layer_of({"bin/busybox": program.read_bytes()})
        for number in range(IMAGES):
            data = random.Random(number).randbytes(200_000)
            self.sums[number] = registry.digest(data).removeprefix("sha256:")
            layers = [base, registry.layer_of({"data/file": data})]
            repository = image_name(number).removeprefix(f"{kubernetes.HOST}/").rpartition(":")[0]
            self.kube.registry.push(repository, "1", layers)

    def datasets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.node.values["settings"]["cache"]["datasets"]
        return found

    def settle(self) -> None:
        """The settings of the soak, and all that they ask for is there."""
        settings = self.node.values["settings"]
        settings["cache"]["datasets"] += self.sources.settings()
        settings["cache"] |= {"store": f"{SSD}/store", "budget": BUDGET, "reserve": "1%"}
        pins = ["always"] * (IMAGES - 2) + ["1h", "never"]
        settings["preheat"]["images"] += [
            {"ref": image_name(number), "pin": pin} for number, pin in enumerate(pins)
        ]
        self.node.values["checkSettings"] = False
        before = self.node.pod()["metadata"]["name"]
        self.upgrade()
        self.node.pod(another_than=before)
        self.node.all_ready()
        waiting.until(lambda: not self.unwell(), 240, "all datasets", pause=1,
                      detail=lambda: self.unwell())  # fmt: skip
        waiting.until(lambda: not self.images_missing(), 120, "all images", pause=1,
                      detail=lambda: self.images_missing())  # fmt: skip

    def upgrade(self) -> None:
        self.node.helm("upgrade", self.node.image.tag)

    def unwell(self) -> str:
        try:
            found = self.node.agent.get("/v1/datasets")["datasets"]
        except (OSError, ApiError) as error:
            return f"no answer: {error}"
        wrong = [
            f"{each['name']} is {each['state']}, {each.get('served_by')}"
            for each in found
            if each["name"] in self.sources.all
            and (each["state"] not in WELL or each.get("served_by") == "source")
        ]
        return "; ".join(wrong)

    def images_missing(self) -> str:
        found = {e["ref"]: e for e in self.node.agent.get("/v1/images")["images"]}
        names = map(image_name, range(IMAGES))
        return "; ".join(
            f"{name} is {found.get(name, {}).get('state')}"
            for number, name in enumerate(names)
            if found.get(name, {}).get("state") != "ready"
            or (number < IMAGES - 1 and not found[name]["pinned"])
        )

    def calm(self) -> str:
        """Wait until all is well again; what is not."""
        end = time.monotonic() + CALM_SECONDS
        while (found := self.unwell()) and time.monotonic() < end:
            time.sleep(1)
        return found

    def run(self) -> dict[str, Any]:
        faults = Faults(self)
        watch = Watch(self.node, self.folder / "agent.log")
        began = time.time()
        progress = threading.Event()
        teller = threading.Thread(target=self._progress, args=(progress, faults, began))
        with watch.watching():
            teller.start()
            try:
                self._turns(faults, began)
            except KeyboardInterrupt:
                say("ended early")
            finally:
                progress.set()
                teller.join()
            end_state = {
                "unwell": self.unwell(), "images": self.images_missing(),
                "findings": [f"{e['rule']}: {e['message']}" for e in self.node.agent.findings()],
                "readers that ended": self.readers.ended(),
                "pods": self._pods_that_do_not_run(),
            }  # fmt: skip
        return self._result(faults, watch, began, end_state)

    def _turns(self, faults: Faults, began: float) -> None:
        end = began + SECONDS
        while time.time() < end:
            restarts = time.time() < began + SECONDS * RESTARTS_UNTIL
            names = faults.names(restarts=restarts)
            names += ["agent_killed"] * MORE_KILLS if "agent_killed" in names else []
            faults.generator.shuffle(names)
            for name in names:
                if time.time() >= end:
                    break
                faults.once(name)
                time.sleep(15 * PACE)

    def _progress(self, end: threading.Event, faults: Faults, began: float) -> None:
        while not end.wait(PROGRESS_SECONDS):
            states = self.readers.states()
            reads = sum(sum(each["reads"].values()) for each in states.values())
            errors = Counter(e["what"] for e in self.readers.events())
            stuck = [
                f"{kind} in {each['now']} for {time.time() - each['since']:.0f} s"
                for kind, each in states.items()
                if each["now"] and time.time() - each["since"] > 15
            ]
            say(
                f"--- {(time.time() - began) / 60:.0f} min; now: {faults.now or 'rest'}; "
                f"{reads} reads; errors {dict(errors)}; rounds {dict(self.readers.rounds())}; "
                f"stuck {stuck}; ended {self.readers.ended()}"
            )

    def _pods_that_do_not_run(self) -> list[str]:
        found = []
        for kind, (name, _) in self.readers.pods.items():
            pod = self.kube.get("pod", name)
            if pod["status"]["phase"] not in ("Running", "Succeeded"):
                words = ("--field-selector", f"involvedObject.name={name}", "-o", "json")
                events = json.loads(self.kube.kubectl("get", "events", *words))["items"]
                last = [e["message"] for e in events if e["type"] == "Warning"][-1:]
                found.append(f"{kind}: {pod['status']['phase']}: {' '.join(last)[:400]}")
        return found

    def _result(self, faults: Faults, watch: Watch, began: float, end: Any) -> dict[str, Any]:
        events = self.readers.events()
        for each in events:
            each["faults"] = field_judge.in_force(faults.done, each["began"], each["at"])
            each["page"] = field_judge.page(each, faults.done)
        reads = {k: sum(e["reads"].values()) for k, e in self.readers.states().items()}
        longest = Counter(e.pod for e in watch.samples).most_common(1)
        one = [e for e in watch.samples if longest and e.pod == longest[0][0]][6:]
        names = ("memory", "main", "descriptors", "threads", "series")
        grown = {
            which: {n: field_judge.thirds([getattr(e, n) for e in samples]) for n in names}
            for which, samples in (("whole time", watch.samples), ("longest process", one))
            if samples
        }
        loud = field_judge.loud(watch.lines)
        return {
            "seconds": round(time.time() - began), "seed": SEED, "faults": dict(faults.counts),
            "reads": reads, "rounds of pods": dict(self.readers.rounds()),
            "grown": grown, "longest process, s": len(one) * SAMPLE_SECONDS,
            "not named": [e for e in events if not e["page"]],
            "named": [e for e in events if e["page"]],
            "too loud": [asdict(e) for e in loud if field_judge.too_loud(e)],
            "loudest": [asdict(e) for e in loud[:40]], "lines": len(watch.lines),
            "end": end, "told": faults.said, "images": self._images_read(),
            "timeline": [asdict(e) for e in faults.done],
            "samples": [asdict(e) for e in watch.samples],
        }  # fmt: skip

    def _images_read(self) -> dict[str, int]:
        """Pods of images: those that said the right sum, and others."""
        found: Counter[str] = Counter()
        for kind, (name, said) in self.readers.pods.items():
            if kind.startswith("image"):
                text = " ".join(words[3] for words in self.readers._lines(name))
                right = self.sums[int(said.removeprefix("image-"))] in text
                found["right" if right else f"not right: {kind}: {text[:100]}"] += 1
        return dict(found)


def table(found: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{found['seconds']} s, seed {found['seed']}", "", "faults:"]
    lines += [f"  {count:4} {name}" for name, count in sorted(found["faults"].items())]
    lines += ["", "reads of each kind (pods: rounds of a whole dataset):"]
    rows = {**found["reads"], **found["rounds of pods"]}
    lines += [f"  {count:6} {name}" for name, count in sorted(rows.items())]
    lines += [f"  images: {found['images']}", "", "errors that a page names:"]
    named = Counter(
        (e["reader"], e["dataset"], e["what"], ", ".join(e["faults"]), e["page"])
        for e in found["named"]
    )
    lines += [f"  {count:4} {' | '.join(each)}" for each, count in sorted(named.items())]
    lines += ["", "errors that no page names (faults):"]
    unnamed: dict[Any, list[str]] = defaultdict(list)
    for e in found["not named"]:
        key = (e["reader"], e["dataset"], e["step"], e["what"], ", ".join(e["faults"]))
        unnamed[key].append(f"{e['path']} {e['text']}")
    lines += [
        f"  {len(texts):4} {' | '.join(each)}: {texts[0][:160]}"
        for each, texts in sorted(unnamed.items())
    ]
    lines += ["", "first third against last third (flat: less than 10 % more):"]
    for which, values in found["grown"].items():
        for name, (first, last) in values.items():
            verdict = "flat" if field_judge.flat(first, last) else "GROWS"
            unit, size = (" MiB", 2**20) if name in ("memory", "main") else ("", 1)
            lines.append(
                f"  {which}: {name} {first / size:.1f} -> {last / size:.1f}{unit} {verdict}"
            )
    lines += ["", f"lines of the log: {found['lines']}; more than one a minute for minutes:"]
    lines += [
        f"  {e['lines']} lines, {e['most']} within 60 s, {e['minutes']} min: {e['fact'][:200]}"
        for e in found["too loud"]
    ]
    lines += ["", f"at the end: {json.dumps(found['end'], indent=1)}"]
    return "\n".join(lines)


def inside() -> None:
    """In namespaces of its own."""
    for words in (
        "ip link set lo up",
        "ip link add soak0 type veth peer name soak1",
        "ip addr add 10.99.0.1/24 dev soak0",
        "ip link set soak0 up",
        "ip link set soak1 up",
        "ip route add default via 10.99.0.2",
    ):
        blockdev.run(*words.split())
    with leftovers.run_folder(installed.REPO / "build") as folder, contextlib.ExitStack() as disks:
        kube = kubernetes.Kubernetes(folder / "kube")
        soak = Soak(kube, folder / "soak", disks)
        try:
            say(f"starts in {folder}")
            kube.start()
            soak.sources.make()
            if os.environ.get("SOAK_CEPH", "1") == "1":
                soak.ceph = field_ceph.CephSources(soak.sources, folder / "cluster", disks)
            soak.new_ssd()
            soak.mount_ssd()
            soak.push_images()
            say("installs")
            with installed.installed(kube, folder / "node") as node:
                soak.node = node
                soak.settle()
                say("all datasets and images are there")
                soak.readers = Readers(node, soak.sources, folder / "readers")
                try:
                    soak.readers.start()
                    soak.readers.start_pods()
                    found = soak.run()
                finally:
                    soak.readers.end()
                    with contextlib.suppress(FileNotFoundError):
                        log = (soak.folder / "agent.log").read_bytes()
                        RESULT.with_suffix(".log").write_bytes(log)
                _write(found)
                say("takes all away")
        finally:
            with contextlib.suppress(Exception):
                soak.sources.end()
            kube.stop()


def _write(found: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found), flush=True)
    print(f"written to {RESULT.relative_to(installed.REPO)}", flush=True)


def main() -> None:
    if "inside" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and takes all away
        inside()
        return
    image.build()  # needs the network
    command = ["unshare", "--net", "--mount", "--propagation", "private", str(blockdev.APART),
               "--", sys.executable, "-m", "tests.deploy.field_soak", "inside"]  # fmt: skip
    os.chdir(installed.REPO)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
