from pathlib import Path

import pytest

from nodeagent import app, configfile


def agent_of(folder: Path, *sections: str) -> app.Agent:
    """An agent, not started, that wants a token for changes."""
    (folder / "token").write_text("s3cret\n")
    text = (
        f"admin: {{listen: '127.0.0.1:1', token_file: {folder}/token}}\n"
        f"state_dir: {folder}/state\n" + "".join(f"{section}\n" for section in sections)
    )
    (folder / "a.yaml").write_text(text)
    return app.Agent(folder / "a.yaml", configfile.load(folder / "a.yaml"))


@pytest.fixture
def agent(tmp_path: Path) -> app.Agent:
    """An agent with one room."""
    return agent_of(tmp_path, f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}")


@pytest.fixture
def whole(tmp_path: Path) -> app.Agent:
    """An agent with every room."""
    return agent_of(
        tmp_path,
        f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}",
        "volumes: {guard: {mode: 'off'}}",
        "preheat: {images: []}",
    )
