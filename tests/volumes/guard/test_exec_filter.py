"""Which commands the exec filter refuses."""

import math

import pytest

from volumes.guard import exec_filter


def test_denied_device_only_for_formatting_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_filter, "device_of", lambda tid, word, majors: (
        (254, 0) if "rbd0" in word else None))  # fmt: skip
    config = exec_filter.Config((254,))
    for words, expected in (
        (["mkfs.ext4", "-F", "/dev/rbd0"], (254, 0)),
        (["mkfs.ext4", "-V"], None),
        (["dd", "if=/dev/rbd0", "of=/tmp/x"], None),
        (["dd", "if=/tmp/x", "of=/dev/rbd0"], (254, 0)),
        (["cryptsetup", "luksOpen", "/dev/rbd0", "x"], None),
        (["cryptsetup", "-q", "luksFormat", "/dev/rbd0"], (254, 0)),
        ([], None),
    ):
        assert exec_filter.refused(1, words, config) == expected, words
    leased = exec_filter.Config((254,), leases=(exec_filter.Lease((254, 0), math.inf),))
    assert exec_filter.refused(1, ["mkfs.ext4", "/dev/rbd0"], leased) is None
    expired = exec_filter.Config((254,), leases=(exec_filter.Lease((254, 0), 0.0),))
    assert exec_filter.refused(1, ["mkfs.ext4", "/dev/rbd0"], expired) == (254, 0)
