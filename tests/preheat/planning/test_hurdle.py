"""What keeps an image from being pulled when the agent's own lookup failed: next to nothing."""

import dataclasses
from typing import Any

import pytest

from preheat.image import manifest
from preheat.planning import plan
from preheat.planning.desired import Request
from preheat.registry import failure, resolver
from preheat.registry.failure import Kind, PullError

REF = "reg.example/a:b"


def reason(
    kind: Kind,
    attempts: int = 1,
    request: Request | None = None,
    facts: dict[str, Any] | None = None,
    **lookup: Any,
) -> str:
    error = PullError(REF, kind, "it says no", final=lookup.pop("final", False))
    found = resolver.Lookup(manifest.parse(REF), failed=failure.after(error, attempts, 0.0))
    found = dataclasses.replace(found, **lookup)
    seen = plan.Facts(
        request or Request(REF, "policy"), "", found, 0.0, None, pins=(),
        **(facts or {}),
    )  # fmt: skip
    return plan.hurdle(seen, 100.0)


@pytest.mark.parametrize("kind", [Kind.AUTH, Kind.CORRUPT, Kind.BAD_IMAGE])
def test_the_runtime_may_try_what_the_lookup_could_not(kind: Kind) -> None:
    assert reason(kind) == ""


def test_that_there_is_no_such_image_is_believed() -> None:
    assert "lookup" in reason(Kind.NOT_FOUND)
    assert "lookup" in reason(Kind.BAD_IMAGE, final=True)


@pytest.mark.parametrize("kind", [Kind.NETWORK, Kind.BUSY])
def test_a_registry_that_is_away_is_asked_by_lookups_first(kind: Kind) -> None:
    assert "lookup" in reason(kind, resolver.PATIENCE - 1)
    assert reason(kind, resolver.PATIENCE) == ""


def test_a_limit_is_kept() -> None:
    assert "bytes_per_second" in reason(Kind.AUTH, facts={"limited": True})


def test_a_mirror_might_give_away_a_private_image() -> None:
    secret: dict[str, Any] = {"has_login": True, "mirrored": True}
    shared = Request(REF, "policy", share_private=True)
    assert "not known to be public" in reason(Kind.AUTH, **secret)
    assert reason(Kind.AUTH, request=shared, **secret) == ""
    assert reason(Kind.AUTH, has_login=True) == ""  # then it is tried without a login
    assert "share_private" in reason(Kind.AUTH, private=True)
