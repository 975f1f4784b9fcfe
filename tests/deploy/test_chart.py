"""The chart: what its values may be, what it renders, and that the plain manifests are its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent import configfile
from nodeagent.settings import AdminSettings
from tests.testbed import image, kubernetes, waiting
from volumes.settings import AuditSettings

REPO = Path(__file__).parents[2]
CHART = REPO / "deploy" / "chart"
MANIFESTS = REPO / "deploy" / "manifests" / "nodeagent.yaml"
DISTRIBUTIONS = sorted(CHART.glob("values-*.yaml"))
# What the guard and the audit read of the host at its own path; docs/guard.md, docs/audit.md.
READ = (
    "/var/lib/kubelet",
    "/run/containerd/containerd.sock",
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io",
    "/var/lib/containerd",
    "/etc/containerd/certs.d",
    "/var/log/containers",
    "/var/log/journal",
    "/run/log/journal",
)
POOLS = ("--set", "pools.default=null", "--set", "pools.a100.nodeSelector.gpu=a100")
DATASETS = (
    'settings.cache.datasets=[{"name": "imagenet", "freshness": "frozen", '
    '"source": {"kind": "dir", "path": "/mnt/imagenet"}}]'
)


def _template(
    *words: str, hooks: bool = False, chart: Path = CHART
) -> "subprocess.CompletedProcess[str]":
    asked = ("template", "nodeagent", str(chart), "--namespace", "nodeagent")
    without = () if hooks else ("--no-hooks",)
    return kubernetes.helm(*asked, *kubernetes.IMAGE, *without, *words)


def _render(*words: str, hooks: bool = False) -> list[dict[str, Any]]:
    done = _template(*words, hooks=hooks)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents if each["kind"] == kind)
    return found


# Of the chart before kubernetes.claims, metrics, prometheusRule and dashboards were there.
OLDER = Path(__file__).with_name("values-of-99b700e.yaml")


@pytest.fixture
def reused(tmp_path: Path) -> Path:
    """The chart as 'helm upgrade --reuse-values' has it: an older release's values are its own."""
    made = tmp_path / "chart"
    shutil.copytree(CHART, made)
    shutil.copy(OLDER, made / "values.yaml")
    return made


@pytest.mark.real
def test_values_of_an_older_release_render(reused: Path) -> None:
    done = _template(hooks=True, chart=reused)
    assert done.returncode == 0, done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout) if each]
    assert "DaemonSet" in kinds and "PodMonitor" not in kinds


@pytest.mark.real
@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ("kubernetes.secrets={ceph}", None),
        ('kubernetes.claims=[{"namespace": "rook-ceph", "secrets": ["node"]}]', None),
        ("prometheusRule.enabled=true", None),
        ("metrics.podMonitor.enabled=true", "metrics.port"),
        ("dashboards.enabled=true", "dashboards.labels"),
    ],
)
def test_what_is_switched_on_with_an_older_releases_values_renders_or_says_what_is_missing(
    more: str, missing: str | None, reused: Path
) -> None:
    done = _template("--set-json" if "[" in more else "--set", more, chart=reused)
    assert (done.returncode == 0) is (missing is None), done.stderr
    if missing:
        assert missing in done.stderr and "--reset-then-reuse-values" in done.stderr


@pytest.mark.real
def test_a_value_that_the_schema_does_not_require_may_be_missing() -> None:
    """A later chart's new value is missing in the values of every release that is there."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = _optional(schema, values)
    assert {"metrics", "kubernetes.claims", "dashboards.labels"} <= set(missing)
    for name in missing:
        done = _template("--set", f"{name}=null", hooks=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def _optional(schema: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Paths of the chart's values that its schema does not require; settings and pools aside."""
    found = []
    for name, inner in schema.get("properties", {}).items():
        if name in values and name not in schema.get("required", ()):
            found.append(name)
        found += [f"{name}.{each}" for each in _optional(inner, values.get(name) or {})]
    return found


def test_the_check_takes_no_name_of_a_pool_and_no_place_on_a_dead_node() -> None:
    made = _render("--set", "pools.check.nodeSelector.a=b", hooks=True)
    names = [each["metadata"]["name"] for each in made if each["kind"] == "ConfigMap"]
    assert len(names) == len(set(names))
    (job,) = (each for each in made if each["kind"] == "Job")
    for tolerated in job["spec"]["template"]["spec"]["tolerations"]:
        assert tolerated["effect"] == "NoSchedule"  # of dead nodes there is also a NoExecute


def test_an_install_and_an_upgrade_first_check_the_settings_of_every_pool(tmp_path: Path) -> None:
    two = ("--set", "pools.a.nodeSelector.gpu=a,pools.a.settings.cache.budget=1TiB")
    known = [(each["kind"], each["metadata"]["name"]) for each in _render(*two)]
    hooks = [
        each
        for each in _render(*two, hooks=True)
        if (each["kind"], each["metadata"]["name"]) not in known
    ]
    assert {each["kind"] for each in hooks} == {"ConfigMap", "Job"}
    assert {each["metadata"]["annotations"]["helm.sh/hook"] for each in hooks} == {
        "pre-install,pre-upgrade"
    }
    files = _one(hooks, "ConfigMap")["data"]
    real = {
        each["metadata"]["name"]: each["data"]["nodeagent.yaml"]
        for each in _render(*two)
        if each["kind"] == "ConfigMap"
    }
    assert files == {"default.yaml": real["nodeagent"], "a.yaml": real["nodeagent-a"]}
    (container,) = _one(hooks, "Job")["spec"]["template"]["spec"]["containers"]
    script = container["command"][-1].replace("/etc/nodeagent", str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _sh(script).returncode == 0
    (tmp_path / "a.yaml").write_text(files["a.yaml"] + "\nadmin: {metric: 1}\n")
    done = _sh(script)
    assert done.returncode == 1
    assert "a.yaml" in done.stderr
    assert not [each for each in _render("--set", "checkSettings=false", hooks=True)
                if "check" in each["metadata"]["name"]]  # fmt: skip


def _sh(script: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", script], env=environment, check=False, capture_output=True, text=True
    )


def _pod(daemonset: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    return pod


def _check_settings(folder: Path, configmap: dict[str, Any]) -> None:
    """As ``nodeagent config check`` and the agent's start do."""
    file = folder / "nodeagent.yaml"
    file.write_text(configmap["data"]["nodeagent.yaml"])
    configfile.load(file)


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(MANIFESTS.read_text()) if each]


@pytest.fixture(scope="module")
def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return _pod(_one(manifests, "DaemonSet"))


def test_versions_are_equal(pod: dict[str, Any]) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == image.version()
    assert f"ARG VERSION={image.version()}\n" in (REPO / "Dockerfile").read_text()
    wait = yaml.safe_load((REPO / "deploy/guard/csi-wait.yaml").read_text())
    containers = pod["initContainers"] + pod["containers"] + _pod(wait)["initContainers"]
    assert {each["image"] for each in containers} == {
        f"registry.example/nodeagent:{image.version()}"  # a name that nobody can have
    }
    assert {each["imagePullPolicy"] for each in containers} == {"IfNotPresent"}
    assert f"kubernetes={kubernetes.VERSION} " in (REPO / "scripts/kubernetes.sh").read_text()


@pytest.mark.parametrize("path", READ)
def test_what_rooms_read_of_the_host_is_mounted_at_its_own_path(
    pod: dict[str, Any], path: str
) -> None:
    hosts = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    mounts = [
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if path == mount["mountPath"] or path.startswith(mount["mountPath"] + "/")
    ]
    assert mounts, path
    for mount in mounts:
        assert hosts[mount["name"]] == mount["mountPath"]  # mount tables and links fit
        assert mount["readOnly"] is True
        # Without it the agent is itself a holder of leaked mounts.
        assert mount["mountPropagation"] == "HostToContainer"


def test_only_what_mounts_for_the_host_is_bidirectional(pod: dict[str, Any]) -> None:
    for container in pod["initContainers"] + pod["containers"]:
        both = {
            mount["mountPath"]
            for mount in container["volumeMounts"]
            if mount.get("mountPropagation") == "Bidirectional"
        }
        volumes = {"/var/lib/kubelet/pods"} if container["name"] == "nodeagent" else set()
        assert both == {"/var/lib/nodeagent", "/sys/fs/bpf"} | volumes
    assert pod["hostPID"] is True


def test_keys_of_secrets_are_in_memory(pod: dict[str, Any]) -> None:
    """Beside the socket, where the agent puts them (``nodeagent.cluster.follow``)."""
    place = f"{AdminSettings().socket.parent}/secrets"
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    (volume,) = (each for each in pod["volumes"] if each["name"] == mounts[place])
    assert volume["emptyDir"]["medium"] == "Memory"


def test_default_settings_have_all_rooms_and_a_guard_that_only_reports(
    manifests: list[dict[str, Any]], tmp_path: Path
) -> None:
    configmap = _one(manifests, "ConfigMap")
    settings = yaml.safe_load(configmap["data"]["nodeagent.yaml"])
    assert {"cache", "volumes", "preheat"} <= set(settings)
    assert settings["volumes"]["guard"]["mode"] == "dry-run"
    _check_settings(tmp_path, configmap)


@pytest.mark.real
def test_manifests_are_rendered_from_the_chart(tmp_path: Path) -> None:
    made = tmp_path / "nodeagent.yaml"
    subprocess.run([REPO / "scripts/manifests.sh", made], check=True, timeout=waiting.limit(60))
    assert made.read_text() == MANIFESTS.read_text(), "run scripts/manifests.sh"


@pytest.mark.real
@pytest.mark.parametrize("values", [None, *DISTRIBUTIONS], ids=lambda p: p.stem if p else "default")
def test_chart_lints_and_its_settings_are_the_agents(values: Path | None, tmp_path: Path) -> None:
    words = () if values is None else ("--values", str(values))
    done = kubernetes.helm("lint", "--strict", str(CHART), *kubernetes.IMAGE, *words)
    assert done.returncode == 0, done.stdout
    _check_settings(tmp_path, _one(_render(*words), "ConfigMap"))


@pytest.mark.real
@pytest.mark.parametrize(
    "odd",
    [
        "image.tag=latest",
        "image.tagg=1",
        "image.pullPolicy=Sometimes",
        "host.state=relative/path",
        "host.state=/var/lib/../x",
        "host.runtime.socket=a/b",
        "settings.cash.budget=1",
        "pools=null",
        "pools.UPPER.nodeSelector.a=b",
        "pools.big.nodeSelectors.a=b",
        "resources.limits.memory=lots",
        "port=0",
        "secretName=No_Name",
        "policies.hostPaths.mode=on",
        "policies.hostPaths.exemptAccounts[0]=default",
        "unknown=1",
    ],
)
def test_schema_refuses(odd: str) -> None:
    done = _template("--set", odd)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr, done.stderr


API = '"cert_file": "/c", "key_file": "/k", "tokens_file": "/t"'
# Settings of the door, and whether the probes would find somebody.
DOORS = {
    "{}": True,
    '{"socket": "/run/other/admin.sock"}': True,
    '{"socket": "/var/lib/nodeagent/admin.sock"}': True,
    '{"socket": "/etc/nodeagent/admin.sock"}': False,  # where settings are, read-only
    '{"socket": "/run/containerd/admin.sock"}': False,  # the runtime's, read-only
    '{"socket": "/run/x/../log/journal/admin.sock"}': False,
    '{"socket": "/var/run/nodeagent/admin.sock"}': True,  # a link to /run
    '{"socket": "/var/run/containerd/admin.sock"}': False,
    '{"group": "operators"}': True,  # it degrades: tests/nodeagent/test_listeners.py
    '{"group_role": "read"}': True,
    '{"names": ["node.example"]}': True,
    '{"metrics": "127.0.0.1:9470"}': True,
    '{"metrics": "0.0.0.0:9470"}': True,
    f'{{"api": {{"listen": "0.0.0.0:9471", {API}}}}}': True,
    # Only some nodes have it: the others' agents work without (tests/nodeagent/test_listeners.py).
    f'{{"api": {{"listen": "10.0.0.17:9471", {API}}}}}': True,
    '{"metrics": null}': False,
    '{"metrics": ""}': False,
    '{"metrics": "0.0.0.0:9999"}': False,
    '{"metrics": "10.0.0.17:9470"}': False,
    '{"metrics": "[::]:9470"}': False,  # IPv6 alone
    '{"metrics": "localhost:9470"}': False,  # which may be ::1
    f'{{"api": {{"listen": "0.0.0.0:9470", {API}}}}}': False,
    "null": False,
}  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("where", ["settings", "pools.default.settings"])
@pytest.mark.parametrize("door", DOORS)
def test_probes_find_every_door_that_renders(door: str, where: str, tmp_path: Path) -> None:
    words = ("--set-json", f"{where}.admin={door}")
    done = _template(*words)
    assert (done.returncode == 0) is DOORS[door], done.stderr
    if not DOORS[door]:
        assert "admin" in done.stderr
        return
    documents = [each for each in yaml.safe_load_all(done.stdout) if each]
    _check_settings(tmp_path, _one(documents, "ConfigMap"))
    settings = yaml.safe_load(_one(documents, "ConfigMap")["data"]["nodeagent.yaml"])
    (container,) = _pod(_one(documents, "DaemonSet"))["containers"]
    host, _, port = settings["admin"]["metrics"].rpartition(":")
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[name]["httpGet"]
        assert asked["port"] == container["ports"][0]["hostPort"] == int(port)
        assert host in (asked["host"], "0.0.0.0")


@pytest.mark.real
def test_a_socket_where_the_agent_only_reads_is_refused() -> None:
    words = ("--set-json", 'settings.admin={"socket": "/run/other/admin.sock"}')
    assert _template(*words).returncode == 0
    done = _template(*words, "--set", "host.paths={/run/other}")
    assert done.returncode != 0 and "settings.admin.socket" in done.stderr
    below = ("--set", "host.paths={/mnt},host.state=/mnt/nodeagent")
    words = ("--set-json", 'settings.admin={"socket": "/mnt/nodeagent/admin.sock"}')
    assert _template(*words, *below).returncode == 0  # its own mount, to be written


def _annotations(*words: str) -> dict[str, str]:
    daemonset = _one(_render(*words), "DaemonSet")
    found: dict[str, str] = daemonset["spec"]["template"]["metadata"]["annotations"]
    return found


@pytest.mark.real
def test_settings_that_need_a_restart_make_new_pods() -> None:
    given = ("--set", "podAnnotations.a=b")
    before = _annotations(*given)
    assert before["a"] == "b"
    assert _annotations(*given, "--set", "settings.cache.budget=1TiB") == before
    for changed in (
        "settings.admin.names={node.example}",
        "settings.admin.group_role=read",
        "pools.default.settings.admin.metrics=0.0.0.0:9470",
        "host.state=/mnt/ssd/nodeagent",
        "settings.kubernetes.interval=20s",
        "kubernetes.enabled=false",
        "settings.preheat=null",
    ):
        after = _annotations(*given, "--set", changed)
        assert after.keys() == before.keys()
        assert after != before, changed


@pytest.mark.real
@pytest.mark.parametrize("where", ["settings", "pools.default.settings"])
@pytest.mark.parametrize("name", ["store", "views"])
def test_store_and_views_are_the_hosts(name: str, where: str) -> None:
    for path, state, good in (
        ("/mnt/nvme/store", "/var/lib/nodeagent", False),
        ("/var/lib/nodeagent-2/store", "/var/lib/nodeagent", False),
        ("/var/lib/nodeagent/../store", "/var/lib/nodeagent", False),
        ("/var/lib/nodeagent", "/var/lib/nodeagent", False),
        ("/var/lib/nodeagent/nvme/it", "/var/lib/nodeagent", True),
        ("/mnt/nvme/nodeagent/it", "/mnt/nvme/nodeagent", True),
    ):
        words = ("--set", f"{where}.cache.{name}={path},host.state={state}")
        done = _template(*words)
        assert (done.returncode == 0) is good, path
        assert good or f"settings.cache.{name} is {path}" in done.stderr
    _render("--set", "settings.cache=null")


@pytest.mark.real
def test_door_follows_the_port() -> None:
    moved = _render("--set", "port=9999")
    settings = yaml.safe_load(_one(moved, "ConfigMap")["data"]["nodeagent.yaml"])
    assert settings["admin"]["metrics"] == "127.0.0.1:9999"
    _render("--set", "port=9999", "--set", "settings.admin.metrics=0.0.0.0:9999")


@pytest.mark.real
def test_image_is_named_with_its_registry() -> None:
    """Of a short name a hub or a search list of the node would decide what runs as root."""
    for name, good in (
        ("", False),
        ("nodeagent", False),
        ("team/nodeagent", False),
        ("registry.example", False),
        ("registry.example/", False),
        ("registry.example/nodeagent", True),
        ("registry:5000/team/nodeagent", True),
        ("localhost/nodeagent", True),
    ):
        done = _template("--set", f"image.repository={name}")
        assert (done.returncode == 0) is good, name
        assert good or "image.repository is" in done.stderr


@pytest.mark.real
@pytest.mark.parametrize("values", DISTRIBUTIONS, ids=lambda path: path.stem)
def test_logs_of_a_distribution_can_be_seen(values: Path, tmp_path: Path) -> None:
    documents = _render("--values", str(values))
    configmap = _one(documents, "ConfigMap")
    _check_settings(tmp_path, configmap)
    section = yaml.safe_load(configmap["data"]["nodeagent.yaml"])["volumes"]
    logs = AuditSettings.model_validate(section["audit"]).logs
    if values.stem in ("values-k3s", "values-rke2"):  # they have no kubelet.service
        assert {each.name for each in logs.sources} == {"kubelet", "containerd", "ceph-csi"}
        assert not {"kubelet.service", "containerd.service"} & {s.unit for s in logs.sources}
    mounted = [
        mount["mountPath"]
        for mount in _pod(_one(documents, "DaemonSet"))["containers"][0]["volumeMounts"]
    ]
    for source in logs.sources:
        if source.files is not None:
            assert any(source.files.startswith(f"{each}/") for each in mounted), source.files


@pytest.mark.real
def test_sources_of_kind_dir_are_mounted(tmp_path: Path) -> None:
    documents = _render("--set-json", DATASETS, "--set", "host.paths[0]=/mnt/more")
    pod = _pod(_one(documents, "DaemonSet"))
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    for path in ("/mnt/imagenet", "/mnt/more"):
        assert mounts[path]["readOnly"] is True
        assert mounts[path]["mountPropagation"] == "HostToContainer"
    _check_settings(tmp_path, _one(documents, "ConfigMap"))


@pytest.mark.real
def test_pools_have_daemonsets_and_settings_of_their_own(tmp_path: Path) -> None:
    documents = _render(
        *POOLS, "--set", "pools.a100.settings.cache.budget=1TiB",
        "--set", "pools.cpu.nodeSelector.gpu=none", "--set-json", "pools.cpu.settings.preheat=null",
        "--set", "pools.cpu.resources.limits.memory=1Gi",
    )  # fmt: skip
    daemonsets = {
        each["metadata"]["name"]: each for each in documents if each["kind"] == "DaemonSet"
    }
    settings = {
        each["metadata"]["name"]: yaml.safe_load(each["data"]["nodeagent.yaml"])
        for each in documents
        if each["kind"] == "ConfigMap"
    }
    assert set(daemonsets) == set(settings) == {"nodeagent-a100", "nodeagent-cpu"}
    assert settings["nodeagent-a100"]["cache"]["budget"] == "1TiB"
    assert settings["nodeagent-cpu"]["preheat"] is None
    assert "budget" not in settings["nodeagent-cpu"]["cache"]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in daemonsets.values()]
    assert selectors[0] != selectors[1]
    cpu = _pod(daemonsets["nodeagent-cpu"])
    assert cpu["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
    (sources,) = (each for each in cpu["volumes"] if each["name"] == "config")
    assert sources["projected"]["sources"] == [{"configMap": {"name": "nodeagent-cpu"}}]
    for each in documents:
        if each["kind"] == "ConfigMap":
            _check_settings(tmp_path, each)


@pytest.mark.real
def test_uninstall_is_off_by_default_and_one_job_a_node(manifests: list[dict[str, Any]]) -> None:
    assert not [each for each in manifests if each["kind"] == "Job"]
    jobs = [
        each for each in _render("--set", "uninstall.nodes={gpu-1,gpu-2}") if each["kind"] == "Job"
    ]
    assert [_pod(job)["nodeName"] for job in jobs] == ["gpu-1", "gpu-2"]
    assert len({job["metadata"]["name"] for job in jobs}) == 2
    for job in jobs:
        (container,) = _pod(job)["containers"]
        assert container["args"][-1] == "uninstall"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in _pod(job)["volumes"]}
    (job,) = (
        each
        for each in _render("--set", "uninstall.nodes={gpu-1}", "--set", "uninstall.confirm=true")
        if each["kind"] == "Job"
    )
    assert _pod(job)["containers"][0]["args"][-2:] == ["uninstall", "--yes"]


@pytest.mark.real
def test_any_other_value_makes_another_uninstall_job() -> None:
    """A Job cannot change: one of the same name would make 'helm upgrade' fail."""

    def job(*words: str) -> tuple[str, str]:
        found = _one(_render("--set", "uninstall.nodes={gpu-1}", *words), "Job")
        name: str = found["metadata"]["name"]
        assert len(name) <= 63
        return name, str(found["spec"])

    before, spec = job()
    assert job() == (before, spec)
    for changed in (
        "uninstall.confirm=true",
        "uninstall.forgetVolumes=true",
        "image.tag=9.9.9",
        "image.pullPolicy=Always",
        "resources.limits.memory=1Gi",
        "host.state=/mnt/ssd/nodeagent",
        "host.runtime.socketDir=/run/k3s/containerd",
        "csi.enabled=false",
        "imagePullSecrets[0].name=login",
    ):
        name, other = job("--set", changed)
        assert other != spec, changed
        assert name != before, changed
    same, _ = job("--set", "settings.cache.budget=1TiB")  # of the ConfigMap alone
    assert same == before


@pytest.mark.real
def test_uninstall_of_a_pool_that_is_not_there_is_refused() -> None:
    nodes = ("--set", "uninstall.nodes={gpu-1}")
    for words in (("--set", "uninstall.pool=big"), POOLS):
        done = _template(*nodes, *words)
        assert done.returncode != 0
        assert "uninstall.pool: there is no pool" in done.stderr
    _render(*POOLS)  # nothing is to be uninstalled
    job = _one(_render(*nodes, *POOLS, "--set", "uninstall.pool=a100"), "Job")
    config = next(each for each in _pod(job)["volumes"] if each["name"] == "config")
    assert config["configMap"]["name"] == "nodeagent-a100"


@pytest.mark.real
def test_account_and_its_right_to_ask_are_there_when_callers_are_the_clusters() -> None:
    words = (
        "--set", "pools.a.nodeSelector.gpu=a,csi.driver=false,policies.hostPaths.mode=off",
        "--set", "policies.readOnlyVolumes.mode=off",
        "--set", "kubernetes.enabled=false",
        "--set", "settings.volumes.kubernetes.enabled=false",
    )  # fmt: skip
    kinds = {each["kind"] for each in _render(*words)}
    assert not kinds & {"ServiceAccount", "ClusterRoleBinding"}
    for api in ("null", '{"listen": "0.0.0.0:9471"}'):
        assert len(_render(*words, "--set-json", f"settings.admin.api={api}")) == 4
    asking = ("--set-json", 'pools.a.settings.admin={"api": {"kubernetes": {}}}')
    found = _render(*words, *asking)
    account, binding = _one(found, "ServiceAccount"), _one(found, "ClusterRoleBinding")
    name, space = account["metadata"]["name"], account["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": space}]
    assert binding["roleRef"]["name"] == "system:auth-delegator"
    pods = {e["metadata"]["name"]: _pod(e) for e in found if e["kind"] == "DaemonSet"}
    assert pods.pop(name)["automountServiceAccountToken"] is True
    (other,) = pods.values()
    assert other["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in other


@pytest.mark.real
def test_volumes_are_left_out_where_no_agent_serves_them() -> None:
    for off in ("csi.enabled=false", "settings.cache=null", "settings.cache.csi.enabled=false"):
        documents = _render("--set", off)
        assert "CSIDriver" not in {each["kind"] for each in documents}
        pod = _pod(_one(documents, "DaemonSet"))
        assert not {"pods", "plugin", "plugins-registry"} & {e["name"] for e in pod["volumes"]}
    driver = _one(_render(), "CSIDriver")
    assert driver["metadata"]["name"] == "nodeagent.io"
    assert driver["spec"]["fsGroupPolicy"] == "None"
    assert "CSIDriver" not in {each["kind"] for each in _render("--set", "csi.driver=false")}


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "witnesses"),
    [
        ((), True),
        (("--set", "settings.volumes.kubernetes.enabled=false"), False),
        (("--set", "settings.kubernetes.kubeconfig=/etc/kubeconfig"), False),
        (("--set", "settings.volumes=null"), False),
    ],
)
def test_agent_may_get_and_mark_volumes_and_nothing_else(
    words: tuple[str, ...], witnesses: bool
) -> None:
    others = "kubernetes.enabled=false,policies.readOnlyVolumes.mode=off"
    found = _render(*words, "--set", others)
    pod = _pod(_one(found, "DaemonSet"))
    assert pod["automountServiceAccountToken"] is witnesses
    roles = [each for each in found if each["kind"] == "ClusterRole"]
    policies = [
        each
        for each in found
        if each["kind"] == "ValidatingAdmissionPolicy"
        and each["metadata"]["name"].endswith("-volumes")
    ]
    assert (len(roles), len(policies)) == ((1, 1) if witnesses else (0, 0))
    for role in roles:
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get", "patch"]},
            {
                "apiGroups": ["storage.k8s.io"],
                "resources": ["volumeattachments"],
                "verbs": ["get"],
            },
        ]
        binding = _one(found, "ClusterRoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"][0]["name"] == pod["serviceAccountName"]


@pytest.mark.real
def test_rights_in_the_cluster_are_few_and_go_with_the_setting() -> None:
    """What the policy adds to them is tried on a real server: tests/kube/test_storage.py."""
    found = _render("--set", "kubernetes.secrets={ceph}")
    roles = {
        (each["kind"], each["metadata"].get("namespace")): each["rules"]
        for each in found
        if each["kind"] in ("Role", "ClusterRole") and "-cluster" in each["metadata"]["name"]
    }
    assert set(roles) == {("ClusterRole", None), ("Role", "default"), ("Role", "nodeagent")}
    rules = [rule for each in roles.values() for rule in each]
    assert not [rule for rule in rules if "*" in rule["verbs"] + rule["resources"]]
    (secrets,) = [rule for rule in rules if "secrets" in rule["resources"]]
    assert (secrets["resourceNames"], secrets["verbs"]) == (["ceph"], ["get"])
    settings = yaml.safe_load(_one(found, "ConfigMap")["data"]["nodeagent.yaml"])
    assert settings["kubernetes"] == {}
    for off in ("kubernetes.enabled=false", "settings.kubernetes=null"):
        left = _render("--set", off)
        assert not [e for e in left if "-cluster" in e["metadata"]["name"]], off
        settings = yaml.safe_load(_one(left, "ConfigMap")["data"]["nodeagent.yaml"])
        assert settings.get("kubernetes") is None, off


@pytest.mark.real
def test_a_namespace_of_claims_that_is_there_twice_has_one_role_with_the_secrets_of_both() -> None:
    spaces = [
        {"namespace": "rook-ceph", "secrets": ["cephfs", "rbd"]},
        {"namespace": "other", "secrets": ["rbd"]},
        {"namespace": "rook-ceph", "secrets": ["rbd", "second"]},
    ]
    made = _render("--set-json", f"kubernetes.claims={json.dumps(spaces)}")
    for kind in ("Role", "RoleBinding"):
        names = [(e["metadata"]["namespace"], e["metadata"]["name"]) for e in made
                 if e["kind"] == kind]  # fmt: skip
        assert len(names) == len(set(names)), names
    (role,) = (e for e in made if e["kind"] == "Role" and e["metadata"]["namespace"] == "rook-ceph")
    (rule,) = (each for each in role["rules"] if each["resources"] == ["secrets"])
    assert rule["resourceNames"] == ["cephfs", "rbd", "second"]


@pytest.mark.real
def test_reserve_follows_the_kubelet_of_the_host_that_the_values_describe(tmp_path: Path) -> None:
    """Which thresholds count depends on where the kubelet and the images lie."""
    host = ("--set", "host.kubelet=/data/kubelet", "--set", "host.runtime.images=/data/images")
    own = "pools.default.settings.kubelet"
    for words, root in (((), "/data/kubelet"), (("--set", f"{own}.root_dir=/other"), "/other")):
        configmap = _one(_render(*host, *words), "ConfigMap")
        _check_settings(tmp_path, configmap)
        found = yaml.safe_load(configmap["data"]["nodeagent.yaml"])["kubelet"]
        assert found == {"root_dir": root, "image_dir": "/data/images"}
