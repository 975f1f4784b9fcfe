"""Sources that misbehave while they are copied, and a view whose layers change under readers."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from linux import mounts
from tests.testbed import grave, held, leftovers, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def test_changing_file_is_never_torn(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 50)
    victims = [source / "d0" / f"changing{n}" for n in range(4)]
    stop = threading.Event()

    def version(number: int) -> bytes:
        return number.to_bytes(4, "big") * (1024 * 1024)  # every part says which version it is

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for victim in victims:
                with victim.open("r+b", buffering=0) as stream:  # in place: no second inode
                    data = version(number)
                    for at in range(0, len(data), 65536):
                        stream.write(data[at : at + 65536])

    for victim in victims:
        victim.write_bytes(version(0))
    writer = threading.Thread(target=change)
    writer.start()
    try:
        node.add_dir("a", source)
        # Slow enough that every copy of a victim meets the writer, on any machine.
        node.cache["fill"] = {"bytes_per_second": "16MiB"}
        node.start()
        shown = node.wait_state("a", "partial", seconds=90)
        assert shown["files"]["failed"] >= 1
        reasons = node.failures("a")
        assert any("changed while it was copied" in reason for reason in reasons.values()), reasons
        for stored in (node.tree("a") / "d0").iterdir():
            data = stored.read_bytes()
            if stored.name.startswith("changing"):
                # One that failed may be there as it was at an earlier listing, but never torn.
                assert data == data[:4] * (len(data) // 4), "torn between two versions"
    finally:
        stop.set()
        writer.join()
    node.tell("a", "warm")
    node.wait_state("a", "complete", seconds=60)
    assert node.failures("a") == {}


def test_vanished_files_do_not_fail_fill(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 300)
    node.cache["fill"] = {"workers": 1}
    fill = held.Fill(node, 100)
    node.add_dir("a", source)
    node.start()
    node.wait_served("a", "overlay")
    fill.wait()
    gone = [source / "d7" / f"f{number:05}" for number in range(7, 300, 40)]
    for path in gone:
        path.unlink()
    fill.go_on()
    node.wait_state("a", "complete", seconds=60)
    stored = trees.records(node.tree("a"), content=False)
    listed = trees.records(source, content=False)
    assert {p for p in listed if p not in stored} == set()
    # Those copied before they went are in the frozen set, those after are not: none is half there.
    extra = {p for p in stored if p not in listed}
    assert extra <= {os.fsencode(p.relative_to(source)) for p in gone}


def test_denied_files_are_listed(area: Path, node: Agent) -> None:
    # Root is refused nothing by modes; a FUSE daemon without CAP_DAC_OVERRIDE is.
    source = area / "source"
    trees.plain(source, 40)
    os.chmod(area, 0o755)
    denied = source / "d1" / "f00001"
    os.chmod(denied, 0o600)
    (source / "locked").mkdir(mode=0o700)
    (source / "locked" / "in").write_bytes(b"x")
    mounted = area / "mounted"
    mounted.mkdir()
    mount_denied(source, mounted)
    node.add_dir("a", mounted)
    node.start()
    # One is enough: whether its owner may read it in the source is not known here.
    shown = node.wait_state("a", "failed", seconds=60)
    assert shown["files"]["failed"] >= 1
    reasons = node.failures("a")
    assert {path.partition("/.")[0] for path in reasons} <= {"d1/f00001", "locked"}
    assert all("ermission denied" in why for why in reasons.values())
    assert "refuses root" in shown["why"]
    assert shown["served_by"] == "source"
    assert (node.view("a") / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()


def test_verify_keeps_copy_of_unreadable_source(area: Path, node: Agent) -> None:
    source, mounted = area / "source", area / "mounted"
    trees.plain(source, 40, directories=4)
    os.chmod(area, 0o755)
    mounted.mkdir()
    mount_denied(source, mounted)
    node.add_dir("a", mounted)
    node.start()
    node.wait_state("a", "complete")
    before = trees.records(node.view("a"))
    os.chmod(source / "d1" / "f00001", 0)
    os.chmod(source / "d2", 0)
    gone = source / "d3" / "f00003"
    moment = gone.parent.stat().st_mtime_ns
    gone.unlink()
    os.utime(gone.parent, ns=(moment, moment))
    done = node.cli("dataset", "verify", "a", "--source")
    verify = node.dataset("a")["verify"]
    assert (verify["checked_files"], verify["not_compared"]) == (40, 11), verify
    assert (verify["bad"], verify["withdrawn"]) == (1, 1), verify  # only what is known to be gone
    assert "11 not compared" in done.stdout
    assert (node.tree("a") / "d1" / "f00001").exists()
    assert "not compared 'd1/f00001'" in node.said()
    stored = trees.records(node.tree("a"))
    kept = {path: what for path, what in before.items() if path != b"d3/f00003"}
    assert {path: stored[path].digest for path in kept} == {p: r.digest for p, r in kept.items()}


def mount_denied(below: Path, target: Path) -> None:
    """A FUSE mount whose daemon has no right to pass over modes."""
    for path in (below, *below.rglob("*")):
        os.chown(path, 12345, 12345)
    subprocess.run(
        ["setpriv", "--bounding-set", "-dac_override,-dac_read_search",
         "--inh-caps", "-dac_override,-dac_read_search",
         "bindfs", "-o", "allow_other", str(below), str(target)],
        check=True, timeout=waiting.limit(30),
    )  # fmt: skip


def test_dead_fuse_source_is_reported_and_heals(area: Path, node: Agent) -> None:
    below, mounted = area / "below", area / "mounted"
    trees.plain(below, 300)
    mounted.mkdir()
    subprocess.run(["bindfs", str(below), str(mounted)], check=True, timeout=waiting.limit(30))
    fill = held.Fill(node, 30)
    node.add_dir("a", mounted)
    node.start()
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 20, 30, "some files")
    for pid in leftovers.processes(mounted):
        os.kill(pid, signal.SIGKILL)
    fill.go_on()
    node.wait_for(lambda: "died" in node.dataset("a")["why"], 60, "the cause to be told")
    assert 'cache_source_reachable{dataset="a"} 0.0' in node.get("/metrics")
    assert node.get("/healthz")["alive"]
    subprocess.run(["umount", "-l", str(mounted)], check=True, timeout=waiting.limit(30))
    subprocess.run(["bindfs", str(below), str(mounted)], check=True, timeout=waiting.limit(30))
    node.tell("a", "warm")
    node.wait_state("a", "complete", seconds=90)
    trees.assert_equal(below, node.view("a"))


def test_mount_inside_source_is_not_crossed(area: Path, node: Agent) -> None:
    """Directories and files: a name has one content in all stages, and the mount is told."""
    source, other = area / "source", area / "other"
    trees.plain(source, 20)
    trees.plain(other, 20)
    (source / "mountpoint").mkdir()
    (source / "covered").write_bytes(b"below")
    (other / "cover").write_bytes(b"above")
    for cover, place in ((other, "mountpoint"), (other / "cover", "covered")):
        subprocess.run(["mount", "--bind", str(cover), str(source / place)], check=True)
    (area / "link").symlink_to(source)
    node.add_dir("a", area / "link", warm=False)  # the mount table has the path without links
    node.start()

    def shown() -> tuple[list[str], bytes]:
        view = node.view("a")
        return os.listdir(view / "mountpoint"), (view / "covered").read_bytes()

    def told() -> bool:
        found = [f for f in node.findings() if f["rule"] == "dataset-source-mounts"]
        return bool(found) and "'covered', 'mountpoint'" in found[0]["message"]

    node.wait_served("a", "source")
    cold = shown()
    node.wait_for(told, 30, "the finding")
    assert "'covered', 'mountpoint'" in node.dataset("a")["why"]
    node.tell("a", "warm")
    node.wait_state("a", "partial")
    failures = node.failures("a")
    assert sorted(failures) == ["covered", "mountpoint"]
    assert all("another file system" in why for why in failures.values())
    assert not (node.tree("a") / "mountpoint").exists()
    assert not (node.tree("a") / "covered").exists()
    assert shown() == cold == ([], b"below")
    assert told()
    for place in ("mountpoint", "covered"):
        subprocess.run(["umount", str(source / place)], check=True)
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    assert shown() == cold
    node.wait_for(lambda: node.findings() == [], 30, "the finding to go")


def test_links_that_lead_out_are_counted_and_one_is_named(area: Path, node: Agent) -> None:
    """As a revision of a Hugging Face cache: complete, and none of its files is there."""
    source = area / "models--x" / "snapshots" / "rev"
    trees.plain(source, 5)
    for name in ("config", "model"):
        (source / name).symlink_to(f"../../blobs/{name}")
    (source / "d0" / "inside").symlink_to("../config")
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")

    def told() -> list[str]:
        rule = "dataset-links-lead-out"
        return [each["message"] for each in node.findings() if each["rule"] == rule]

    node.wait_for(told, 30, "the finding")
    assert "lead out of it: 2, as '" in told()[0]
    assert any("2 links lead out of the dataset" in note for note in node.dataset("a")["notes"])
    for name in ("config", "model"):
        (source / name).unlink()
    node.tell("a", "rescan")
    node.wait_for(lambda: not told(), 60, "the finding to go")


def reads_so_far(report: Path) -> int:
    """Of a reader; 0 while it starts."""
    counter = Path(f"{report}.reads")
    return int.from_bytes(counter.read_bytes(), "little") if counter.exists() else 0


def test_overlay_of_changing_layers_shows_right_bytes(area: Path) -> None:
    """The stress test that cache.md asks for: adds, removals, 30 % mmap reads, refreshes."""
    files = 400
    source, store, view = area / "source", area / "store", area / "view"
    trees.plain(source, files, directories=4, mean=6000)
    for number in range(4):
        (store / f"d{number}").mkdir(parents=True)
    staging = area / "staging"
    staging.mkdir()
    view.mkdir()
    tree = mounts.overlay([store, source], area)
    mounts.attach(tree, view)
    os.close(tree)
    manifest = area / "manifest.json"
    names = [f"d{n % 4}/f{n:05}" for n in range(files)]
    facts = {}
    for name in names:
        data = (source / name).read_bytes()
        facts[name] = [len(data), xxhash.xxh3_128_hexdigest(data)]
    manifest.write_text(json.dumps(facts))
    generator = random.Random(3)
    adds = removals = 0
    readers = []
    try:
        for seed in range(3):
            reader = subprocess.Popen(
                [sys.executable, "-m", "tests.testbed.reader", str(view), str(manifest),
                 str(area / f"report{seed}"), str(seed)],
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
            readers.append(reader)
        deadline = time.monotonic() + 12.0
        while (
            time.monotonic() < deadline
            or adds <= 500
            or removals <= 300
            or any(reads_so_far(area / f"report{seed}") <= 500 for seed in range(3))
        ):
            name = generator.choice(names)
            target = store / name
            if target.exists():
                target.unlink()
                removals += 1
            else:
                staged = staging / "x"
                staged.write_bytes((source / name).read_bytes())
                staged.rename(target)
                adds += 1
            if (adds + removals) % 200 == 0:
                mounts.refresh(view)
            if (adds + removals) % 1000 == 0:
                Path("/proc/sys/vm/drop_caches").write_text("2")
    finally:
        for reader in readers:
            reader.terminate()
            reader.wait(waiting.limit(30))
        mounts.detach(view)
    for seed in range(3):
        report = json.loads((area / f"report{seed}").read_text())
        with grave.wrong_bytes():
            assert (report["errors"], report["wrong"]) == (0, 0), report
        assert report["reads"] > 500
        assert report["mapped"] > report["reads"] // 5
