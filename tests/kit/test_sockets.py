"""gRPC finds a socket of any name."""

from pathlib import Path

import grpc.aio
import pytest

from kit import files


@pytest.mark.parametrize("name", ["plain", "two words", "a%20b", "a#b?c", "ü"])
async def test_socket_has_the_name_that_was_asked_for(tmp_path: Path, name: str) -> None:
    server = grpc.aio.server()
    server.add_insecure_port(files.grpc_address(tmp_path / name))
    await server.start()
    try:
        assert [each.name for each in tmp_path.iterdir()] == [name]
    finally:
        await server.stop(None)
