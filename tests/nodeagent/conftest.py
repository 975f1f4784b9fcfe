import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import app, configfile


def agent_of(folder: Path, *sections: str, socket: Path = Path("/no/such")) -> app.Agent:
    """An agent, not started."""
    text = (
        f"admin: {{socket: {socket}, metrics: '127.0.0.1:0'}}\n"
        f"state_dir: {folder}/state\n" + "".join(f"{section}\n" for section in sections)
    )
    (folder / "a.yaml").write_text(text)
    return app.Agent(folder / "a.yaml", configfile.load(folder / "a.yaml"))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    made = Path(tempfile.mkdtemp(prefix="nodeagent-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def agent(tmp_path: Path, short: Path) -> app.Agent:
    """An agent with one room."""
    cache = f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}"
    return agent_of(tmp_path, cache, socket=short / "admin.sock")


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
