"""Who uses a view, for people."""

import pytest

from cache.views import by_id, view


def test_who_uses_the_view_and_its_generation_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are one mount where the generation serves, and a process that uses it uses both."""
    used = {"/v/d/data": ["pid 7", "pid 9"], "/v/d/by-id/x": ["pid 7"], "/v/d/by-id/y": ["pid 8"]}
    monkeypatch.setattr(by_id, "shown", lambda _: ["x", "y"])
    monkeypatch.setattr(view, "users", used.get)
    assert by_id.all_users("/v/d/data") == ["pid 7", "pid 9", "pid 8"]
