"""A real Kubernetes: etcd, API server, controllers, scheduler, one node (kubelet, containerd).

The control plane consists of plain processes on loopback and is ready in about 5 s. The node is to
its kubelet what a machine is. It has
* a mount namespace whose mounts are shared, as under systemd. On the machines of the tests nothing
  else is shared, and containers with propagation are refused there;
* processes of its own: a PID namespace. Its pid 1 is the node's, and all of it ends with that one;
* /etc, /opt, /run, /var and a bpf file system of its own, on a small disk of its own.
Network, /dev and cgroups are the machine's. ``reboot`` keeps what a machine's disk keeps, and runs
BOOT first, as systemd runs units that are before kubelet.

scripts/kubernetes.sh builds the programs.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.testbed import (
    blockdev,
    containerd,
    kube_api,
    leftovers,
    node_cgroups,
    node_files,
    ports,
    registry,
    waiting,
)

VERSION = "1.34.2"  # as in scripts/kubernetes.sh
CACHE = Path(os.environ.get("NODEAGENT_CACHE", "~/.cache/nodeagent")).expanduser()
BIN = CACHE / "kubernetes" / VERSION / "bin"
# Words of helm: the chart needs the name of an image.
IMAGE = ("--set", "image.repository=registry.example/nodeagent")
RUNTIME = "trixie"  # containerd 1.7
# The name that the API server reaches its kubelet by, for kubectl exec and logs: on loopback only.
NODE = "localhost"
HOST = "registry.test"  # how the node calls the registry of the tests
COLLECTION_FAILED = "Image garbage collection failed"
BOOT = "/etc/before-kubelet"  # a script on the node
START_SECONDS = 90.0
LOOP_CONTROL = Path("/dev/loop-control")
_LOOP_CTL_ADD, _LOOP_CTL_REMOVE = 0x4C80, 0x4C81


class Kubernetes:
    """Below one folder: ``start`` it, ``stop`` it. ``busybox``: an image that the node can pull."""

    def __init__(self, folder: Path, runtime: str = RUNTIME, gates: Sequence[str] = ()) -> None:
        """``runtime``: the Debian release whose containerd the node has. ``gates``: features to
        switch on."""
        self.folder = folder.absolute()
        self._runtime = runtime
        self._gates = gates
        self.etcd_port, self.peer_port, self.api_port, self.kubelet_port = ports.free(4)
        self.registry = registry.Registry(self.folder / "registry")
        self.busybox = ""
        # Not made of the pid: other containers of the machine have the same ones.
        self._cgroup = f"{node_cgroups.NAME}{os.urandom(4).hex()}"
        self._claim = contextlib.ExitStack()  # of the cgroup
        self._subnet = ""
        self._loop = 0  # the number of the disk's device
        self._beat = ""  # the last before the node was powered off
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # --- its parts ------------------------------------------------------------------------------

    def start(self) -> None:
        node_cgroups.clear()
        self._claim.enter_context(node_cgroups.claimed(self._cgroup))
        self._subnet = free_subnet()
        for name in ("pki", "cni", "disk", "certs.d"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._certificates()
        self._start_registry()
        self._start_control_plane()
        self._start_node()

    def stop(self) -> None:
        """The node first; nothing of it is left, whatever state it is in."""
        for name in ("node", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            process = self._processes.pop(name, None)
            if process is not None:
                process.kill()
                process.wait(timeout=waiting.limit(30))
        self.registry.stop()
        leftovers.clear(self.folder, keep=True)
        self._detach()
        try:
            waiting.until(
                lambda: node_cgroups.remove(self._cgroup), 20, "the node's cgroups to be empty"
            )
        finally:
            self._claim.close()

    def _spawn(self, name: str, *words: str) -> None:
        path = f"{containerd.RUNTIMES / self._runtime / 'usr/bin'}:{_runc().parent}:{BIN}"
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    "PATH": f"{path}:{os.environ['PATH']}",
                    "HOME": "/root",
                    leftovers.MARK: str(self.folder),
                },
            )

    def _certificates(self) -> None:
        pki = self.folder / "pki"
        _run("bash", "-euc", node_files.CERTIFICATES, cwd=pki)
        for name in ("admin", "node"):
            cluster = {
                "server": f"https://127.0.0.1:{self.api_port}",
                "certificate-authority": str(pki / "ca.crt"),
            }
            user = {
                "client-certificate": str(pki / f"{name}.crt"),
                "client-key": str(pki / f"{name}.key"),
            }
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": cluster}],
                "users": [{"name": "me", "user": user}],
            }
            self._kubeconfig(name).write_text(json.dumps(config))

    def _kubeconfig(self, name: str) -> Path:
        return self.folder / "pki" / f"{name}.kubeconfig"

    def _start_registry(self) -> None:
        self.registry.start()
        program = (containerd.RUNTIMES / "bookworm" / "bin" / "busybox").read_bytes()
        layer = registry.layer_of({"bin/busybox": program})
        self.registry.push(
            "test/busybox", "1", [layer], command=["/bin/busybox", "sleep", "100000"]
        )
        self.busybox = f"{HOST}/test/busybox:1"
        url = f"http://127.0.0.1:{self.registry.port}"
        place = self.folder / "certs.d" / HOST
        place.mkdir(parents=True)
        (place / "hosts.toml").write_text(
            f'server = "{url}"\n[host."{url}"]\n  capabilities = ["pull", "resolve"]\n'
        )

    def _start_control_plane(self) -> None:
        self._start_api()
        self._start_controllers()

    def _start_api(self) -> None:
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        self._spawn(
            "etcd", str(BIN / "etcd"), "--data-dir", "etcd", "--unsafe-no-fsync",
            "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        self._spawn(
            "kube-apiserver", str(BIN / "kube-apiserver"), f"--etcd-servers={etcd}",
            f"--secure-port={self.api_port}", "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1", "--tls-cert-file=pki/api.crt",
            "--tls-private-key-file=pki/api.key", "--client-ca-file=pki/ca.crt",
            "--service-account-key-file=pki/sa.pub",
            "--service-account-signing-key-file=pki/sa.key",
            "--service-account-issuer=https://kubernetes.default",
            "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=Node,RBAC",
            "--allow-privileged=true", "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={self.folder}/pki/admin.crt",
            f"--kubelet-client-key={self.folder}/pki/admin.key",
            "--kubelet-preferred-address-types=Hostname",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
            "--feature-gates=MutatingAdmissionPolicy=true",  # off before 1.36
            *(f"--feature-gates={gate}=true" for gate in self._gates),
        )  # fmt: skip
        self._until_there("kube-apiserver", lambda: self._ask("get", "--raw", "/readyz"))

    def _start_controllers(self) -> None:
        config = str(self._kubeconfig("admin"))
        self._spawn(
            "kube-controller-manager", str(BIN / "kube-controller-manager"),
            "--kubeconfig", config, "--authentication-kubeconfig", config,
            "--authorization-kubeconfig", config, "--leader-elect=false", "--secure-port=0",
            "--service-account-private-key-file=pki/sa.key", "--root-ca-file=pki/ca.crt",
            "--use-service-account-credentials=true",
        )  # fmt: skip
        self._spawn(
            "kube-scheduler", str(BIN / "kube-scheduler"), "--kubeconfig", config,
            "--authentication-kubeconfig", config, "--authorization-kubeconfig", config,
            "--leader-elect=false", "--secure-port=0",
        )  # fmt: skip

    def _start_node(self) -> None:
        disk = self.folder / "disk.img"
        with disk.open("wb") as stream:
            stream.truncate(6 * 2**30)  # sparse
        _run(
            "mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(disk)
        )
        network = {
            "cniVersion": "1.0.0",
            "name": "ptp",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "subnet": self._subnet,
                        "dataDir": str(self.folder / "cni-state"),
                    },
                }
            ],
        }
        (self.folder / "cni" / "10-ptp.conflist").write_text(json.dumps(network))
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,  # the machines of the tests have cgroup v1
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failSwapOn": False,
            "address": "127.0.0.1",
            "port": self.kubelet_port,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.folder}/pki/ca.crt"},
            },
            "tlsCertFile": f"{self.folder}/pki/node.crt",
            "tlsPrivateKeyFile": f"{self.folder}/pki/node.key",
            "enforceNodeAllocatable": [],
            # The node's own disk is small; what evicts there is a test's affair.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 85,
            "imageGCLowThresholdPercent": 84,
            "imageMinimumGCAge": "-1ns",  # so an image may go in the first look, at kubelet's start
            # A pod that ends or starts is seen at once.
            "syncFrequency": "2s",
            "volumeStatsAggPeriod": "10s",
            "registryPullQPS": 0,
            "serializeImagePulls": False,
            # A container that ends is started again after a second, not after 10, 20, 40, ...
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
            "featureGates": dict.fromkeys((*self._gates, "KubeletCrashLoopBackOffMax"), True),
        }
        (self.folder / "kubelet.yaml").write_text(json.dumps(kubelet))
        (self.folder / "containerd.toml").write_text(
            (node_files.CONTAINERD + (node_files.NEWER if self._runtime == "sid" else "")).format(
                folder=self.folder, pause=self.busybox
            )
        )
        self.boot()

    def boot(self) -> None:
        """Start the node, also after ``power_off``. Its pods come back later."""
        loop = self._attach(self.folder / "disk.img")
        (self.folder / "node.sh").write_text(
            node_files.NODE_SCRIPT.format(
                folder=shlex.quote(str(self.folder)),
                bin=shlex.quote(str(BIN)),
                disk=loop,
                boot=BOOT,
            )
        )
        self._spawn(
            "node", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
            "--propagation", "private", str(blockdev.APART), "--",
            "bash", str(self.folder / "node.sh"),
        )  # fmt: skip
        self._until_there("node", lambda: self._heartbeat() not in ("", self._beat))
        # No pod is admitted into a namespace before the controllers gave it this account.
        self._until_there("node", lambda: self._ask("get", "serviceaccount", "default"))

    def power_off(self) -> None:
        """All of the node ends at once; what is on its disk stays."""
        self._beat = self._heartbeat()
        node = self._processes.pop("node")
        node.kill()
        node.wait(timeout=waiting.limit(30))
        backing = Path(f"/sys/block/loop{self._loop}/loop/backing_file")
        waiting.until(lambda: not backing.exists(), 30, "the node's disk to be free")
        self._detach()  # a free device is for every 'losetup -f' of the machine
        # A boot begins without any; kubelet would ask 3 s about each container that they show.
        waiting.until(lambda: node_cgroups.empty(self._cgroup), 30, "the node's cgroups to go")

    def restart_kubelet(self) -> None:
        """It is back after a moment; its images are looked at again at its start."""
        self.on_node("sh", "-c", "kill $(pidof kubelet)")

    def _attach(self, disk: Path) -> str:
        """A loop device with a number of its own: 'mount -o loop' asks every other one first."""
        self._loop = _added_loop()
        _run("losetup", f"/dev/loop{self._loop}", str(disk))
        return f"/dev/loop{self._loop}"

    def _detach(self) -> None:
        if self._loop:
            with contextlib.suppress(OSError), LOOP_CONTROL.open("rb+", buffering=0) as control:
                fcntl.ioctl(control, _LOOP_CTL_REMOVE, self._loop)
        self._loop = 0

    def _heartbeat(self) -> str:
        """When the kubelet last said that the node is ready; nothing when it is not."""
        found = self._ask("get", "node", NODE, "-o", "json")
        conditions = json.loads(found)["status"]["conditions"] if found else []
        beats = [e["lastHeartbeatTime"] for e in conditions if e["type"] == "Ready"
                 and e["status"] == "True"]  # fmt: skip
        return beats[0] if beats else ""

    def _until_there(self, name: str, condition: Any) -> None:
        def there() -> Any:
            if self._processes[name].poll() is not None:
                raise AssertionError(f"{name} ended: {self.said(name)}")
            return condition()

        names = (name, "kubelet", "containerd") if name == "node" else (name,)
        waiting.until(
            there, START_SECONDS, f"{name} to be ready", pause=0.2,
            detail=lambda: "\n".join(f"{each}: {self.said(each)}" for each in names),
        )  # fmt: skip

    def said(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    # --- what tests do with it --------------------------------------------------------------------

    def kubectl(self, *words: str, given: str | None = None, seconds: float = 60.0) -> str:
        """What it prints; AssertionError when it fails."""
        done = self._kubectl(*words, given=given, seconds=seconds)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def _kubectl(
        self, *words: str, given: str | None = None, seconds: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(str(BIN / "kubectl"), "--kubeconfig", str(self._kubeconfig("admin"))),
                *map(_stretched, words),
            ],
            input=given, capture_output=True, text=True, check=False,
            timeout=waiting.limit(seconds),
        )  # fmt: skip

    def _ask(self, *words: str) -> str:
        """What it prints; nothing when it fails."""
        done = self._kubectl(*words, "--request-timeout=5s")
        return done.stdout if done.returncode == 0 else ""

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", given=json.dumps(listed))

    def helm(self, *words: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        return helm("--kubeconfig", str(self._kubeconfig("admin")), *words, seconds=seconds)

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Those that are not on their way out."""
        found = kube_api.Api(self.api_port, self.folder / "pki").pods(namespace, selector)
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    @property
    def pid(self) -> int:
        """The node's pid 1, as this machine counts."""
        parent = self._processes["node"].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0])

    @property
    def root(self) -> Path:
        """The node's file system as this machine sees it."""
        return Path(f"/proc/{self.pid}/root")

    def on_node(
        self, *words: str, check: bool = True, seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine on the node: its mounts, its processes."""
        path = f"{containerd.RUNTIMES / self._runtime / 'usr/bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", *words],
            capture_output=True, text=True, timeout=waiting.limit(seconds), check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def cgroups(self, container: str) -> list[Path]:
        """The container's directories, one of each hierarchy."""
        return [
            found
            for controller in node_cgroups.hierarchies()
            for found in (controller / self._cgroup).rglob(container)
        ]

    def images(self) -> list[str]:
        return self.on_node("ctr", "-n", "k8s.io", "images", "ls", "-q").stdout.split()

    def collect_images(self, *gone: str) -> None:
        """Restart kubelet until its garbage collection took these images. It looks at its start,
        and again after five minutes. At its start it may not know the disk yet, and says so."""
        log = self.folder / "kubelet.log"

        def collected() -> bool:
            failures = log.read_text().count(COLLECTION_FAILED)

            def looked() -> bool:
                return not over() or log.read_text().count(COLLECTION_FAILED) > failures

            def over() -> set[str]:
                return set(gone) & set(self.images())

            self.restart_kubelet()
            waiting.until(looked, 30, "kubelet to look at its images", pause=0.2)
            return not over()

        waiting.until(collected, 90, f"{gone} to go", detail=lambda: self.said("kubelet"))

    def import_image(self, archive: Path) -> None:
        self.on_node("ctr", "-n", "k8s.io", "images", "import", str(archive))


def _stretched(word: str) -> str:
    """kubectl's own limit, as every other one."""
    found = re.fullmatch(r"--timeout=(\d+)s", word)
    return f"--timeout={waiting.limit(float(found[1])):.0f}s" if found else word


def helm(*words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    home = {"HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent"}
    return subprocess.run(
        [str(BIN / "helm"), *words],
        capture_output=True, text=True, timeout=waiting.limit(seconds), check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, **home, "HELM_DATA_HOME": "/nonexistent"},
    )  # fmt: skip


def _runc() -> Path:
    return containerd.RUNTIMES / "bookworm" / "usr" / "sbin" / "runc"


def free_subnet() -> str:
    """A network for pods that nobody on this machine has an address or a route in."""
    used = _run("ip", "-4", "-o", "address") + _run("ip", "-4", "route", "show", "table", "all")
    free = [f"10.88.{each}" for each in range(250) if f" 10.88.{each}." not in used]
    return f"{random.Random().choice(free)}.0/24"


def _added_loop() -> int:
    """The number of a new loop device; the kernel numbers up to 2**20."""
    with LOOP_CONTROL.open("rb+", buffering=0) as control:
        while True:
            number = random.Random().randrange(1_000_000, 2**20)
            with contextlib.suppress(FileExistsError):
                fcntl.ioctl(control, _LOOP_CTL_ADD, number)
                return number


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, timeout=waiting.limit(120), check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{words[:3]}: {done.stdout}{done.stderr}"
    return done.stdout
