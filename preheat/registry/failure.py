"""Why a lookup or a pull failed, in classes, and when it is tried again.

The class decides what the operator sees and how long the agent waits. A registry's status code
gives it directly; of a pull the runtimes give little but words, which ``classify`` looks for.
"""

import email.utils
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import kit.errors
import kit.pause
from preheat.runtimes import base


class Kind(StrEnum):
    NOT_FOUND = "not_found"  # no such tag, digest or repository
    AUTH = "auth"  # the registry wants other credentials
    NETWORK = "network"  # not reached, broken off, or no progress for too long
    BUSY = "busy"  # the registry asks for fewer requests (429)
    CORRUPT = "corrupt"  # the bytes do not match their digest or size
    DISK = "disk"  # no space left
    BAD_IMAGE = "bad_image"  # a reference, manifest or platform that cannot work
    RUNTIME = "runtime"  # the container runtime went away or failed
    INCOMPLETE = "incomplete"  # the runtime pulled it, and does not have it complete


# First and longest wait in seconds. Missing tags are pushed, secrets rotated and mirrors mended, so
# the agent looks again, slowly.
_WAITS: dict[Kind, tuple[float, float]] = {
    Kind.NOT_FOUND: (300.0, 3600.0),
    Kind.AUTH: (300.0, 3600.0),
    Kind.NETWORK: (2.0, 300.0),
    Kind.BUSY: (30.0, 1800.0),
    Kind.CORRUPT: (5.0, 1800.0),
    Kind.DISK: (60.0, 600.0),
    Kind.BAD_IMAGE: (300.0, 3600.0),
    Kind.RUNTIME: (1.0, 60.0),
    Kind.INCOMPLETE: (60.0, 3600.0),
}

_REMEDIES = {
    Kind.NOT_FOUND: "push it, or correct the reference",
    Kind.AUTH: "check preheat.credentials",
    Kind.NETWORK: "the agent tries again and continues where the pull stopped",
    Kind.BUSY: "the agent waits and continues; spread the fleet wider (preheat.spread, "
    "preheat.fleet), log in, or use a mirror",
    Kind.CORRUPT: "the agent dropped the half-fetched layer and fetches it again; check the "
    "registry and any proxy in between",
    Kind.DISK: "the agent deleted what it had fetched; make room or lower pin_budget",
    Kind.BAD_IMAGE: "correct the image, the reference or preheat.platform, or whatever answers in "
    "place of its registry",
    Kind.RUNTIME: "the agent tries again when the runtime answers; see the runtime's log",
    Kind.INCOMPLETE: "compare the platforms of its index with preheat.platform, and see the "
    "runtime's log",
}
# What they say holds for one image, not for another one of its name.
_OF_ONE_IMAGE = (Kind.NOT_FOUND, Kind.CORRUPT, Kind.BAD_IMAGE, Kind.INCOMPLETE)


LONGEST_ASKED = 3600.0  # a registry that asks for more is asked again after an hour


class PullError(kit.errors.AgentError):
    """A lookup in the registry or a pull that failed, with its class."""

    exit_code = 5

    def __init__(
        self,
        thing: str,
        kind: Kind,
        cause: str,
        wait: float | None = None,
        *,
        final: bool = False,
    ) -> None:
        super().__init__(thing, f"{kind}: {cause}", _REMEDIES[kind])
        self.kind = kind
        # Whether the runtime could not pull it either: there is no such image.
        self.final = final or kind is Kind.NOT_FOUND
        self.wait = wait  # seconds that the registry asked for (Retry-After)


@dataclass(frozen=True)
class PullFailure:
    """The latest failure of an image. ``retry_at``: Unix time; None: only when asked."""

    kind: Kind
    message: str
    attempts: int
    retry_at: float | None
    at: float = 0.0  # Unix time of the failure
    final: bool = False  # there is no such image
    digest: str = ""  # of the image that was pulled; empty: not known
    took: base.DiskUse = base.NO_USE  # of the disk, where that was more than planned

    def concerns(self, digest: str) -> bool:
        """Whether it says something of the image ``digest`` (empty: not known), too: bytes that
        are missing or wrong are one image's, not those of another one that has its tag now. Nor of
        one that is known by now, when nothing was of what was pulled."""
        return self.kind not in _OF_ONE_IMAGE or not digest or self.digest == digest

    def least(self, digest: str, now: float) -> base.DiskUse:
        """What the image ``digest`` needs at least, as it took it once; for an hour for each
        attempt, because some of it may be here since, of an image that shares layers."""
        counts = self.digest == digest and now - self.at < 3600.0 * min(self.attempts, 24)
        return self.took if counts else base.NO_USE

    def spoils(self, digest: str) -> bool:
        """Whether the image ``digest`` is not to be trusted, although the runtime lists it."""
        kinds = (Kind.CORRUPT, Kind.BAD_IMAGE)
        return self.kind in kinds and self.digest in ("", digest)


def after(
    error: PullError,
    attempts: int,
    now: float,
    spread: float = 0.0,
    jitter: Callable[[], float] = random.random,
) -> PullFailure:
    """The failure and its retry after ``attempts`` errors in a row: waits double, with jitter.

    ``spread``: over how many seconds the fleet asks a registry again that is back. A registry may
    have told all nodes the same moment; they come after it, over ``spread``.
    """
    if error.kind is Kind.BAD_IMAGE and error.final:  # until the settings change or somebody asks
        return PullFailure(error.kind, str(error), attempts, None, now, error.final)
    first, longest = _WAITS[error.kind]
    longest = max(longest, spread)
    wait = kit.pause.grown(attempts, first, longest) * (0.5 + jitter())
    if error.wait is not None:
        wait = max(wait, error.wait + jitter() * max(error.wait / 2, spread))
    return PullFailure(error.kind, str(error), attempts, now + wait, now, error.final)


def asked_wait(retry_after: str, now: float) -> float | None:
    """Seconds that a Retry-After asks for, at most an hour; None for one that makes no sense.

    It is a number of seconds or a date (RFC 9110, 10.2.3).
    """
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(min(int(text[:9]), LONGEST_ASKED))
    try:
        when = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
    return min(max(0.0, when - now), LONGEST_ASKED)


# Words of the runtimes, in lower case. The first class that matches counts.
_WORDS: dict[Kind, str] = {
    Kind.DISK: "no space left|disk quota exceeded",
    Kind.CORRUPT: "unexpected commit (digest|size)|failed size validation|invalid checksum"
    "|failed to validate|gzip: invalid|flate: corrupt",
    Kind.BUSY: r"\b429\b|too ?many ?requests|rate limit",
    Kind.AUTH: r"\b401\b|403 forbidden|unauthorized|authorization failed|access denied"
    "|authentication required|failed to fetch oauth token",
    Kind.BAD_IMAGE: "invalid reference|no match for platform|not acceptable"
    "|unsupported media type|does not match any platform|number of layers and diffids"
    # The bytes are those that their digest says: fetching them again mends nothing.
    "|mismatched image rootfs|wrong diff id|unmarshal image config|invalid tar header",
    Kind.NOT_FOUND: r"not found|manifest unknown|\b404\b",
    # With more around them than a name of an image has.
    Kind.NETWORK: r"\bdial (tcp|udp)|(i/o|handshake|gateway) timeout|client\.timeout|timed out"
    r"|deadline exceeded|connection (reset|refused)|broken pipe|no such host|no route to host"
    r"|network is unreachable|(^|: |unexpected )eof\b|\btls: |x509: |unexpected status.*: 5\d\d\b",
}


def classify(ref: str, error: base.RuntimeCallError, unreadable: bool = False) -> PullError:
    """What PullImage answered, as an error with its class. ``unreadable``: the lookup found no
    image in what its registry has; when the runtime cannot tell either, the network is not why."""
    text = error.cause.lower()
    if isinstance(error, base.RuntimeGoneError | base.BreakerOpenError):
        return PullError(ref, Kind.RUNTIME, error.cause)
    if isinstance(error, base.RuntimeSlowError) and "(PullImage)" not in error.thing:
        return PullError(ref, Kind.RUNTIME, error.cause)
    if isinstance(error, base.RuntimeSlowError):
        return PullError(ref, Kind.NETWORK, "the attempt took too long")
    if "lease does not exist" in text or ("lease" in text and error.code == "NOT_FOUND"):
        return PullError(
            ref,
            Kind.RUNTIME,
            "its containerd lease ended meanwhile (another agent finished the pull, or the clock "
            "was set)",
        )
    if error.code == "RESOURCE_EXHAUSTED":
        return PullError(ref, Kind.BUSY, error.cause)
    if error.code == "NOT_FOUND":
        return PullError(ref, Kind.NOT_FOUND, error.cause)
    for kind, words in _WORDS.items():
        if re.search(words, text):
            return PullError(ref, kind, error.cause)
    return PullError(ref, Kind.BAD_IMAGE if unreadable else Kind.NETWORK, error.cause)
