"""Operations on datasets: hold and go on, verify, remove, adopt, reload."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from linux import mountinfo, procfs
from tests.testbed import grave, held, pod, trees, waiting
from tests.testbed.agent import Agent, ApiError
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def some(area: Path, node: Agent, name: str = "a", files: int = 300, **more: object) -> Path:
    source = area / f"source-{name}"
    trees.plain(source, files, mean=4000, seed=files)
    node.add_dir(name, source, **more)
    return source


def assert_idle(node: Agent, seconds: float) -> None:
    """No pass runs or starts for so long; only watching shows that nothing happens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert node.passes() == []
        time.sleep(0.05)


# --- pause, resume, cancel


@pytest.mark.parametrize(("verb", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_held_dataset_stays_held_over_restarts(
    area: Path, node: Agent, verb: str, state: str
) -> None:
    source = some(area, node)
    fill = held.Fill(node, 30)
    node.start()
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 20, 30, "some files")
    node.tell("a", verb)
    node.wait_for(lambda: not node.passes(), 20, "the pass to end")
    node.wait_state("a", state)
    done = node.dataset("a")["files"]["done"]
    trees.assert_equal(source, node.view("a"))
    for end in (node.kill, node.stop):
        end()
        node.start()
        assert_idle(node, 1.5)
        shown = node.dataset("a")
        assert (shown["state"], shown["files"]["done"]) == (state, done)
    fill.go_on()
    node.tell("a", "resume")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    with pytest.raises(ApiError, match=r"409.*nothing to pause"):
        node.tell("a", "pause")


def test_pause_right_after_warm_holds(area: Path, node: Agent) -> None:
    some(area, node, warm=False)
    held.Fill(node, 20)  # six times: it never has all files
    node.start()
    node.wait_served("a", "source")
    for wait in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4):
        node.tell("a", "warm")
        time.sleep(wait)
        assert node.tell("a", "pause")["state"] in ("paused", "filling", "scanning", "queued")
        node.wait_for(lambda: not node.passes(), 20, "the pass to end")
        assert_idle(node, 0.5)
        assert node.dataset("a")["state"] == "paused"


def test_fill_stops_for_a_higher_priority_and_goes_on_by_itself(area: Path, node: Agent) -> None:
    for name, priority in (("low", 0), ("high", 5)):
        some(area, node, name, priority=priority, warm=False)
    fill = held.Fill(node, 30)
    node.start()
    for name in ("low", "high"):
        node.wait_served(name, "source")
    node.tell("low", "warm")
    node.wait_for(lambda: node.dataset("low")["files"]["done"] > 20, 30, "the first to begin")
    node.tell("high", "warm")
    node.wait_for(lambda: node.dataset("high")["files"]["done"] > 0, 30, "the urgent one to begin")
    stored = {path: path.stat().st_ino for path in node.tree("low").rglob("f*")}
    assert len(stored) > 20
    shown = node.dataset("low")
    assert (shown["state"], shown["why"]) == ("queued", "waits for high (priority 5)")
    assert shown["files"]["done"] == len(stored)
    waits = "waits_for - → high (priority 5)"
    node.wait_for(
        lambda: any(waits in each["text"] for each in node.get("/v1/events")["events"]), 30, waits
    )

    node.cli_json("dataset", "warm", "low", "--now")
    waits = "waits for low (priority 0, wanted now)"
    node.wait_for(lambda: node.dataset("high")["why"] == waits, 30, "the other way round")

    fill.go_on()
    for name in ("low", "high"):
        node.wait_state(name, "complete")
        trees.assert_equal(area / f"source-{name}", node.view(name))
    assert {path: path.stat().st_ino for path in stored} == stored  # none was copied again
    said = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    turns = [each["dataset"] for each in said if each["event"] == "pass started"]
    assert turns == ["low", "high", "low", "high"]


# --- verify


def verified(node: Agent, name: str = "a", *, source: bool = False) -> dict[str, object]:
    node.tell(name, "verify", {"source": source})

    def ended() -> dict[str, object] | None:
        shown = node.dataset(name)["verify"]
        return None if shown["state"] in ("queued", "running") else shown

    found: dict[str, object] = node.wait_for(ended, 60, "verify to end")
    return found


def test_verify_replaces_bad_file_under_reader(area: Path, node: Agent) -> None:
    source = some(area, node)
    node.start()
    node.wait_state("a", "complete")
    name = "d3/f00003"
    right = flip(node.tree("a") / name)
    held = os.open(node.view("a") / name, os.O_RDONLY)
    try:
        result = verified(node)
        assert (result["bad"], result["replaced"], result["withdrawn"]) == (1, 1, 0)
        assert result["checked_files"] == 300
        with grave.wrong_bytes():
            assert (node.view("a") / name).read_bytes() == right
        assert os.fstat(held).st_size == len(right)  # what was open stays open
    finally:
        os.close(held)
    trees.assert_equal(source, node.view("a"))
    assert node.dataset("a")["state"] == "complete"
    assert verified(node)["bad"] == 0

    def cleared() -> bool:
        return "store-bad-files" not in str(node.get("/v1/findings"))

    node.wait_for(cleared, 30, "the finding to be cleared")


def test_verify_withdraws_bad_file_without_source(area: Path, node: Agent) -> None:
    source = some(area, node)
    node.start()
    node.wait_state("a", "complete")
    name = "d3/f00003"
    flip(node.tree("a") / name)
    moment = (source / "d3").stat().st_mtime_ns
    (source / name).unlink()
    os.utime(source / "d3", ns=(moment, moment))
    result = verified(node)
    assert (result["bad"], result["replaced"], result["withdrawn"]) == (1, 0, 1)
    node.wait_served("a", "overlay")
    assert not (node.view("a") / name).exists(), "better none than a wrong one"
    assert node.dataset("a")["state"] == "partial"
    trees.assert_equal(source, node.view("a"))


def test_verify_withdraws_thousands_of_files(area: Path, node: Agent) -> None:
    source = area / "source"
    (source / ("d" * 200)).mkdir(parents=True)
    for number in range(5000):
        (source / ("d" * 200) / f"{number:05}{'n' * 200}").write_bytes(b"right")
    (source / "good").write_bytes(b"good")
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    for path in (node.tree("a") / ("d" * 200)).iterdir():
        path.write_bytes(b"wrong")
        (source / ("d" * 200) / path.name).unlink()
    result = verified(node)
    assert (result["bad"], result["withdrawn"]) == (5000, 5000), result
    assert node.get("/healthz")["alive"]
    assert list((node.view("a") / ("d" * 200)).iterdir()) == []
    assert (node.view("a") / "good").read_bytes() == b"good"


def test_verify_restores_missing_file(area: Path, node: Agent) -> None:
    source = some(area, node)
    node.start()
    node.wait_state("a", "complete")
    (node.tree("a") / "d3/f00003").unlink()
    result = verified(node)
    assert result["bad"] == 1, result
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))


def test_verify_source_finds_difference(area: Path, node: Agent) -> None:
    source = some(area, node)
    node.start()
    node.wait_state("a", "complete")
    path = source / "d1/f00001"
    status = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert verified(node)["bad"] == 0
    assert verified(node, source=True)["bad"] == 1


def test_verify_refused_while_cold(area: Path, node: Agent) -> None:
    some(area, node, warm=False)
    node.start()
    with pytest.raises(ApiError, match=r"409.*warm it first"):
        node.tell("a", "verify")


# --- remove


def test_remove_names_readers(area: Path, node: Agent) -> None:
    some(area, node)
    node.start()
    node.wait_state("a", "complete")
    holders = {
        "open": f"f = open({str(node.view('a') / 'd0/f00000')!r})",
        "working directory": f"import os; os.chdir({str(node.view('a') / 'd0')!r})",
        "d0/f00000": "import mmap, os; "
        f"d = os.open({str(node.view('a') / 'd0/f00000')!r}, 0); "
        "m = mmap.mmap(d, 0, prot=1); os.close(d)",
    }
    for how, script in holders.items():
        script += "; print('up', flush=True); input()"
        job = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == b"up\n"
            done = node.cli("dataset", "remove", "a")
            assert done.returncode == 6
            assert f"pid {job.pid}" in done.stderr
            assert how in done.stderr
            assert done.stderr.count("\n") == 1
        finally:
            job.communicate(b"\n", timeout=waiting.limit(30))
    assert node.dataset("a")["state"] == "complete"
    assert (node.view("a") / "d0/f00000").exists()


def test_remove_waits_for_pod(area: Path, node: Agent) -> None:
    some(area, node)
    node.start()
    node.wait_state("a", "complete")
    with pod.pod(area / "pod", node.views / "a") as job:
        done = node.cli("dataset", "remove", "a")
        assert done.returncode == 6
        assert f"pid {job.holder.pid}" in done.stderr
        assert job.run("ls", job.data).count("\n") == 8
    done = node.cli("dataset", "remove", "a")
    assert done.returncode == 0, done.stderr
    assert "stays removed until" in done.stderr
    assert not node.view("a").exists()
    node.wait_for(lambda: not list((node.store / ".trash").iterdir()), 30, "the trash to be empty")
    assert node.generations("a") == []
    assert node.dataset("a")["state"] == "removed"
    node.kill()
    node.start()
    assert_idle(node, 1.0)
    assert node.dataset("a")["state"] == "removed"
    assert node.generations("a") == []
    node.tell("a", "warm")
    node.wait_state("a", "complete")


def test_remove_while_filling(area: Path, node: Agent) -> None:
    source = some(area, node)
    fill = held.Fill(node, 10)
    node.start()
    node.wait_served("a", "overlay")
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 0, 30, "some files")
    fill.wait()
    node.remove("a")
    assert_idle(node, 1.0)
    assert node.generations("a") == []
    assert node.dataset("a")["state"] == "removed"
    assert not [m for m in mountinfo.read() if m.target == str(node.view("a"))]
    fill.go_on()
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))


# --- restart and settings


@pytest.mark.parametrize("state", ["filling", "complete"])
def test_restart_adopts_mounts(area: Path, node: Agent, state: str) -> None:
    source = some(area, node)
    if state == "filling":
        held.Fill(node, 10)  # in each of four lives
    node.start()
    node.wait_state("a", state)
    node.wait_served("a", "store" if state == "complete" else "overlay")

    def ours() -> dict[str, int]:
        return {m.target: m.mount_id for m in mountinfo.read() if str(node.folder) in m.target}

    # The shared mount, the view and, once it is complete, the generation by its id.
    node.wait_for(lambda: len(ours()) == (3 if state == "complete" else 2), 30, "the mounts")
    before = ours()
    opened = os.open(node.view("a") / "d0/f00000", os.O_RDONLY)
    try:
        for end in (node.kill, node.stop, node.kill):
            end()
            trees.assert_equal(source, node.view("a"))
            node.start()
            node.wait_state("a", state)
            node.wait_served("a", "store" if state == "complete" else "overlay")
            assert ours() == before
        assert os.pread(opened, 10, 0) == (source / "d0/f00000").read_bytes()[:10]
    finally:
        os.close(opened)


def test_reload_adds_and_drops_datasets(area: Path, node: Agent) -> None:
    first = some(area, node, "a")
    node.start()
    node.wait_state("a", "complete")
    second = some(area, node, "b", files=50)
    node.write()
    node.wait_for(lambda: len(node.get("/v1/datasets")["datasets"]) == 2, 30, "b to be there")
    node.wait_state("b", "complete")
    trees.assert_equal(second, node.view("b"))
    gone = node.cache["datasets"].pop(0)
    node.write()
    node.wait_for(lambda: node.get("/v1/datasets")["orphans"] == ["a"], 30, "a to be an orphan")
    trees.assert_equal(first, node.view("a"))  # a slip in the file costs nothing
    node.wait_for(
        lambda: [f["rule"] for f in node.get("/v1/findings")["findings"]] == ["store-orphan"],
        30, "the finding about a",
    )  # fmt: skip
    node.cache["datasets"].append(gone)
    node.write()
    node.wait_for(lambda: node.get("/v1/datasets")["orphans"] == [], 30, "a to be back")
    assert node.dataset("a")["state"] == "complete"
    node.cache["datasets"].pop()
    node.write()
    node.wait_for(lambda: node.get("/v1/datasets")["orphans"] == ["a"], 30, "a to be an orphan")
    assert node.cli("dataset", "remove", "a").returncode == 0
    assert node.generations("a") == []
    assert not node.view("a").exists()
    assert node.get("/v1/datasets")["orphans"] == []


def test_reload_names_what_needs_restart(area: Path, node: Agent) -> None:
    source = some(area, node)
    other = area / "other"
    trees.plain(other, 20)
    node.start()
    node.wait_state("a", "complete")
    node.cache["store"] = str(area / "elsewhere")
    node.cache["datasets"][0]["source"]["path"] = str(other)
    node.settings["admin"]["metrics"] = "127.0.0.1:1"
    node.write()
    wanted = ["admin", "cache.datasets.a.source", "cache.store"]
    node.wait_for(lambda: sorted(node.get("/readyz")["needs_restart"]) == wanted, 30, "its names")
    trees.assert_equal(source, node.view("a"))
    assert not (area / "elsewhere").exists()
    node.config.write_text("cache: {bugdet: 1}\n")
    node.wait_for(
        lambda: any("bugdet" in reason for reason in node.get("/readyz")["reasons"]),
        30,
        "the error",
    )
    assert node.dataset("a")["state"] == "complete"


def test_roots_behind_symbolic_links(area: Path, node: Agent) -> None:
    for name in ("store", "views", "state", "source"):
        (area / f"real-{name}").mkdir()
        (area / name).symlink_to(f"real-{name}")
    trees.plain(area / "real-source", 100)
    node.cache["store"], node.cache["views"] = str(area / "store"), str(area / "views")
    node.settings["state_dir"] = str(area / "state")
    node.add_dir("a", area / "source")
    node.start()
    node.wait_state("a", "complete")
    view = area / "views/a/data"
    trees.assert_equal(area / "real-source", view)
    mounted = [
        m for m in mountinfo.read() if m.target.startswith(str(area)) and "a/data" in m.target
    ]
    assert len(mounted) == 1
    node.kill()
    node.start()
    node.wait_state("a", "complete")
    node.remove("a")
    assert not [
        m for m in mountinfo.read() if m.target.endswith("a/data") and str(area) in m.target
    ]
    assert not view.exists()


def test_dataset_survives_killed_children(area: Path, node: Agent) -> None:
    missing = area / "later"
    node.add_dir("a", missing)
    node.start()
    # Every child process of the agent dies for a while, as under the OOM killer.
    until = time.monotonic() + 7.0
    killed = 0
    while time.monotonic() < until:
        for child in procfs.family(node.pid) - {node.pid}:
            try:
                os.kill(child, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass  # it ended by itself
        time.sleep(0.01)
    assert killed
    trees.plain(missing, 30)
    node.wait_for(lambda: node.get("/healthz")["alive"], 5, "the agent to be alive")
    node.wait_for(lambda: node.dataset("a")["state"] == "complete", 60, "a to be complete")
