"""A real API server without a node: what needs no kubelet starts in 5 s and costs no disk."""

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

from kube.settings import AccessSettings
from tests.testbed import kubernetes, waiting

NAMESPACE = "nodeagent"


class ControlPlane(kubernetes.Kubernetes):
    """etcd, API server and controllers. Nodes and pods are objects that nobody runs."""

    def start(self) -> None:
        (self.folder / "pki").mkdir(parents=True)
        self._certificates()
        self._start_control_plane()

    def copy_of_etcd(self) -> Path:
        """What the API server knows now, for ``restart``."""
        copy = self.folder / f"etcd-{uuid.uuid4().hex[:6]}"
        os.kill(self._processes["etcd"].pid, signal.SIGSTOP)
        try:
            shutil.copytree(self.folder / "etcd", copy)
        finally:
            os.kill(self._processes["etcd"].pid, signal.SIGCONT)
        return copy

    def restart(self, etcd: Path | None) -> None:
        """With what was copied; None: with nothing, and without controllers."""
        self.stop()
        shutil.rmtree(self.folder / "etcd")
        if etcd is not None:
            shutil.copytree(etcd, self.folder / "etcd")
        self._start_api()
        if etcd is not None:
            self._start_controllers()

    def come_back(self) -> None:
        """After ``stop``: new processes with the same etcd."""
        self._start_api()
        self._start_controllers()

    def cost(self, name: str) -> tuple[float, float]:
        """Of one of its processes: seconds of CPU so far, and MiB in memory."""
        process = Path(f"/proc/{self._processes[name].pid}")
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        pages = int((process / "statm").read_text().split()[1])
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def advance(self, versions: int) -> None:
        """Let etcd count on, as by writes of others."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.etcd_port, timeout=waiting.limit(60)
        )
        with contextlib.closing(connection):
            for _ in range(versions):
                connection.request("POST", "/v3/kv/put", '{"key": "eA==", "value": "eA=="}')
                answer = connection.getresponse()
                assert answer.status == 200, answer.read()
                answer.read()

    def stop(self) -> None:
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            process = self._processes.pop(name, None)
            if process is not None:
                process.kill()
                process.wait(timeout=waiting.limit(30))

    # --- who asks

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def admin(self) -> AccessSettings:
        return AccessSettings(kubeconfig=self._kubeconfig("admin"))

    def refused(self, *objects: dict[str, Any], words: tuple[str, ...] = ("apply",)) -> str:
        """What kubectl says of objects that the server does not take; AssertionError if it does."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        done = self._kubectl(*words, "--dry-run=server", "-f", "-", given=listed)
        assert done.returncode != 0, f"taken: {done.stdout}"
        return done.stderr

    def said_of(self, *objects: dict[str, Any], words: tuple[str, ...] = ()) -> str:
        """What kubectl says of objects that the server would take, warnings included."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        done = self._kubectl("create", *words, "--dry-run=server", "-f", "-", given=listed)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def node(self, name: str, **labels: str) -> dict[str, Any]:
        """A Node that no kubelet keeps."""
        self.apply(
            {
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
            }
        )  # fmt: skip
        found: dict[str, Any] = self.get("node", name)
        return found

    def account(self, name: str, node: str, account: str = "nodeagent") -> AccessSettings:
        """The login of an agent's pod on ``node``: its token says so. ``name`` names the pod."""
        waiting.until(
            lambda: self._ask("get", "serviceaccount", "-n", NAMESPACE, account), 30, "the account"
        )
        self.apply(
            {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {
                    "nodeName": node, "serviceAccountName": account,
                    "containers": [{"name": "agent", "image": "nodeagent:test"}],
                    "automountServiceAccountToken": False,
                },
            }
        )  # fmt: skip
        token = self.kubectl(
            "create", "token", account, "-n", NAMESPACE, "--bound-object-kind", "Pod",
            "--bound-object-name", name, "--duration", "1h",
        )  # fmt: skip
        file = self.folder / f"token-{name}"
        file.write_text(token)
        return AccessSettings(
            server=f"https://127.0.0.1:{self.api_port}",
            ca_file=(self.pki / "ca.crt").absolute(),
            token_file=file.absolute(),
        )

    def secret(self, name: str, **entries: str) -> None:
        data = {key: base64.b64encode(value.encode()).decode() for key, value in entries.items()}
        self.apply(
            {
                "apiVersion": "v1", "kind": "Secret", "data": data,
                "metadata": {"name": name, "namespace": NAMESPACE},
            }
        )  # fmt: skip


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:6]}"
