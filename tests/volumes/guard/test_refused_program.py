"""A kernel that does not take the program: nothing refuses a format, and the agent says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture
def unguarded(where: cell.Cell, tmp_path: Path) -> Iterator[Agent]:
    """An agent whose kernel refuses the program: its object file is one that no verifier takes."""
    source = tmp_path / "bad.c"
    source.write_text(
        "#define SEC(name) __attribute__((section(name), used))\n"
        'SEC("cgroup/dev") int nodeagent_guard(void *ctx) { return *(long *)0; }\n'
        'char LICENSE[] SEC("license") = "GPL";\n'
    )
    bad = tmp_path / "bad.o"
    blockdev.run("clang", "-O2", "-g", "-target", "bpf", "-c", str(source), "-o", str(bad))
    with cell.agent(tmp_path, where, program=bad) as made:
        yield made


def test_finding_readiness_status_and_doctor_name_it(unguarded: Agent, tmp_path: Path) -> None:
    (found,) = waiting.until(
        lambda: [
            each for each in unguarded.findings()
            if each["rule"] == "guard-not-in-force" and "does not take it" in each["message"]
        ],
        40, "the finding",
    )  # fmt: skip
    assert found["severity"] == "critical"
    assert not unguarded.get("/readyz")["ready"]
    status = unguarded.cli_json("volume", "guard", "status")
    assert not status["attached"] and "does not take it" in status["unsupported"]
    with blockdev.loop(blockdev.blank(tmp_path / "image", 16 * blockdev.MiB)) as device:
        waiting.until(lambda: unguarded.guarded(device).get("verdict"), 40, "its content")
        assert not unguarded.guarded(device)["may_be_formatted"], "nothing holds a permission"
    checked = unguarded.cli("doctor", "--json")
    assert checked.returncode == 1 and "does not take it" in checked.stdout
