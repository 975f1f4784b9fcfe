"""Host names and rates."""

import pytest

from nodeagent.api import access


@pytest.mark.parametrize(
    ("listen", "header", "admitted"),
    [
        ("10.0.0.1", "10.0.0.1:9471", True),
        ("10.0.0.1", "NODE.example", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "localhost", False),
        ("10.0.0.1", "", False),
        ("10.0.0.1", "evil.example:9471", False),
        ("0.0.0.0", "10.0.0.2:1", True),
        ("0.0.0.0", "[fd00::1]:1", True),
        ("0.0.0.0", "evil.example", False),
        ("::1", "[::1]:9470", True),
        ("127.0.0.1", "localhost:9470", True),
        ("127.0.0.1", "127.0.0.1@evil.example", False),
    ],
)
def test_hosts(listen: str, header: str, admitted: bool) -> None:
    assert access.Hosts(listen, ["node.example"]).admits(header) is admitted


def test_rate_gives_a_burst_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rate = access.Rate(2.0, 3)
    assert [rate.admits("a") for _ in range(4)] == [True, True, True, False]
    assert rate.admits("b")
    now = 0.6
    assert [rate.admits("a") for _ in range(2)] == [True, False]
    now = 100.0
    assert [rate.admits("a") for _ in range(4)] == [True, True, True, False]
