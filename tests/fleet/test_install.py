"""Who installs the command has what it needs, and who installs the agent has nothing of it."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

REPO = Path(__file__).parents[2]
ONLY_HERE = {"kubernetes", "websocket-client", "requests-oauthlib", "oauthlib", "durationpy"}


def locked(name: str) -> set[str]:
    text = (REPO / "locks" / f"{name}.txt").read_text()
    return set(re.findall(r"^([a-z0-9_.-]+)==", text, re.MULTILINE))


def test_the_agents_image_has_no_kubernetes_client() -> None:
    assert locked("runtime") & ONLY_HERE == set()
    assert locked("dev") >= ONLY_HERE


def test_the_extra_names_the_client_and_kubectl_finds_the_program() -> None:
    wanted = metadata.requires("nodeagent") or []
    assert [w for w in wanted if "kubernetes" in w and "kubectl" in w.partition(";")[2]]
    scripts = metadata.entry_points(group="console_scripts", name="kubectl-nodeagent")
    assert [each.value for each in scripts] == ["fleet.main:main"]


def test_without_the_client_it_says_what_to_install() -> None:
    """As for who installs the wheel alone."""
    code = "import sys; sys.modules['kubernetes'] = None; from fleet import main; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "status"], capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 4
    assert "install the extra: pip install 'nodeagent[kubectl]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_client_and_nothing_of_the_agent() -> None:
    code = (
        "import sys; from fleet import main; main.cli(['nodes', '--help'], standalone_mode=False);"
        "print(*{each.partition('.')[0] for each in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    rooms = {"nodeagent", "cache", "preheat", "volumes", "ceph", "kube", "linux"}
    assert loaded & (rooms | {"kubernetes", "grpc", "aiohttp"}) == set()
