"""``nodeagent doctor`` on this machine and on a crippled one; no agent runs."""

import json
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, containerd, ports, trees, waiting
from tests.testbed.agent import COMMAND, Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def doctor(node: Agent, *within: str) -> dict[str, dict[str, Any]]:
    """Each check by its name."""
    node.write()
    done = subprocess.run(
        [*within, COMMAND, "--config", str(node.config), "doctor", "--json"],
        capture_output=True, text=True, timeout=waiting.limit(120), check=False,
        env=node.environment,
    )  # fmt: skip
    return checked(done)


def checked(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Each check by its name; the exit code says whether something wanted is missing."""
    found = json.loads(done.stdout)
    missing = any(each["wanted"] and not each["well"] for each in found)
    assert done.returncode == int(missing), done.stdout + done.stderr
    return {f"{each['room']} {each['name']}": each for each in found}


def lacking(found: dict[str, dict[str, Any]]) -> set[str]:
    """What is wanted and missing. The clock of a test machine may be anything."""
    return {n for n, each in found.items() if each["wanted"] and not each["well"]} - {"agent clock"}


def test_machine_that_has_all(area: Path, node: Agent, tmp_path: Path) -> None:
    trees.plain(area / "source", 3)
    node.add_dir("a", area / "source")
    daemon = containerd.Containerd(tmp_path / "containerd", "trixie")
    with cell.cell(tmp_path) as where:
        try:
            daemon.start()
            node.settings["preheat"] = {"socket": str(daemon.socket)}
            node.settings["volumes"] = {
                "guard": {"cgroup": str(where.path), "pins": str(where.pins)}
            }
            node.write()
            shown = node.cli("doctor")
            assert "\nok " in shown.stdout
            found = doctor(node)
        finally:
            daemon.remove()
        assert lacking(found) == set()
        assert "containerd 1.7" in found["preheat container runtime"]["said"]
        assert "nodeagent_guard" in found["volumes bpf"]["said"]
        assert not where.guard().read().attached, "nothing is attached by looking"
    assert not node.store.exists()
    assert not node.state.exists()
    assert not node.views.exists()


def test_crippled_machine(area: Path, node: Agent) -> None:
    """No libbpf, no socket, private propagation, no source, no monitor, no key, no SSD."""
    library = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libc.so" in line
    ).with_name("libbpf.so.1")
    (area / "empty").write_bytes(b"")
    port = ports.free(1)[0]
    node.add_dir("a", area / "nowhere")
    node.cache["disk"] = str(area / "ssd")
    node.cache["datasets"].append(
        {
            "name": "b", "freshness": "snapshot",
            "source": {
                "kind": "cephfs", "monitors": [f"127.0.0.1:{port}"], "snapshot": "v1",
                "secret_file": str(area / "no.secret"),
            },
        }
    )  # fmt: skip
    node.settings["preheat"] = {"socket": str(area / "no.sock")}
    node.settings["volumes"] = {}
    hide = f"mount --bind {shlex.quote(str(area / 'empty'))} {library}"
    apart = ("unshare", "--mount", "--propagation", "private", str(blockdev.APART), str(area), "--")
    within = (*apart, "sh", "-c", f'{hide} && exec "$@"', "sh")
    found = doctor(node, *within)
    assert lacking(found) == {
        "volumes bpf", "cache ssd", "cache propagation", "cache source a", "cache key b",
        "cache ceph b", "preheat container runtime",
    }  # fmt: skip
    for name in lacking(found):
        assert found[name]["cost"], name
        assert found[name]["remedy"], name
    assert "libbpf" in found["volumes bpf"]["said"]
    assert "Bidirectional" in found["cache propagation"]["remedy"]
    assert str(area / "no.sock") in found["preheat container runtime"]["said"]
    # What the settings leave out is looked at, too, but nobody misses it.
    del node.settings["preheat"], node.settings["volumes"], node.settings["cache"]
    found = doctor(node, *within)
    assert not found["volumes bpf"]["well"]
    assert lacking(found) == set()


def test_check_that_hangs_is_left_behind(area: Path, node: Agent) -> None:
    """A socket that accepts and never answers."""
    node.settings["preheat"] = {"socket": str(area / "h.sock")}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/cwd/{area.relative_to(Path.cwd()) / 'h.sock'}")
        listening.listen()
        found = doctor(node)
    assert "preheat container runtime" in lacking(found)
    assert "preheat container runtime" not in lacking(doctor_of_defaults(node))


def doctor_of_defaults(node: Agent) -> dict[str, dict[str, Any]]:
    """Without a settings file no room is wanted."""
    node.config.unlink()
    found = checked(node.cli("doctor", "--json"))
    assert not found["agent settings"]["well"]
    return found
