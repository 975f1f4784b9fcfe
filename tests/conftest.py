"""Fixtures of the suite: a folder on the real disk for each run, one cluster for a session.

Real tests that tests/gate.txt names have the mark ``gate``; scripts/test.py runs the two sets.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist import workermanage

from tests.testbed import patience

TESTS = Path(__file__).parent
patience.ensure(TESTS.parent / "build")  # first: what is imported next has limits as constants
# A child of a process that has used gRPC starts gRPC's threads anew, and is aborted when it closes
# what it inherited. Tests fork the workers of a fill beside channels of other tests. The agent's
# fork server has used none.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from tests.testbed import (  # noqa: E402
    agent,
    bigset,
    ceph,
    examples,
    gate,
    kept,
    kubernetes,
    leftovers,
    long_ids,
    machine,
    origins,
    starts,
    waiting,
)

pytest_plugins = ("tests.testbed.judging",)

INTERNAL_ERRORS = TESTS.parent / "build" / "report" / "internal-errors"
STARTS = starts.watch()
STRANGERS = TESTS.parent / "build" / "report" / "strangers.txt"

examples.load_profile()
workermanage.NodeManager.EXIT_TIMEOUT = 120  # after Ctrl-C a worker ends clusters and kubelets


# Groups that take longest are started first, so that both workers end at about the same time.
_FIRST = ("cluster", "host", "guest", "preheat")
_NODES = {"kube", "newer", "busy"}  # fixtures


def _group(item: pytest.Item) -> str:
    """Tests of one group run one after the other, in one worker; "": anywhere.

    "host": what looks at the whole host or changes it (mount namespaces, loop devices, the kernel's
    log). "cluster": what shares the session's Ceph, so that it is started once. Others stay with
    their module, whose fixtures they share, and image tests with their registry.
    """
    if item.get_closest_marker("real") is None:
        return ""
    if item.get_closest_marker("guest"):
        return "guest"
    room = item.path.relative_to(TESTS).parts[0]
    needs = _needs(item)
    if needs & _NODES:
        return "host"
    if "cluster" in needs:
        return "cluster"
    if room in ("volumes", "linux"):
        return "host"
    return room if room in ("preheat", "kube") else str(item.path.relative_to(TESTS))


def _shared(item: pytest.Item) -> int:
    """In one group: what needs the least of the session comes first, the kubelet last."""
    needs = _needs(item)
    return 2 if needs & _NODES else 1 if "cluster" in needs else 0


def _needs(item: pytest.Item) -> set[str]:
    """Its fixtures, and those that are named by its parameters."""
    callspec = getattr(item, "callspec", None)
    chosen = () if callspec is None else callspec.params.values()
    return {
        *getattr(item, "fixturenames", ()),
        *(each for each in chosen if isinstance(each, str) and each in _NODES),
    }


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    if (seed := examples.seed()) is not None and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of modules that are real as a whole a run of unit tests reads only the mark."""
    if config.option.markexpr != gate.UNIT or not collection_path.name.startswith("test_"):
        return None
    return True if gate.is_real_whole(collection_path.read_text()) else None


def pytest_make_parametrize_id(val: object) -> str | None:
    return long_ids.name(val)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # a registry's program is a real part, which only the full set-up brings
        if "images" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real") and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "one_run")  # before what a session starts
    gate.mark(config, items)
    for item in items:
        marked = item.get_closest_marker("timeout")
        limit = float(marked.args[0]) if marked else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(waiting.limit(limit)), append=False)
    if not config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=_shared)
        return
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    order = {group: rank for rank, group in enumerate(_FIRST)} | {"": len(_FIRST) + 1}
    items.sort(key=lambda item: (order.get(groups[item], len(_FIRST)), _shared(item)))


def pytest_collection_finish() -> None:
    """What was read stays to the end: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(STARTS, ignore_errors=True)  # also after a run that only collects


@pytest.hookimpl(tryfirst=True)  # sending it to the main process may break, too
def pytest_internalerror(excrepr: object) -> None:
    """Keep what broke a worker: the main process says only that the worker has ended early."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    INTERNAL_ERRORS.mkdir(parents=True, exist_ok=True)
    (INTERNAL_ERRORS / str(os.getpid())).write_text(f"{excrepr}\n", errors="backslashreplace")


@pytest.fixture(scope="session", autouse=True)
def fresh_machine() -> Iterator[None]:
    """Nothing was started or loaded that a fresh machine does not have after set-up.

    ``make test-fresh`` judges it, on a machine that has nothing else. Elsewhere scripts/test.py
    shows it as a warning: what another machine has installed is not known here.
    """
    yield
    lacking = origins.complaints(starts.found(STARTS), origins.listed())
    if os.environ.get("NODEAGENT_TEST_FRESH"):
        assert not lacking, "\n".join(lacking)
    elif lacking:
        STRANGERS.parent.mkdir(parents=True, exist_ok=True)
        with STRANGERS.open("a") as out:
            out.writelines(f"{line}\n" for line in lacking)


@pytest.fixture(scope="session")
def one_run(pytestconfig: pytest.Config) -> Iterator[None]:
    """The machine, for real tests only: ``pytest_collection_modifyitems`` gives it to them. Here
    and not only in scripts/test.py, so that who runs one test by hand waits, too."""
    capture: Any = pytestconfig.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():  # who waits must see why
            machine.tell(f"\n{text}")

    with machine.held(say=say):
        yield


@pytest.fixture(scope="session")
def run_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """build/test-<id>; gone at the end, with all that lives below it."""
    with leftovers.run_folder(TESTS.parent / "build") as folder:
        request.config.stash[kept.RUN_FOLDER] = folder
        yield folder


@pytest.fixture
def area(run_folder: Path) -> Iterator[Path]:
    """A folder for one test on the real disk; processes, mounts and files go with the test."""
    number = len(list(run_folder.iterdir()))
    folder = run_folder / f"a{number}-{os.urandom(2).hex()}"
    folder.mkdir(mode=0o755)
    try:
        yield folder
    finally:
        leftovers.clear(folder)


@pytest.fixture
def node(area: Path) -> Iterator[agent.Agent]:
    """An agent with folders of its own, not started."""
    made = agent.Agent(area / "node")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def cluster(run_folder: Path) -> Iterator[ceph.CephCluster]:
    """The session's Ceph: started when the first test asks for it."""
    with ceph.running(run_folder / "ceph") as made:
        yield made


@pytest.fixture(scope="session")
def kube(run_folder: Path) -> Iterator[kubernetes.Kubernetes]:
    """The session's Kubernetes with one node: started when the first test asks for it."""
    made = kubernetes.Kubernetes(run_folder / "kube")
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def big(run_folder: Path, cluster: ceph.CephCluster) -> bigset.BigSet:
    """Thousands of files on the session's CephFS, and what each of them must be."""
    made = bigset.BigSet(run_folder)
    made.make(cluster)
    return made
