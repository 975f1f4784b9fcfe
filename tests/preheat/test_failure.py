"""Classes of failures and their waits."""

import pytest

from preheat import failure
from preheat.runtimes import base


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("write /x: no space left on device", "UNKNOWN", "disk"),
        ("unexpected commit digest sha256:1, expected sha256:2", "UNKNOWN", "corrupt"),
        ("failed size validation: 5 != 10: failed precondition", "UNKNOWN", "corrupt"),
        ("unexpected status code 401 Unauthorized", "UNKNOWN", "auth"),
        ("pull access denied, repository does not exist", "UNKNOWN", "auth"),
        ("failed to resolve reference: not found", "NOT_FOUND", "not_found"),
        ("dial tcp: connection refused", "UNKNOWN", "network"),
        ("unexpected EOF", "UNKNOWN", "network"),
        ("no match for platform in manifest", "NOT_FOUND", "not_found"),
        ("lease does not exist: not found", "NOT_FOUND", "runtime"),
        ("something nobody has seen", "UNKNOWN", "network"),
    ],
)
def test_classify_knows_the_runtimes_words(text: str, code: str, kind: str) -> None:
    found = failure.classify("r", base.RuntimeCallError("runtime", text, "", code))
    assert found.kind == kind


def test_classify_tells_gone_from_slow() -> None:
    gone = base.RuntimeGoneError("runtime", "no space left", "")
    slow = base.RuntimeSlowError("runtime", "no space left", "")
    assert failure.classify("r", gone).kind == "runtime"
    assert failure.classify("r", slow).kind == "network"


def test_waits_double_up_to_their_limit() -> None:
    error = failure.PullError("r", failure.Kind.NETWORK, "x")
    waits = [failure.after(error, n, 0.0).retry_at or 0 for n in range(1, 40)]
    assert 0.75 <= waits[0] <= 1.25
    assert 3.0 <= waits[2] <= 5.0
    assert 300 * 0.75 <= waits[-1] <= max(waits) <= 300 * 1.25


def test_waits_obey_the_registry() -> None:
    asked = failure.PullError("r", failure.Kind.NETWORK, "x", wait=900.0)
    assert failure.after(asked, 1, 0.0).retry_at == 900.0


def test_bad_images_are_not_retried() -> None:
    assert failure.after(failure.PullError("r", failure.Kind.BAD_IMAGE, "x"), 1, 0).retry_at is None
