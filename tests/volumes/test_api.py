"""What the admin API says while the room starts, and who called by its records."""

from types import SimpleNamespace
from typing import Any

import pytest

import kit.errors
from kit.room import Request
from volumes import api

GUARD, MODE = (next(r.handler for r in api.ROUTES if r.path == path)
               for path in ("/v1/volumes/guard", "/v1/volumes/guard/mode"))  # fmt: skip


async def test_an_agent_that_has_not_looked_does_not_say_that_nothing_is_attached() -> None:
    starting = SimpleNamespace(guard=SimpleNamespace(in_force=SimpleNamespace(looked=False)))
    with pytest.raises(kit.errors.DegradedError, match="has not looked at the kernel yet"):
        await GUARD(starting, Request())


@pytest.mark.parametrize(
    ("caller", "said", "by"),
    [
        ("alice at 10.0.0.1", "bob", "alice at 10.0.0.1 (says bob)"),
        ("root, pid 7", "", "root, pid 7"),
        ("", "bob", "bob"),  # no door: the command on the host itself
    ],
)
async def test_records_say_who_called(caller: str, said: str, by: str) -> None:
    noted: list[Any] = []

    async def set_mode(*words: str) -> dict[str, Any]:
        noted.append(words)
        return {}

    body = {"mode": "off", "by": said, "reason": "r"}
    await MODE(SimpleNamespace(set_mode=set_mode), Request({}, {}, body, caller))
    assert noted == [("off", by, "r")]
