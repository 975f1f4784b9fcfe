"""What an agent at rest and its children load: it stays in memory as long as they run, on every
node. 'make bench' measures how much it is (cache: rest)."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import nodeagent
from tests.testbed import waiting

PRODUCT = Path(nodeagent.__file__).parents[1]
ROOMS = ("nodeagent", "cache", "volumes", "preheat", "kube", "ceph", "linux", "kit")

# Loads what 'nodeagent run' loads for a file, and starts nothing.
AGENT = """
import contextlib, os, sys
from pathlib import Path
import kit.errors
from nodeagent import main
os.geteuid = lambda: 1000
with contextlib.suppress(kit.errors.HostError):
    main.cli(["--config", {file!r}, "run"], standalone_mode=False)
from nodeagent import app, configfile
from nodeagent.api import own, server
from tests.nodeagent import served
file = Path({file!r})
agent = app.Agent(file, configfile.load_or_last(file, None))
server.application(agent.state, served.door(agent.state))
print(*sys.modules)
"""
OF_THE_AGENT = {"aiohttp", "asyncio", "pydantic", "ssl", "structlog"}
FOR_PEOPLE = {"rich", "pygments"}
OF_CHILDREN = {"rados", "rbd", "cephfs", "pynvml"}
OF_IMAGES = {"grpc", "google.protobuf", "diskcache", "preheat.component", "preheat.planning"}
OF_VOLUMES = {"volumes.component", "volumes.audit", "volumes.guard"}
OF_DATASETS = {"cache.component", "cache.dataset", "cache.fill"}
OF_CSI = {"cache.csi.server"}
CACHE = "cache: {{store: {0}/store, views: {0}/views}}"


def printed(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=waiting.limit(60),
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("section", "loaded", "absent"),
    [
        (CACHE, OF_DATASETS, OF_IMAGES | OF_VOLUMES | OF_CSI),
        ("volumes: {{}}", OF_VOLUMES, OF_IMAGES | OF_DATASETS),
        ("preheat: {{}}", OF_IMAGES, OF_VOLUMES | OF_DATASETS),
    ],
    ids=["cache", "volumes", "preheat"],
)
def test_agent_loads_nothing_of_rooms_that_are_off_and_nothing_that_children_do(
    section: str, loaded: set[str], absent: set[str], tmp_path: Path
) -> None:
    """Images alone are 12 MiB, volumes 5, rich 4."""
    file = tmp_path / "a.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\n{section.format(tmp_path)}\n")
    modules = printed(AGENT.format(file=str(file)))
    assert {"aiohttp.web", "nodeagent.app", *loaded} <= modules
    assert modules & (absent | FOR_PEOPLE | OF_CHILDREN) == set()


@pytest.mark.parametrize(
    "module",
    ["cache.store.probe", "linux.nvml", "volumes.guard.hold", "volumes.probe.examine"],
)
def test_children_that_wait_at_rest_load_no_event_loop(module: str) -> None:
    """What the agent needs to ask them is 4 MiB for each, and its own libraries 20 MiB more."""
    modules = printed(f"import sys, {module}; print(*sys.modules)")
    assert module in modules
    assert modules & OF_THE_AGENT == set()


def called() -> set[str]:
    """The modules of the functions that the product gives ``kit.child.call`` by their names, and of
    one that is given in a variable."""
    found = {"cache.views.users"}
    for file in (path for room in ROOMS for path in (PRODUCT / room).rglob("*.py")):
        text = file.read_text()
        if "child.call(" not in text and file != PRODUCT / "kit/child.py":
            continue
        names = vars(importlib.import_module(".".join(file.relative_to(PRODUCT).parts)[:-3]))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kit.child.call", "call"):
                first, *rest = ast.unparse(node.args[0]).split(".")
                function = names.get(first)
                for each in rest:
                    function = getattr(function, each, None)
                if inspect.isfunction(function):  # else it is in a variable
                    found.add(function.__module__)
    return found


def test_calls_load_nothing_that_only_the_agent_needs() -> None:
    """The process that they fork from keeps it as long as the agent runs: up to 26 MiB."""
    targets = sorted(called())
    assert len(targets) > 20
    code = (
        "import importlib, sys\n"
        f"for name in {targets}:\n"
        "    importlib.import_module(name)\n"
        f"    for each in {OF_THE_AGENT} & sys.modules.keys():\n"
        "        print(f'{name}:{each}')\n"
    )
    assert printed(code) == set()
