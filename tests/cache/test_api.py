"""What requests may ask of the cache, where the answer is no."""

from typing import Any

import pytest

import kit.errors
from cache import api
from kit.room import Request


@pytest.mark.parametrize("limit", ["\u00b2", "\u0663", "0", "-1", "1 ", "", "9" * 5000, "1001"])
async def test_limit_that_is_no_number_is_refused_by_name(limit: str) -> None:
    nobody: Any = None
    assert api.MOST_FAILURES == 1000
    with pytest.raises(kit.errors.SettingsError, match="limit"):
        await api._failures(nobody, Request(path={"name": "a"}, query={"limit": limit}))
