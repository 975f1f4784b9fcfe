"""Where the kernel does not take the program: weaker, and said to be."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, faultfs, grave, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SIZE = 320 * blockdev.MiB


@pytest.fixture(scope="module")
def fallen(where: cell.Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent whose kernel refuses the program: its object file is one that no verifier takes."""
    folder = tmp_path_factory.mktemp("fallen")
    source = folder / "bad.c"
    source.write_text(
        "#define SEC(name) __attribute__((section(name), used))\n"
        'SEC("cgroup/dev") int nodeagent_guard(void *ctx) { return *(long *)0; }\n'
        'SEC("cgroup/dev") int nodeagent_plain(void *ctx) { return *(long *)0; }\n'
        'char LICENSE[] SEC("license") = "GPL";\n'
    )
    bad = folder / "bad.o"
    blockdev.run("clang", "-O2", "-g", "-target", "bpf", "-c", str(source), "-o", str(bad))
    with cell.agent(folder, where, object_file=str(bad)) as made:
        yield made


def undecided(agent: Agent) -> int:
    """Formatters that were let through, because the machine stood still for too long."""
    return int(agent.get("/v1/volumes/guard")["fallback"]["let_through_undecided"])


def assert_refused(where: cell.Cell, agent: Agent, device: str, image: Path, *words: str) -> None:
    """The filter decides within a second. A pause of the machine that is longer is not its fault:
    what was let through undecided is undone and tried again."""
    kept = image.with_name("kept")
    blockdev.run("cp", "--sparse=always", str(image), str(kept))
    for _ in range(3):
        before = undecided(agent)
        done = where.run(*words)
        if done.returncode == 126:
            assert "not permitted" in done.stderr
            return
        with grave.missing_denial():
            waiting.until(lambda n=before: undecided(agent) > n, 5, f"{words} to be refused")  # type: ignore[misc]
        blockdev.run("dd", f"if={kept}", f"of={image}", "bs=1M", "conv=notrunc")
        blockdev.run("blockdev", "--flushbufs", device)
    raise AssertionError(f"the filter never decided about {words}")


def test_status_names_missing_program_and_fallback(
    fallen: Agent,
) -> None:
    waiting.until(
        lambda: (
            "watches" in (fallen.get("/v1/volumes/guard")["fallback"] or {}).get("exec_guard", "")
        ),
        40,
        "the exec guard",
    )
    status = fallen.cli_json("volume", "guard", "status")
    assert not status["attached"] and "does not take it" in status["unsupported"]
    assert "guard-not-in-force" in {f["rule"] for f in fallen.findings()}
    assert not fallen.get("/readyz")["ready"]


def test_exec_filter_refuses_formatters_by_name(
    where: cell.Cell, fallen: Agent, tmp_path: Path
) -> None:
    waiting.until(
        lambda: (
            "watches" in (fallen.get("/v1/volumes/guard")["fallback"] or {}).get("exec_guard", "")
        ),
        40,
        "the exec guard",
    )
    image = blockdev.blank(tmp_path / "image", SIZE)
    blockdev.run("mkfs.ext4", "-q", str(image))  # a file is no guarded device
    with blockdev.loop(image) as device:
        waiting.until(
            lambda: (fallen.guarded(device).get("verdict") or {}).get("type"), 10, "its content"
        )
        before = blockdev.sha256(image)
        for words in (("mkfs.ext4", "-F", device), ("wipefs", "-a", "-f", device),
                      ("dd", "if=/dev/zero", f"of={device}", "count=1")):  # fmt: skip
            assert_refused(where, fallen, device, image, *words)
        assert where.run("mkfs.ext4", "-V").returncode == 0
        assert where.run("mount", device, str(tmp_path / "mnt")).returncode == 32  # no such folder
        assert blockdev.run("dd", f"if={device}", "of=/dev/null", "count=1").returncode == 0
        with grave.wrong_bytes():
            assert blockdev.sha256(image) == before
        (tmp_path / "mnt").mkdir()
        assert where.run("mount", device, str(tmp_path / "mnt")).returncode == 0
        assert where.run("umount", str(tmp_path / "mnt")).returncode == 0
        assert blockdev.run("mkfs.ext4", "-n", "-F", device).returncode == 0  # outside the cell
        waiting.until(
            lambda: [
                f
                for f in fallen.findings()
                if f["rule"] == "format-denied" and str(tmp_path) in f["subject"]
            ],
            10,
            "the finding",
        )


def test_unreadable_device_is_read_only_until_readable(
    where: cell.Cell, fallen: Agent, tmp_path: Path
) -> None:
    """Reads fail, writes would not: only the flag keeps a writer of unknown name out."""
    unknown = str(shutil.copy(shutil.which("dd") or "", tmp_path / "unknown-formatter"))
    broken = [{"offset": 0, "length": SIZE, "errno": 5}]
    with blockdev.faulty_disk(tmp_path / "disk", SIZE, faults=broken) as disk:
        write = (unknown, "if=/dev/zero", f"of={disk.device}", "bs=1M", "count=1", "oflag=direct")
        read_only = Path("/sys/block", disk.name, "ro")
        waiting.until(lambda: read_only.read_text().strip() == "1", 60, "the flag")
        done = blockdev.run(*write, check=False)
        assert done.returncode != 0
        assert "not permitted" in done.stderr or "denied" in done.stderr, done.stderr
        disk.clear()
        where.run("mkfs.ext4", "-q", "-F", disk.device)  # refused; the device is examined again
        waiting.until(lambda: read_only.read_text().strip() == "0", 60, "the flag to go")
        assert blockdev.run(*write, check=False).returncode == 0


def test_exec_filter_allows_what_it_cannot_decide_in_time(
    where: cell.Cell, fallen: Agent, tmp_path: Path
) -> None:
    """An argument on a file system that does not answer: the node's formatters must not wait."""
    (tmp_path / "fuse").mkdir()
    (tmp_path / "control").write_text("[]")
    blockdev.blank(tmp_path / "backing", SIZE)
    server = subprocess.Popen(
        [sys.executable, faultfs.__file__, str(tmp_path / "fuse"), str(tmp_path / "backing"),
         str(tmp_path / "control")], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    try:
        server.send_signal(signal.SIGSTOP)
        hanging = tmp_path / "fuse" / "disk"
        assert where.run("mkfs.ext4", "-V", str(hanging), timeout=waiting.limit(30)).returncode == 0
        waiting.until(lambda: undecided(fallen) >= 1, 10, "it to be told")
        image = blockdev.blank(tmp_path / "image", SIZE)
        with blockdev.loop(image) as device:
            blockdev.run("mkfs.ext4", "-q", str(image))
            assert_refused(where, fallen, device, image, "mkfs.ext4", "-F", device)  # again
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        blockdev.run("umount", "-l", str(tmp_path / "fuse"), check=False)


def test_flags_survive_the_agent_and_are_taken_back(
    where: cell.Cell, fallen: Agent, tmp_path: Path
) -> None:
    broken = [{"offset": 0, "length": SIZE, "errno": 5}]
    with blockdev.faulty_disk(tmp_path / "disk", SIZE, faults=broken) as disk:
        read_only = Path("/sys/block", disk.name, "ro")
        waiting.until(lambda: read_only.read_text().strip() == "1", 60, "the flag")
        fallen.kill()
        assert read_only.read_text().strip() == "1"
        disk.clear()
        fallen.start()
        waiting.until(lambda: read_only.read_text().strip() == "0", 60, "the flag to go")
