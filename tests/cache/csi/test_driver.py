"""The driver of a real agent, called as kubelet calls it: real mounts, restarts, troubles."""

import contextlib
import ctypes
import json
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

import kit.files
from cache.csi import csi_pb2 as pb
from linux import mountinfo, mounts, syscalls
from tests.testbed import agent, csi, held, kubernetes, pod, trees, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

COCO = {"dataset": "coco"}
PARENT = {**COCO, "layout": "parent"}


@pytest.fixture
def kubelet(area: Path) -> csi.Kubelet:
    return csi.Kubelet(area / "k")


@pytest.fixture
def source(area: Path) -> Path:
    made = area / "source"
    trees.plain(made, 40)
    return made


@pytest.fixture
def serving(node: agent.Agent, kubelet: csi.Kubelet, source: Path) -> Iterator[agent.Agent]:
    """With the dataset coco, not filled."""
    node.add_dir("coco", source, warm=False)
    kubelet.serve(node)
    node.start()
    waiting.until(kubelet.registration.exists, 20, "the driver")
    node.wait_served("coco", "source")  # a call waits a second for that, a kubelet tries again
    yield node


def is_mounted(path: Path) -> bool:
    return bool(mountinfo.at(str(path), mountinfo.read()))


def mounts_of(path: Path) -> int:
    return len(mountinfo.at(str(path), mountinfo.read()))


def manifest(source: Path, area: Path) -> Path:
    """What the files are, for a reader."""
    files = {}
    for path in sorted(source.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            files[str(path.relative_to(source))] = [len(data), xxhash.xxh3_128_hexdigest(data)]
    made = area / "manifest.json"
    made.write_text(json.dumps(files))
    return made


def mounts_below(root: Path) -> list[str]:
    return [each.target for each in mountinfo.read() if each.target.startswith(f"{root}/pods/")]


def test_kubelet_learns_name_and_socket(serving: agent.Agent, kubelet: csi.Kubelet) -> None:
    method = "pluginregistration.Registration/GetInfo"
    found = kubelet.call(method, pb.Empty(), pb.Registration, registration=True)
    assert (found.type, found.name) == ("CSIPlugin", "nodeagent.io")
    assert found.endpoint == str(kubelet.csi)
    assert kubelet.csi.stat().st_mode & 0o777 == 0o600
    method = "pluginregistration.Registration/NotifyRegistrationStatus"
    refusal = pb.RegistrationStatus(plugin_registered=False, error="another has the name")
    kubelet.call(method, refusal, pb.Empty, registration=True)
    assert "another has the name" in str(serving.get("/readyz"))
    kubelet.call(method, pb.RegistrationStatus(plugin_registered=True), pb.Empty, registration=True)
    assert "nodeagent_csi_registered 1.0" in serving.get("/metrics")


def test_a_deleted_socket_is_made_again(serving: agent.Agent, kubelet: csi.Kubelet) -> None:
    kubelet.registration.unlink()
    waiting.until(kubelet.registration.exists, 30, "the socket")
    method = "pluginregistration.Registration/GetInfo"
    kubelet.call(method, pb.Empty(), pb.Registration, registration=True)


def test_direct_keeps_what_served_and_parent_follows(
    serving: agent.Agent, kubelet: csi.Kubelet, source: Path, area: Path
) -> None:
    direct, parent = kubelet.target(), kubelet.target()
    kubelet.publish(direct, COCO)
    kubelet.publish(parent, PARENT, identity="w")
    kubelet.publish(parent, PARENT, identity="w")  # again is no error
    trees.assert_equal(source, direct)
    trees.assert_equal(source, parent / "data")
    with pytest.raises(OSError, match="Read-only"):
        (parent / "x").mkdir()
    with pod.pod(area / "pod", parent) as job:
        reader = job.reader(manifest(source, area), 1)
        serving.tell("coco", "warm")
        serving.wait_state("coco", "complete")
        before = reader.reads()
        waiting.until(lambda: reader.reads() > before + 100, 20, "reads after the last swap")
        report = reader.stop()
    assert (report["errors"], report["wrong"]) == (0, 0), report
    shown = {each.target: each for each in mountinfo.read()}
    store = shown[str(serving.view("coco"))].root
    assert shown[f"{parent}/data"].root == store
    assert shown[str(direct)].root != store
    trees.assert_equal(source, direct)
    kubelet.unpublish(direct)
    kubelet.unpublish(parent, identity="w")
    kubelet.unpublish(parent, identity="w")  # again is no error
    assert mounts_below(kubelet.root) == []
    assert not direct.exists() and direct.parent.exists()
    assert is_mounted(serving.view("coco"))  # nothing was sent back


@contextlib.contextmanager
def users_of_its_own() -> Iterator[int]:
    """A user namespace as that of a pod with hostUsers: false."""
    with subprocess.Popen(["unshare", "--user", "sleep", "600"]) as process:
        try:
            ours, theirs = Path("/proc/self/ns/user"), Path(f"/proc/{process.pid}/ns/user")
            waiting.until(lambda: theirs.readlink() != ours.readlink(), 20, "the namespace")
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{process.pid}/{name}").write_text("0 100000 65536")
            with theirs.open() as namespace:
                yield namespace.fileno()
        finally:
            process.kill()


def map_users(target: Path, namespace: int) -> None:
    """What a runtime does with a volume of such a pod. OSError."""
    with kit.files.closing(mounts.clone_tree(target)) as tree:
        wanted = ctypes.create_string_buffer(struct.pack("QQQQ", 0x100000, 0, 0, namespace), 32)
        empty = ctypes.c_char_p(b"")
        syscalls.syscall(442, "mount_setattr", tree, empty, 0x1000, wanted, 32)


def test_pod_with_users_of_its_own_gets_what_can_be_mapped(
    node: agent.Agent, kubelet: csi.Kubelet, source: Path
) -> None:
    node.cache["fill"] = {"workers": 1}
    fill = held.Fill(node, 10)
    node.add_dir("coco", source)
    kubelet.serve(node)
    node.start()
    node.wait_served("coco", "overlay")
    volume, other = kubelet.target(), kubelet.target()
    kubelet.publish(volume, COCO)
    kubelet.publish(other, COCO, identity="w")
    (volume.parents[3] / "userns").write_text("{}")  # kubelet writes it when it makes the sandbox

    def told() -> list[str]:
        rule = "volume-not-mapped"
        return [each["message"] for each in node.findings() if each["rule"] == rule]

    node.wait_for(told, 30, "the finding")
    with users_of_its_own() as namespace:
        with pytest.raises(OSError, match="Invalid argument"):
            map_users(volume, namespace)
        fill.go_on()
        node.wait_state("coco", "complete")
        node.wait_for(lambda: not told(), 30, "the finding to go")
        map_users(volume, namespace)
    trees.assert_equal(source, volume)
    shown = {each.target: each.fstype for each in mountinfo.read()}
    assert shown[str(other)] == "overlay", "that of another pod stays what it was"
    kubelet.unpublish(volume)
    kubelet.unpublish(other, identity="w")
    assert mounts_below(kubelet.root) == []


def test_volume_has_the_door_of_the_view(
    node: agent.Agent, kubelet: csi.Kubelet, area: Path
) -> None:
    trees.plain(area / "closed/source", 5)
    (area / "closed").chmod(0o700)
    node.add_dir("coco", area / "closed/source", warm=False)
    node.cache["datasets"][0]["access"] = {"group": 4711, "mode": "0750"}
    kubelet.serve(node)
    node.start()
    waiting.until(kubelet.registration.exists, 20, "the driver")
    node.wait_served("coco", "source")
    with csi.refused("FAILED_PRECONDITION", "layout: parent"):
        kubelet.publish(kubelet.target(), COCO)
    assert mounts_below(kubelet.root) == []
    parent = kubelet.target()
    kubelet.publish(parent, PARENT)
    assert lists(parent, "data", 4711) and not lists(parent, "data", 65534)
    node.cache["datasets"][0]["access"] = {"mode": "0755"}
    node.write()
    view = node.view("coco").parent
    node.wait_for(lambda: view.stat().st_mode & 0o777 == 0o755, 30, "the new mode")
    direct = kubelet.target()
    kubelet.publish(direct, COCO)
    assert lists(direct, ".", 65534) and lists(parent, "data", 65534)


def lists(folder: Path, name: str, user: int) -> bool:
    """Whether a user who is in ``folder`` may list what is there by that name."""
    command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "ls", name]
    limit = waiting.limit(30)
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=limit)
    return done.returncode == 0


def test_wrong_requests_are_answered_by_name(
    serving: agent.Agent, kubelet: csi.Kubelet, area: Path
) -> None:
    target = kubelet.target()
    with csi.refused("INVALID_ARGUMENT", "readOnly is false"):
        kubelet.publish(target, COCO, readonly=False)
    with csi.refused("NOT_FOUND", "this node does not have it; its datasets are: coco"):
        kubelet.publish(target, {"dataset": "imagenet"})
    with csi.refused("INVALID_ARGUMENT", "layout 'flat'"):
        kubelet.publish(target, {**COCO, "layout": "flat"})
    with csi.refused("INVALID_ARGUMENT", "does not lie below"):
        kubelet.publish(area / "elsewhere", COCO)
    with csi.refused("FAILED_PRECONDITION", "not complete yet: 0 %"):
        kubelet.publish(target, {**COCO, "wait": "complete"})
    assert mounts_below(kubelet.root) == [] and not target.exists()
    capability = pb.VolumeCapability(
        mount=pb.VolumeCapability.Mount(),
        access_mode=pb.VolumeCapability.AccessMode(mode="MULTI_NODE_READER_ONLY"),
    )
    kubelet.publish(target, COCO, readonly=False, volume_capability=capability)  # ReadOnlyMany
    with csi.refused("ALREADY_EXISTS", "volume v is mounted there"):
        kubelet.publish(target, PARENT)
    kubelet.unpublish(target)


LINKED = ("mount", "volume", "driver", "volumes", "pod", "pods")  # parts of a target path


@pytest.mark.parametrize("part", LINKED)
def test_only_the_kubelets_own_directories_may_be_links(
    serving: agent.Agent, kubelet: csi.Kubelet, area: Path, part: str
) -> None:
    """In the folder of a pod others may put links, which would lead a mount over the host."""
    target, away = kubelet.target(), area / "away"
    target.mkdir()
    link = [target, *target.parents][LINKED.index(part)]
    link.rename(away)
    link.symlink_to(away)
    real = away / target.relative_to(link)
    if part == "pods":
        kubelet.publish(target, COCO)
        kubelet.publish(target, COCO)
        assert mounts_of(real) == 1
        kubelet.unpublish(target)
        assert mounts_of(real) == 0 and not real.exists()
        return
    refusal = f"{target}: a part of it is a symbolic link"
    with csi.refused("FAILED_PRECONDITION", refusal):
        kubelet.publish(target, COCO)
    assert mounts_of(real) == 0
    mounts.mount("nodeagent-test", real, "tmpfs", 0)  # somebody else's
    try:
        if part == "mount":
            kubelet.unpublish(target)  # a link is no mount point: the kubelet removes it
        else:
            with csi.refused("FAILED_PRECONDITION", refusal):
                kubelet.unpublish(target)
        assert mounts_of(real) == 1
    finally:
        mounts.detach(real)
    assert real.exists()
    serving.call("DELETE", "/v1/datasets/coco")  # nobody holds it


def test_volumes_hold_their_dataset_and_outlive_the_agent(
    serving: agent.Agent, kubelet: csi.Kubelet, source: Path
) -> None:
    target = kubelet.target()
    pod = {"csi.storage.k8s.io/pod.name": "train", "csi.storage.k8s.io/pod.namespace": "ml"}
    kubelet.publish(target, {**COCO, **pod})
    serving.kill()
    trees.assert_equal(source, target)
    serving.start()
    waiting.until(lambda: answered(kubelet, target), 20, "the driver")
    with pytest.raises(agent.ApiError, match="pod ml/train has it") as caught:
        serving.call("DELETE", "/v1/datasets/coco")
    assert caught.value.status == 409
    kubelet.publish(target, COCO)  # as kubelet does after its restart
    kubelet.unpublish(target)
    serving.call("DELETE", "/v1/datasets/coco")
    with csi.refused("FAILED_PRECONDITION", "it was removed from this node"):
        kubelet.publish(target, COCO)


def test_unpublish_works_when_the_dataset_is_gone(
    serving: agent.Agent, kubelet: csi.Kubelet
) -> None:
    target, unknown = kubelet.target(), kubelet.target()
    kubelet.publish(target, COCO)
    serving.cache["datasets"] = []
    serving.write()
    serving.wait_for(lambda: not serving.get("/v1/datasets")["datasets"], 20, "the settings")
    condition = kubelet.stats(target).volume_condition
    assert condition.abnormal and "no longer in the settings" in condition.message
    kubelet.unpublish(target)
    unknown.mkdir()
    kubelet.unpublish(unknown, identity="never-seen")
    assert not unknown.exists() and mounts_below(kubelet.root) == []
    with csi.refused("NOT_FOUND", "no volume is published there"):
        kubelet.stats(target)


def test_stats_tell_bytes_and_files(
    serving: agent.Agent, kubelet: csi.Kubelet, source: Path
) -> None:
    target = kubelet.target()
    kubelet.publish(target, COCO)
    serving.tell("coco", "warm")
    serving.wait_state("coco", "complete")
    found = kubelet.stats(target)
    files = [path for path in source.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert [(each.unit, each.total, each.used, each.available) for each in found.usage] == [
        (pb.Usage.BYTES, size, size, 0),
        (pb.Usage.INODES, len(files), len(files), 0),
    ]
    assert not found.volume_condition.abnormal


def test_agent_killed_at_any_moment_of_many_requests(
    serving: agent.Agent, kubelet: csi.Kubelet
) -> None:
    """Kubelet repeats what failed; in the end all is there, and then nothing."""
    targets = [kubelet.target() for _ in range(10)]
    acts: tuple[Callable[[Path], None], ...] = (
        lambda each: kubelet.publish(each, PARENT),
        kubelet.unpublish,
    )
    for act in acts:
        for pause in (0.1, 0.6):
            threads = [threading.Thread(target=quietly, args=(act, each)) for each in targets]
            for each in threads:
                each.start()
            time.sleep(pause)
            serving.kill()
            for each in threads:
                each.join(waiting.limit(30))
            serving.start()
            waiting.until(kubelet.registration.exists, 20, "the driver")
        for target in targets:
            until_done(act, target)
        there = mounts_below(kubelet.root)
        assert len(there) in (0, 2 * len(targets)), there
    assert there == []
    assert not any((serving.state / "csi").iterdir())
    assert is_mounted(serving.view("coco"))


def answered(kubelet: csi.Kubelet, target: Path) -> bool:
    """By an agent that has just started: its sockets follow, and until then the old ones refuse."""
    try:
        return bool(kubelet.stats(target).usage)
    except grpc.RpcError as error:
        assert "UNAVAILABLE" in str(error), error
        return False


def quietly(act: Callable[[Path], None], target: Path) -> None:
    try:
        act(target)
    except grpc.RpcError:
        pass  # the agent was killed


def until_done(act: Callable[[Path], None], target: Path) -> None:
    def done() -> bool:
        try:
            act(target)
        except grpc.RpcError as error:
            assert "UNAVAILABLE" in str(error), error
            return False
        return True

    waiting.until(done, 30, "the request to end well", pause=0.1)


# These ask a controller for a volume, to write to it.
NOT_OURS = (
    "Controller Service", "Controller Server", "should remove target path", "should work",
    "should be idempotent", "volume does not exist on the specified path",
)  # fmt: skip


@contextlib.contextmanager
def controller_of(kubelet: csi.Kubelet) -> Iterator[Path]:
    """csi-sanity asks a controller for its abilities before each case; this one can do nothing, and
    is identified by the agent."""

    def passed_on(method: str) -> Any:
        def ask(request: bytes, _: object) -> bytes:
            with grpc.insecure_channel(kit.files.grpc_address(kubelet.csi)) as channel:
                stub: Any = channel.unary_unary(f"/csi.v1.Identity/{method}")
                answer: bytes = stub(request, timeout=waiting.limit(10))
                return answer

        return grpc.unary_unary_rpc_method_handler(ask)

    identity = ("GetPluginInfo", "GetPluginCapabilities", "Probe")
    unknown = b"\x0a\x02\x0a\x00"  # one ability: rpc, of type UNKNOWN
    abilities: Any = grpc.unary_unary_rpc_method_handler(lambda _, __: unknown)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "csi.v1.Controller", {"ControllerGetCapabilities": abilities}
            ),
            grpc.method_handlers_generic_handler(
                "csi.v1.Identity", {name: passed_on(name) for name in identity}
            ),
        )
    )
    socket = kubelet.root / "controller.sock"
    server.add_insecure_port(kit.files.grpc_address(socket))
    server.start()
    try:
        yield socket
    finally:
        server.stop(None).wait(waiting.limit(5))


def test_sanity_of_the_specification(serving: agent.Agent, kubelet: csi.Kubelet) -> None:
    """csi-sanity: what fits a driver without a controller."""
    (kubelet.root / "pods" / "p").mkdir()
    with controller_of(kubelet) as controller:
        done = subprocess.run(
            [
                str(kubernetes.BIN / "csi-sanity"), f"--csi.endpoint={kubelet.csi}",
                f"--csi.controllerendpoint={controller}",
                f"--csi.mountdir={kubelet.root}/pods/p/target",
                f"--csi.stagingdir={kubelet.root}/pods/p/staging",
                "--ginkgo.no-color", *(f"--ginkgo.skip={words}" for words in NOT_OURS),
            ],
            capture_output=True, text=True, timeout=waiting.limit(100), check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout)
    summary = next(line for line in done.stdout.splitlines() if "Passed" in line)
    assert int(summary.split("--")[1].split()[0]) >= 12, summary


def test_uninstall_takes_registration_and_volumes(
    serving: agent.Agent, kubelet: csi.Kubelet
) -> None:
    """Volumes whose pods ended while no agent was there."""
    targets = [kubelet.target(), kubelet.target()]
    kubelet.publish(targets[0], COCO)
    kubelet.publish(targets[1], PARENT)
    serving.kill()
    assert kubelet.registration.exists()
    listed = [each["name"] for each in serving.cli_json("uninstall")["found"]]
    assert {str(targets[0]), str(targets[1]), str(kubelet.registration)} <= set(listed)
    done = serving.cli("uninstall", "--yes")
    assert done.returncode == 0, done.stderr
    assert mounts_below(kubelet.root) == []
    assert not kubelet.registration.exists() and not kubelet.csi.parent.exists()
    assert not serving.state.exists()


def test_doctor_looks_at_kubelets_directories(
    node: agent.Agent, kubelet: csi.Kubelet, area: Path
) -> None:
    def check() -> dict[str, Any]:
        node.write()
        found: list[dict[str, Any]] = json.loads(node.cli("doctor", "--json").stdout)
        return next(each for each in found if (each["room"], each["name"]) == ("cache", "kubelet"))

    assert not check()["wanted"]
    kubelet.serve(node)
    assert check()["well"]
    node.settings["kubelet"]["root_dir"] = str(area / "nothing")
    found = check()
    assert found["wanted"] and not found["well"]
    assert f"{area}/nothing/pods: it is not there" in str(found)


def test_a_kubelet_that_is_not_there_yet_keeps_no_dataset_from_work(
    node: agent.Agent, kubelet: csi.Kubelet, source: Path
) -> None:
    node.add_dir("coco", source)
    kubelet.serve(node)
    registry = kubelet.registration.parent
    registry.rmdir()
    node.start()
    node.wait_state("coco", "complete")
    assert "the driver's sockets cannot be made there" in str(node.get("/readyz"))
    registry.mkdir()
    waiting.until(kubelet.registration.exists, 30, "the driver")
    waiting.until(lambda: node.get("/readyz")["ready"], 20, "the room")
