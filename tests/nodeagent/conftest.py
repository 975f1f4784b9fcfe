import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import app, configfile
from tests.testbed import busy_node, leftovers


def agent_of(folder: Path, *sections: str, socket: Path = Path("/no/such")) -> app.Agent:
    """An agent, not started."""
    text = (
        f"admin: {{socket: {socket}, metrics: '127.0.0.1:0'}}\n"
        f"state_dir: {folder}/state\n" + "".join(f"{section}\n" for section in sections)
    )
    (folder / "a.yaml").write_text(text)
    return app.Agent(folder / "a.yaml", configfile.load_or_last(folder / "a.yaml", None))


@pytest.fixture(scope="package")
def busy(run_folder: Path) -> Iterator[busy_node.BusyNode]:
    """A node in the middle of its work. BUSY_NODE=FOLDER puts it there, for pictures of it."""
    folder = Path(os.environ.get("BUSY_NODE", run_folder / "busy"))
    folder.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(busy_node.busy(folder))
            if os.environ.get("PICTURES"):  # minutes, for a line that shows something
                stack.enter_context(made.trained_on())
            yield made
    finally:
        leftovers.clear(folder)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    made = Path(tempfile.mkdtemp(prefix="nodeagent-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def agent(tmp_path: Path, short: Path) -> app.Agent:
    """An agent with one room, which counts as started: the API says what is not there."""
    cache = f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}"
    made = agent_of(tmp_path, cache, socket=short / "admin.sock")
    made.state.running[0].started = True
    return made


@pytest.fixture
def whole(tmp_path: Path, short: Path) -> app.Agent:
    """An agent with every room."""
    return agent_of(
        tmp_path,
        f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}",
        "volumes: {guard: {mode: 'off'}}",
        "preheat: {images: []}",
        socket=short / "admin.sock",
    )
