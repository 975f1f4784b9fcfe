"""Why a pull failed, in classes: what is shown, and what is done next."""

import random
from dataclasses import dataclass
from enum import StrEnum

import kit.errors
from preheat.runtimes import base


class Kind(StrEnum):
    NOT_FOUND = "not_found"  # no such tag, digest or repository
    AUTH = "auth"  # the registry wants other credentials
    NETWORK = "network"  # not reached, broken off, overloaded, or no byte for too long
    CORRUPT = "corrupt"  # other bytes than the digest says, or too few
    DISK = "disk"  # no space left
    BAD_IMAGE = "bad_image"  # a reference, manifest or platform that cannot work
    RUNTIME = "runtime"  # the container runtime went away or failed


# First wait and longest wait in seconds; None: not tried again before the settings change or
# somebody asks. A missing tag may be pushed and a secret rotated, so these are looked at again,
# slowly.
_WAITS: dict[Kind, tuple[float, float] | None] = {
    Kind.NOT_FOUND: (300.0, 3600.0),
    Kind.AUTH: (300.0, 3600.0),
    Kind.NETWORK: (1.0, 300.0),
    Kind.CORRUPT: (5.0, 1800.0),
    Kind.DISK: (60.0, 600.0),
    Kind.BAD_IMAGE: None,
    Kind.RUNTIME: (1.0, 60.0),
}

_REMEDIES = {
    Kind.NOT_FOUND: "push it, or correct the reference",
    Kind.AUTH: "check preheat.credentials; the registry's own message is above",
    Kind.NETWORK: "it is tried again and goes on where it was",
    Kind.CORRUPT: "its partial bytes were dropped and it is fetched anew; check the registry or "
    "the proxy in between",
    Kind.DISK: "what was fetched was given back; make room or lower the pin budget",
    Kind.BAD_IMAGE: "correct the reference or the platform; not tried again until then",
    Kind.RUNTIME: "it is tried again when the runtime answers; see the runtime's log",
}


class PullError(kit.errors.AgentError):
    """A pull or a look at the registry that failed, with its class."""

    exit_code = 5

    def __init__(self, thing: str, kind: Kind, cause: str, wait: float | None = None) -> None:
        super().__init__(thing, f"{kind}: {cause}", _REMEDIES[kind])
        self.kind = kind
        self.wait = wait  # what the registry asked for (Retry-After), seconds


@dataclass(frozen=True)
class Failure:
    """The latest failure of an image. ``retry_at`` is Unix time; None: not by itself."""

    kind: Kind
    message: str
    attempts: int
    retry_at: float | None


def after(error: PullError, attempts: int, now: float) -> Failure:
    """What follows ``error``, the ``attempts``-th in a row: doubling, jittered, bounded waits."""
    waits = _WAITS[error.kind]
    if waits is None:
        return Failure(error.kind, str(error), attempts, None)
    first, longest = waits
    wait = min(first * 2 ** min(attempts - 1, 20), longest) * random.uniform(0.75, 1.25)
    return Failure(error.kind, str(error), attempts, now + max(wait, error.wait or 0.0))


# The runtimes' own words; tried from top to bottom, on the lower-cased text.
_WORDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.DISK, ("no space left", "disk quota exceeded")),
    (
        Kind.CORRUPT,
        (
            "unexpected commit digest",
            "unexpected commit size",
            "failed size validation",
            "invalid checksum",
            "failed to validate",
            "gzip: invalid",
            "flate: corrupt",
            "wrong diff id",
            "mismatched image rootfs",
        ),
    ),
    (
        Kind.AUTH,
        (
            "401",
            "403 forbidden",
            "unauthorized",
            "authorization failed",
            "access denied",
            "authentication required",
            "failed to fetch oauth token",
        ),
    ),
    (
        Kind.BAD_IMAGE,
        (
            "invalid reference",
            "no match for platform",
            "not acceptable",
            "unsupported media type",
            "does not match any platform",
        ),
    ),
    (Kind.NOT_FOUND, ("not found", "manifest unknown", "404")),
)


def classify(ref: str, error: base.RuntimeCallError) -> PullError:
    """The class of what PullImage answered. Runtimes say most of it only in words."""
    text = error.cause.lower()
    if isinstance(error, base.RuntimeGoneError):
        return PullError(ref, Kind.RUNTIME, error.cause)
    if isinstance(error, base.RuntimeSlowError):
        return PullError(ref, Kind.NETWORK, "the attempt took too long")
    if "lease does not exist" in text or ("lease" in text and error.code == "NOT_FOUND"):
        return PullError(ref, Kind.RUNTIME, "its hold ended meanwhile (another agent finished it)")
    if error.code == "NOT_FOUND":
        return PullError(ref, Kind.NOT_FOUND, error.cause)
    for kind, words in _WORDS:
        if any(word in text for word in words):
            return PullError(ref, kind, error.cause)
    return PullError(ref, Kind.NETWORK, error.cause)
