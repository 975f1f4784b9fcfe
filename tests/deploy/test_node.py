"""The chart on a real kubelet: what pods and operators of a node get from the image that ships."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kit.units
from tests.testbed import (
    blockdev,
    formatters,
    grave,
    image,
    installed,
    kubernetes,
    registry,
    waiting,
)
from tests.volumes.audit.logs import journald

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

CHART = installed.CHART
DATASET = installed.DATASET


@pytest.fixture(scope="module")
def readers(node: installed.Node) -> Iterator[installed.Readers]:
    made = installed.Readers(node.kube, 2)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(("--values", str(each)) for each in sorted(CHART.glob("values-*.yaml"))),
        (
            "--set", "pools.default=null,pools.a.nodeSelector.gpu=a,pools.b.nodeSelector.gpu=b",
            "--set", "secretName=keys,imagePullSecrets[0].name=hub,podLabels.team=ml",
            "--set", "host.paths[0]=/mnt/x,resources.limits.cpu=2",
            "--set", f"image.digest=sha256:{'0' * 64}",
        ),
        (
            "--set", "settings.volumes=null,settings.preheat=null,host.runtime.hosts=",
            "--set", "pools.default.tolerations=null,pools.default.affinity=null",
            "--set", "updateStrategy.type=OnDelete,updateStrategy.rollingUpdate=null",
            "--set", "port=65535,terminationGracePeriodSeconds=5,priorityClassName=",
        ),
    ],
    ids=("default", "k3s", "rke2", "odd", "bare"),
)  # fmt: skip
def test_api_server_accepts_the_chart(kube: kubernetes.Kubernetes, words: tuple[str, ...]) -> None:
    rendered = kubernetes.helm(
        "template", "nodeagent", str(CHART), "--namespace", "default", *kubernetes.IMAGE, *words
    )
    assert rendered.returncode == 0, rendered.stderr
    kube.kubectl("apply", "--dry-run=server", "-f", "-", given=rendered.stdout)


def test_two_releases_take_a_pool_each(kube: kubernetes.Kubernetes) -> None:
    """For settings that must not roll out together. They share a namespace."""
    found: list[tuple[str, str]] = []
    for pool in ("a100", "h100"):
        rendered = kubernetes.helm(
            "template", pool, str(CHART), "--namespace", "default", *kubernetes.IMAGE,
            "--set", f"pools.default=null,pools.{pool}.nodeSelector.gpu={pool}",
            "--set", f"csi.driver={str(pool == 'a100').lower()}",
            "--set", "metrics.podMonitor.enabled=true",
        )  # fmt: skip
        assert rendered.returncode == 0, rendered.stderr
        documents = [each for each in yaml.safe_load_all(rendered.stdout) if each]
        known = [each for each in documents if each["kind"] != "PodMonitor"]  # of an operator
        kube.kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump_all(known))
        found += [(each["kind"], each["metadata"]["name"]) for each in documents]
        (daemonset,) = (each for each in documents if each["kind"] == "DaemonSet")
        assert daemonset["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": pool}
        assert daemonset["spec"]["selector"]["matchLabels"]["nodeagent/pool"] == pool
    assert len(found) == len(set(found)) > 4  # each name once


def test_defaults_with_a_dataset_and_an_image_make_all_rooms_ready(node: installed.Node) -> None:
    waiting.until(
        lambda: node.agent.get("/readyz")["ready"],
        60, "all rooms to be ready", detail=lambda: node.agent.get("/readyz"),
    )  # fmt: skip
    guard = node.agent.get("/v1/volumes/guard")
    assert guard["in_force"] is True
    assert guard["mode"] == "dry-run"
    assert node.agent.dataset(DATASET)["served_by"]
    node.pinned_image()
    kept = node.kube.on_node("ctr", "-n", "k8s.io", "leases", "ls").stdout
    assert "nodeagent" in kept


def test_container_runs_the_image_that_was_built(node: installed.Node) -> None:
    assert node.run("nodeagent", "--version").split()[-1] == image.version()
    (container,) = node.pod()["spec"]["containers"]
    assert container["image"] == node.image.reference
    libraries = "import rados, rbd, cephfs, ctypes; ctypes.CDLL('libcephfs.so.2')"
    node.run("/opt/nodeagent/bin/python", "-c", libraries)
    assert "ceph version" in node.run("ceph-fuse", "--version")


def test_doctor_finds_nothing_missing_in_the_container(node: installed.Node) -> None:
    config = "--config /etc/nodeagent/nodeagent.yaml"
    said = node.run("sh", "-c", f"nodeagent {config} doctor --json || true")
    checks = json.loads(said)
    rooms = {check["room"] for check in checks}
    missing = {check["name"]: check for check in checks if check["wanted"] and not check["well"]}
    missing.pop("clock", None)  # a machine of tests may have none that is synchronised
    assert rooms >= {"cache", "preheat", "volumes"}
    assert not missing, json.dumps(missing)


def test_settings_lie_on_the_host_for_the_boot_unit(node: installed.Node) -> None:
    shared = (node.kube.root / "var/lib/nodeagent/settings.yaml").read_text()
    configmap = node.kube.get("configmap", "-n", installed.SPACE, "nodeagent")
    assert shared == configmap["data"]["nodeagent.yaml"]


def test_journal_of_the_host_is_read_in_the_container(node: installed.Node, area: Path) -> None:
    with journald.running(area / "journald") as journal:
        journal.write("volumes are well")
        waiting.until(lambda: "volumes are well" in journal.read(), 20, "the line")
        node.kube.on_node("cp", "-r", journal.directory, "/var/log/")
    said = node.run(
        "journalctl", "--directory=/var/log/journal", f"--unit={journal.unit}", "--output=cat"
    )
    assert "volumes are well" in said


def test_unprivileged_pods_read_the_dataset_while_it_fills(
    node: installed.Node, readers: installed.Readers
) -> None:
    readers.wait_more(1)
    node.agent.tell(DATASET, "warm")
    readers.wait_more(1)
    node.agent.wait_state(DATASET, "complete")
    readers.wait_more(2)


def test_accident_is_denied_and_the_pod_that_keeps_the_volume_busy_is_named(
    enforcing: installed.Node, area: Path
) -> None:
    """A pod has a private copy of a volume's mount. kubelet's unmount does not reach it, its next
    probe fails, and so it formats."""
    node, kube = enforcing, enforcing.kube
    target = "/var/lib/kubelet/plugins/kubernetes.io/csi/volume/globalmount"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return node.cell.run("nsenter", "-t", str(kube.pid), "-m", "-p", *command)

    def leak() -> dict[str, Any] | None:
        leaks = [each for each in node.agent.findings() if each["rule"] == "leaked-mount"]
        return dict(leaks[0]) if leaks else None

    with blockdev.faulty_disk(area / "disk", 64 * blockdev.MiB) as disk:
        blockdev.run("mkfs.ext4", "-q", disk.device)
        kube.on_node("mkdir", "-p", target)
        kube.on_node("mount", disk.device, target)
        kube.on_node("sh", "-c", f"echo precious >{target}/checkpoint; sync -f {target}")
        kube.apply(installed.exporter(kube.busybox))
        try:
            kube.kubectl(
                "wait", "pod/node-exporter", "--for=condition=Ready", "--timeout=60s", seconds=90
            )
            kube.on_node("umount", target)
            found = waiting.until(
                leak, 60, "the leak to be found", pause=0.2,
                detail=lambda: json.dumps(node.agent.findings(), indent=1),
            )  # fmt: skip
            assert "default/node-exporter" in json.dumps(found)
            # The first mapping stays busy, so the volume is mapped once more.
            with blockdev.loop(disk.control.parent / "fuse" / "disk") as device:
                node.agent.wait_for(lambda: node.agent.guarded(device), 30, "the second mapping")
                disk.fault({"offset": 0, "length": 64 * blockdev.MiB, "errno": 5})
                blockdev.run("blockdev", "--flushbufs", device)
                outcome = formatters.kubelet(run, device, "ext4", target, disk.clear)
                assert (outcome.found, outcome.mounted) == ("", False)
                with grave.missing_denial():
                    assert "Operation not permitted" in outcome.mkfs_error
        finally:
            disk.clear()
            kube.kubectl("delete", "pod", "node-exporter", "--force", "--wait=false")
        waiting.until(lambda: not leak(), 60, "the finding to clear", pause=0.2)
        kube.on_node("mount", disk.device, target)
        with grave.wrong_bytes():
            assert kube.on_node("cat", f"{target}/checkpoint").stdout == "precious\n"
        kube.on_node("umount", target)


def test_kubelets_image_collection_takes_what_is_not_pinned(node: installed.Node) -> None:
    kube, other = node.kube, f"{kubernetes.HOST}/test/other:1"
    kube.registry.push("test/other", "1", [registry.layer("other", 120_000_000, 9)])
    kube.on_node(
        "ctr", "-n", "k8s.io", "images", "pull", "--hosts-dir", "/etc/containerd/certs.d", other
    )
    heals = node.heals()

    # Over the threshold of 85 %, by less than the image has: for more the agent would give up pins.
    disk = os.statvfs(kube.root / "var/lib/containerd")
    wanted = int(0.855 * disk.f_blocks) - (disk.f_blocks - disk.f_bfree)
    ballast = kube.root / "mnt" / "ballast"
    with ballast.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, wanted * disk.f_frsize)
    try:
        kube.collect_images(other)
    finally:
        ballast.unlink()
    assert "over the high threshold" in (kube.folder / "kubelet.log").read_text()
    assert installed.PINNED in kube.images()
    assert node.heals() == heals  # it never went
    (row,) = node.agent.get("/v1/images")["images"]
    assert (row["state"], bool(row["pinned"])) == ("ready", True)


def test_agent_needs_less_than_it_requests(node: installed.Node) -> None:
    """docs/deploy.md has more figures, from 'make soak-node'."""
    requests = node.pod()["spec"]["containers"][0]["resources"]["requests"]
    assert node.usage().memory < kit.units.parse_size(requests["memory"].replace("i", "iB"))
