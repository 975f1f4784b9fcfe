"""Whether a cluster can be reached from this node, and with which key."""

import asyncio
from pathlib import Path

import kit.errors
from ceph import monitors, secrets


def key(secret_file: str, user: str) -> str:
    """SourceError when the file holds no key of the user."""
    secrets.read(Path(secret_file), user, f"key of client.{user}")
    return f"{secret_file} has a key for client.{user}"


def reach(given: list[str]) -> str:
    """SourceError when no monitor answers."""
    found = asyncio.run(monitors.resolve(given))
    if not found:
        raise kit.errors.SourceError(
            f"monitors {', '.join(given)}", "none answers", "check the addresses and the network"
        )
    return f"a monitor of {', '.join(map(str, found))} answers"
