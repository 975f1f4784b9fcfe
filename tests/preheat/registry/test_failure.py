"""Classes of failures and their waits."""

import pytest

from preheat.registry import failure
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
        ("failed to copy: httpReadSeeker: 429 Too Many Requests", "UNKNOWN", "busy"),
        ("toomanyrequests: You have reached your pull rate limit", "UNKNOWN", "busy"),
        ("blob sha256:0429040104 is cut off: unexpected EOF", "UNKNOWN", "network"),
        ("number of layers and diffIDs don't match: 1 != 2", "UNKNOWN", "bad_image"),
        ("mismatched image rootfs and manifest layers", "UNKNOWN", "bad_image"),
        ('wrong diff id calculated on extraction "sha256:1"', "UNKNOWN", "bad_image"),
        ("unmarshal image config: unexpected end of JSON input", "UNKNOWN", "bad_image"),
        ("failed to extract layer x: archive/tar: invalid tar header", "UNKNOWN", "bad_image"),
        ("something nobody has seen", "UNKNOWN", "network"),
    ],
)
def test_classify_knows_the_runtimes_words(text: str, code: str, kind: str) -> None:
    found = failure.classify("r", base.RuntimeCallError("runtime", text, "", code))
    assert found.kind == kind


def test_classify_tells_gone_from_slow() -> None:
    gone = base.RuntimeGoneError("runtime", "no space left", "")
    slow = base.RuntimeSlowError("container runtime (PullImage)", "no space left", "")
    busy = base.RuntimeSlowError("container runtime (Write)", "no answer in 30 s", "")
    assert failure.classify("r", gone).kind == "runtime"
    assert failure.classify("r", slow).kind == "network"
    assert failure.classify("r", busy).kind == "runtime"
    assert "no answer in 30 s" in str(failure.classify("r", busy))


def test_waits_double_up_to_their_limit() -> None:
    error = failure.PullError("r", failure.Kind.NETWORK, "x")
    waits = [failure.after(error, n, 0.0).retry_at or 0 for n in range(1, 40)]
    assert 1.0 <= waits[0] <= 3.0
    assert 4.0 <= waits[2] <= 12.0
    assert 300 * 0.5 <= waits[-1] <= max(waits) <= 300 * 1.5


def test_waits_obey_the_registry_and_differ() -> None:
    asked = failure.PullError("r", failure.Kind.NETWORK, "x", wait=900.0)
    waits = {failure.after(asked, 1, 0.0).retry_at or 0 for _ in range(20)}
    assert 900.0 <= min(waits) < max(waits) <= 900.0 * 1.5


def test_pull_that_met_a_limit_does_not_come_back_at_once() -> None:
    refused = base.RuntimeCallError("runtime", "unexpected status: 429 Too Many Requests", "")
    waits = [
        failure.after(failure.classify("r", refused), n, 0.0, jitter=lambda: 0.5).retry_at
        for n in (1, 2, 3, 20)
    ]
    assert waits == [30.0, 60.0, 120.0, 1800.0]


def test_bad_images_are_asked_for_again_slowly_and_wrong_platforms_are_not() -> None:
    """What answered in place of the registry may be mended."""
    bad = failure.PullError("r", failure.Kind.BAD_IMAGE, "x")
    assert [failure.after(bad, n, 0, jitter=lambda: 0.5).retry_at for n in (1, 9)] == [300, 3600]
    final = failure.PullError("r", failure.Kind.BAD_IMAGE, "x", final=True)
    assert failure.after(final, 1, 0).retry_at is None


def test_every_class_waits_and_says_what_to_do() -> None:
    for kind in failure.Kind:
        error = failure.PullError("r", kind, "x")
        waits = [failure.after(error, n, 0, jitter=lambda: 0.5).retry_at or 0 for n in (1, 20)]
        assert 0 < waits[0] < waits[1], kind
        assert error.remedy, kind


@pytest.mark.parametrize(
    ("kind", "pulled", "here", "spoils"),
    [
        ("corrupt", "sha256:a", "sha256:a", True),
        ("corrupt", "", "sha256:a", True),  # pulled without a lookup
        ("corrupt", "sha256:a", "sha256:b", False),
        ("network", "sha256:a", "sha256:a", False),
        ("not_found", "", "sha256:a", False),  # it may have been imported since
    ],
)
def test_image_whose_pull_failed_is_not_there(
    kind: str, pulled: str, here: str, spoils: bool
) -> None:
    failed = failure.PullFailure(failure.Kind(kind), "x", 1, None, digest=pulled)
    assert failed.spoils(here) is spoils


@pytest.mark.parametrize(
    ("kind", "digest", "concerns"),
    [
        ("not_found", "sha256:b", False),  # the tag names another image now
        ("corrupt", "sha256:b", False),
        ("bad_image", "sha256:b", False),
        ("bad_image", "sha256:a", True),
        ("not_found", "", True),  # nobody knows what it names now
        ("network", "sha256:b", True),  # the registry is the same
        ("busy", "sha256:b", True),
        ("disk", "sha256:b", True),
        ("auth", "sha256:b", True),
    ],
)
def test_what_one_image_lacks_does_not_hold_up_another_one_of_its_name(
    kind: str, digest: str, concerns: bool
) -> None:
    failed = failure.PullFailure(failure.Kind(kind), "x", 1, None, digest="sha256:a")
    assert failed.concerns(digest) is concerns


def test_a_pull_of_what_nobody_knew_says_nothing_of_what_is_known_now() -> None:
    for kind, concerns in ((failure.Kind.BAD_IMAGE, False), (failure.Kind.NETWORK, True)):
        failed = failure.PullFailure(kind, "x", 1, None)
        assert failed.concerns("sha256:a") is concerns
        assert failed.concerns("")
