"""Unix sockets by their paths."""

import urllib.parse
from pathlib import Path


def grpc_address(socket: Path) -> str:
    """The address of a socket for gRPC, which decodes the percent signs of an address."""
    return f"unix:{urllib.parse.quote(str(socket))}"
