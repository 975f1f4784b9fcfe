"""The boot unit: before every kubelet, required by it, and never stopped below it."""

import configparser
import subprocess
from pathlib import Path

UNIT = Path(__file__).parents[2] / "deploy/guard/nodeagent-guard.service"
KUBELETS = {
    *("kubelet.service", "k3s.service", "k3s-agent.service"),
    *("rke2-server.service", "rke2-agent.service"),
}


def test_every_kubelet_waits_for_the_guard_and_none_is_stopped_with_it() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.read(UNIT)
    assert set(unit["Unit"]["Before"].split()) >= KUBELETS
    assert set(unit["Install"]["RequiredBy"].split()) == KUBELETS
    # A stop or restart would stop what requires it; systemd refuses both then, also by a package's
    # scripts. A unit that has run and remains is not started again either.
    assert unit["Unit"].getboolean("RefuseManualStop")
    assert unit["Service"]["Type"] == "oneshot" and unit["Service"].getboolean("RemainAfterExit")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/nodeagent/bin/nodeagent", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
