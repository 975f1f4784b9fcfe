"""Unix sockets by their paths."""

import urllib.parse
from pathlib import Path


def grpc_address(socket: Path) -> str:
    """How gRPC is told of a socket of any name. It decodes what it is told as part of a URL."""
    return f"unix:{urllib.parse.quote(str(socket))}"
