"""The verdict as a value; real devices are probed in test_prober.py."""

from kit import messages
from volumes.probe.examine import Kind, Verdict


def test_verdict_is_shown_with_its_error() -> None:
    verdict = Verdict(Kind.UNREADABLE, "/dev/rbd0", where="offset 0", errno=5, content_at=4096)
    assert messages.decode(messages.encode(verdict), Verdict) == verdict
    assert verdict.as_json()["verdict"] == "unreadable"
    assert str(verdict) == "unreadable (offset 0: EIO, Input/output error)"
