"""Real devices, mounts, namespaces and cgroups for the audit's tests, and an audit that watches."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kit.findings
from kube.settings import KubeletSettings
from nodeagent import state as reporting
from tests.testbed import blockdev, constants, waiting
from tests.volumes.audit import world
from volumes.audit import service, status
from volumes.audit.logs import matcher
from volumes.audit.types import GuardView
from volumes.settings import AuditSettings, ClusterSettings

HOLDER = Path(__file__).with_name("holder.py")
# How long a test waits for what must come; how long it takes is measured in tests/bench.
PATIENCE = 30.0
UNIFIED = next(
    (
        p
        for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
        if (p / "cgroup.procs").exists()
    ),
    Path("/sys/fs/cgroup"),
)


def run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=waiting.limit(60),
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{command}: rc {done.returncode}: {done.stderr}")
    return done.stdout.strip()


class Stage:
    """Everything one test sets up; ``close`` undoes it in the right order, also after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self._undo: list[Callable[[], Any]] = []
        self.kubelet = folder / "kubelet"
        self.kubelet.mkdir(parents=True)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=waiting.limit(20))
            if process.stdout:
                process.stdout.close()
        with contextlib.ExitStack() as rest:  # one that fails leaves none of the others undone
            for undo in self._undo:
                rest.callback(undo)

    def loop(self, *, megabytes: int = 32, read_only: bool = False, fs: str | None = "ext4") -> str:
        """A loop device with a file system; its kernel name."""
        image = self.folder / f"image-{len(self._undo)}"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        return self.attach(image, read_only=read_only, fs=fs)

    def attach(
        self,
        image: Path,
        *,
        read_only: bool = False,
        fs: str | None = None,
        partitions: bool = False,
        number: int | None = None,
    ) -> str:
        options = [*(["-r"] if read_only else []), *(["-P"] if partitions else [])]
        attached = contextlib.ExitStack()
        node = attached.enter_context(blockdev.loop(image, number, options=options))
        self._undo.append(attached.close)
        if fs == "ext4":
            run("mkfs.ext4", "-q", "-F", node)
        elif fs == "xfs":
            run("mkfs.xfs", "-q", "-f", node)
        return node.removeprefix("/dev/")

    def partition(self, *, megabytes: int = 32) -> tuple[str, str]:
        """A loop device with an ext4 partition: their kernel names. An ioctl adds the partition:
        the kernel need not know partition tables."""
        image = self.folder / f"image-{len(self._undo)}"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        device = self.attach(image, partitions=True)
        run("addpart", f"/dev/{device}", "1", "2048", str((megabytes - 2) << 11))
        self._undo.append(lambda: run("delpart", f"/dev/{device}", "1", check=False))
        run("mkfs.ext4", "-q", "-F", f"/dev/{device}p1")
        return device, f"{device}p1"

    def mount(self, device: str, target: Path, *options: str) -> Path:
        target.mkdir(parents=True, exist_ok=True)
        run("mount", *options, f"/dev/{device}", target)
        self._undo.append(lambda: run("umount", "-l", target, check=False))
        return target

    def share_kubelet(self) -> None:
        """Kubelet's directory on a shared mount, as it should be."""
        tree = self.folder / "node"
        tree.mkdir()
        run("mount", "-t", "tmpfs", "tmpfs", tree)
        run("mount", "--make-shared", tree)
        self._undo.append(lambda: run("umount", "-l", tree, check=False))
        self.kubelet = tree / "kubelet"
        self.kubelet.mkdir()

    def holder(self, *arguments: str | Path, cgroup: Path | None = None) -> int:
        process = subprocess.Popen(
            [sys.executable, str(HOLDER), *(str(a) for a in arguments)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd="/",
        )
        self.processes.append(process)
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", arguments
        return process.pid

    def chrooted(self) -> int:
        """A process with a copy of the host's mounts and an empty root of its own."""
        empty = self.folder / "empty"
        empty.mkdir()
        return self.holder("chroot", empty, self.folder)

    def is_foreign(self, finding: dict[str, Any]) -> bool:
        """Whether it is about a process of another test, which has just copied the host's mounts:
        until it lets go of ours (tests/testbed/apart.sh), that is a leak of its own."""
        holders = {0, 1, os.getpid(), *(process.pid for process in self.processes)}
        return finding["rule"] == "leaked-mount" and int(finding["pid"]) not in holders

    def is_alive(self, pid: int) -> bool:
        return next(p for p in self.processes if p.pid == pid).poll() is None

    def end(self, pid: int) -> None:
        process = next(p for p in self.processes if p.pid == pid)
        process.kill()
        process.wait(timeout=waiting.limit(20))

    def pod_cgroup(self) -> tuple[Path, str, str]:
        """A cgroup named like a container's: (path, pod uid, container id)."""
        uid, container = str(uuid.uuid4()), uuid.uuid4().hex + uuid.uuid4().hex
        top = UNIFIED / f"nodeagent-test-{uuid.uuid4().hex[:8]}"
        pod = top / f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        path = pod / f"cri-containerd-{container}.scope"
        path.mkdir(parents=True)

        def remove() -> None:
            for each in (path, pod, top):
                for _ in range(50):
                    with contextlib.suppress(OSError):
                        each.rmdir()
                        break
                    time.sleep(0.05)

        self._undo.append(remove)
        return path, uid, container

    def staged(
        self,
        device: str,
        *,
        image: str = "csi-vol-1",
        pool: str = "rbd",
        options: tuple[str, ...] = (),
    ) -> tuple[Path, str]:
        """Stage as kubelet and ceph-csi do: (mount point, CSI handle)."""
        handle = f"0001-0024-{uuid.uuid4()}"
        home = self.kubelet / "plugins/kubernetes.io/csi/rbd.csi.ceph.com" / uuid.uuid4().hex
        staging = home / "globalmount"
        staging.mkdir(parents=True)
        record = {"driverName": "rbd.csi.ceph.com", "volumeHandle": handle}
        (home / "vol_data.json").write_text(json.dumps(record))
        meta = {"Version": 3, "pool": pool, "image": image, "device": f"/dev/{device}"}
        (staging / "image-meta.json").write_text(json.dumps(meta))
        return self.mount(device, staging / handle, *options), handle

    def published(self, staged: Path, handle: str, uid: str, *, read_only: bool = False) -> Path:
        """Publish to a pod as kubelet does."""
        home = self.kubelet / "pods" / uid / "volumes/kubernetes.io~csi/pvc-1"
        target = home / "mount"
        target.mkdir(parents=True)
        record = {"volumeHandle": handle, "specVolID": "pvc-1", "driverName": "rbd.csi.ceph.com"}
        (home / "vol_data.json").write_text(json.dumps(record))
        run("mount", "--bind", staged, target)
        if read_only:
            run("mount", "-o", "remount,bind,ro", target)
        self._undo.append(lambda: run("umount", "-l", target, check=False))
        return target


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    stage = Stage(folder)
    try:
        yield stage
    finally:
        stage.close()


def settings(stage: Stage, **changes: Any) -> AuditSettings:
    """Quick for tests: nothing of other tests' logs and devices, no clusters."""
    data: dict[str, Any] = {
        "names": [blockdev.NAMES],
        "settle": "200ms",
        "clear_after": "1s",
        # As by default, for a quiet machine.
        "look_timeout": waiting.limit(5.0),
        "cluster_timeout": waiting.limit(8.0),
        "logs": {"kernel": False, "sources": []},
    }
    made: AuditSettings = constants.made(AuditSettings, **data | changes)
    return made


class Watching:
    """A running audit and what it found."""

    def __init__(self, audit: service.Audit, reporter: reporting.Findings, stage: Stage) -> None:
        self.audit = audit
        self.reporter = reporter
        self.stage = stage

    def found(self, device: str, rule: str) -> list[dict[str, Any]]:
        return [
            f
            for f in map(vars, status.findings(self.audit))
            if (f["rule"], f["device"]) == (rule, device) and not self.stage.is_foreign(f)
        ]

    def seen(self, device: str, rule: str) -> bool:
        """Whether the last round saw such a trouble, raised or not."""
        return any(
            entry.rule == rule
            and entry.trouble.device == device
            and entry.gone is None
            and not self.stage.is_foreign({"rule": rule, "pid": entry.trouble.pid})
            for entry in self.audit._state.values()
        )

    async def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """The condition's first true value."""
        return await waiting.until_async(
            condition, PATIENCE, what, detail=lambda: status.findings(self.audit)
        )

    async def reconcile(self, settings: AuditSettings, **changed: Any) -> None:
        new = self.audit.wanted.model_copy(update={"audit": settings, **changed})
        assert await self.audit.reconcile(new) == []

    async def finding(self, device: str, rule: str) -> dict[str, Any]:
        found = await self.until(lambda: self.found(device, rule), f"{rule} of {device}")
        first: dict[str, Any] = found[0]
        return first


@contextlib.asynccontextmanager
async def watching(
    stage: Stage,
    configuration: AuditSettings,
    *,
    hits: Sequence[matcher.Hit] = (),
    **more: Any,
) -> AsyncIterator[Watching]:
    """``hits``: log lines that are known before the first look."""
    reporter = reporting.Findings()
    clusters = [ClusterSettings.model_validate(each) for each in more.pop("clusters", ())]
    given = {"drivers": ("loop",), "guard": lambda: GuardView(enforcing=True), **more}
    audit = world.audit(
        configuration,
        stage.folder / "state",
        reporter=reporter,
        kubelet=KubeletSettings(root_dir=stage.kubelet),
        clusters=clusters,
        **given,
    )
    if hits:
        audit._load_patterns(configuration)
        audit._log_hits(hits)
    await audit.start()
    watch = Watching(audit, reporter, stage)
    try:
        await watch.until(lambda: audit.inventory is not None, "the first look")
        yield watch
    finally:
        await audit.stop()


def children(word: str) -> list[int]:
    """Child processes of this one with ``word`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and word in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


def active(device: str, fs: str = "ext4") -> bool:
    return os.path.exists(f"/sys/fs/{fs}/{device}")


def criticals(found: list[kit.findings.Finding]) -> list[str]:
    return [finding.id for finding in found if finding.severity is kit.findings.Severity.CRITICAL]
