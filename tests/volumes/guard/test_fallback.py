"""Where the kernel does not take the program: weaker, and said to be."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, waiting
from tests.testbed.agent import Agent
from volumes.guard import layout

pytestmark = pytest.mark.real

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


def test_status_and_findings_say_what_is_missing_and_what_is_there_instead(
    fallen: Agent,
) -> None:
    waiting.until(
        lambda: (
            "watches" in (fallen.get("/v1/volumes/guard")["fallback"] or {}).get("exec_guard", "")
        ),
        20,
        "the exec guard",
    )
    status = fallen.cli_json("volume", "guard", "status")
    assert not status["attached"] and "does not take it" in status["unsupported"]
    assert "guard-not-in-force" in {f["rule"] for f in fallen.findings()}
    assert not fallen.get("/readyz")["ready"]


def test_formatters_are_refused_by_name_and_mounting_is_not(
    where: cell.Cell, fallen: Agent, tmp_path: Path
) -> None:
    waiting.until(
        lambda: (
            "watches" in (fallen.get("/v1/volumes/guard")["fallback"] or {}).get("exec_guard", "")
        ),
        20,
        "the exec guard",
    )
    image = tmp_path / "image"
    with image.open("wb") as stream:
        stream.truncate(SIZE)
    blockdev.run("mkfs.ext4", "-q", str(image))  # a file is no guarded device
    with blockdev.loop(image) as device:
        waiting.until(
            lambda: (fallen.guarded(device).get("verdict") or {}).get("type"), 10, "its content"
        )
        before = blockdev.sha256(image)
        for words in (("mkfs.ext4", "-F", device), ("wipefs", "-a", "-f", device),
                      ("dd", "if=/dev/zero", f"of={device}", "count=1")):  # fmt: skip
            done = where.run(*words)
            assert done.returncode == 126 and "not permitted" in done.stderr
        assert where.run("mkfs.ext4", "-V").returncode == 0
        assert where.run("mount", device, str(tmp_path / "mnt")).returncode == 32  # no such folder
        assert blockdev.run("dd", f"if={device}", "of=/dev/null", "count=1").returncode == 0
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


def test_a_device_that_cannot_be_read_is_flagged_read_only_until_it_can(
    fallen: Agent, tmp_path: Path
) -> None:
    broken = [{"offset": 0, "length": SIZE, "errno": 5}]
    with blockdev.faulty_disk(tmp_path / "disk", SIZE, faults=broken) as disk:
        read_only = Path("/sys/block", disk.name, "ro")
        waiting.until(lambda: read_only.read_text().strip() == "1", 20, "the flag")
        copy = shutil.copy(shutil.which("mkfs.ext4") or "", tmp_path / "unknown-formatter")
        assert blockdev.run(str(copy), "-F", disk.device, check=False).returncode != 0
        disk.clear()
        fallen.cli_json("volume", "probe", disk.device)
    assert layout.OBJECT.exists()
