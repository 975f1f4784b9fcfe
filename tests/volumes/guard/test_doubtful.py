"""Which devices the fallback flags read-only. On a healthy one the flag itself is the harm."""

import pytest

from linux import blockdev
from volumes.guard.doubt import Doubt
from volumes.guard.fallback import is_doubtful
from volumes.guard.steps import Known
from volumes.probe.examine import Kind, Verdict

DEVICE = blockdev.BlockDevice("rbd9", (254, 9), "rbd", 2**30, False)
ONE, TWO = Doubt(1, 1.0), Doubt(2, 9.0)


@pytest.mark.parametrize(
    ("kind", "doubt", "raw", "doubtful"),
    [
        (Kind.TIMEOUT, ONE, False, False),  # merely slow
        (Kind.UNREADABLE, ONE, False, False),
        (Kind.TIMEOUT, TWO, False, True),
        (Kind.UNREADABLE, TWO, False, True),
        (Kind.TIMEOUT, TWO, True, False),  # a pod has a right to write to it
        (Kind.UNKNOWN_CONTENT, Doubt(), True, False),
        (Kind.UNKNOWN_CONTENT, Doubt(), False, True),
        (Kind.NO_MEDIA, TWO, False, False),
        (Kind.BLANK_VERIFIED, Doubt(), False, False),
        (Kind.HAS_FS, Doubt(), False, False),
    ],
)
def test_only_what_two_looks_agree_on_and_nobody_may_write_to(
    kind: Kind, doubt: Doubt, raw: bool, doubtful: bool
) -> None:
    assert is_doubtful(Known(DEVICE, Verdict(kind), doubt=doubt, raw=raw)) is doubtful


def test_a_device_that_was_not_looked_at_is_left_alone() -> None:
    assert not is_doubtful(Known(DEVICE))
