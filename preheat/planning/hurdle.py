"""Why an image must not be pulled now. Pure."""

from dataclasses import dataclass

from preheat.planning import desired
from preheat.planning.desired import Request
from preheat.registry import failure, resolver
from preheat.runtimes import base


@dataclass(frozen=True)
class Facts:
    """What is known of one requested image that is not here. Times are Unix times."""

    request: Request
    digest: str
    lookup: resolver.Lookup | None
    pull_at: float  # when its turn comes, see schedule.Schedule.pull_at
    failed: failure.Failure | None
    pins: tuple[base.Hold, ...]  # of this reference, which a heal would bring back
    limited: bool = False  # bytes_per_second holds, which only the agent's own fetches keep


def reason(facts: Facts, now: float) -> str:
    """Why it must not be pulled now; empty when it may."""
    request, lookup, failed = facts.request, facts.lookup, facts.failed
    if request.released:
        return "released by an operator; 'nodeagent image preheat' requests it again"
    if request.paused:
        return "paused by an operator"
    if request.dropped_until is not None:
        return request.dropped_text
    if request.is_over:
        return "its time since the last use is over; it is requested again when it is used"
    if request.done:
        return "was pulled once and removed since; 'pin: never' does not fetch it again"
    # What the runtime lost cannot be healed, only pulled.
    healable = request.fetch == 0
    if healable and any(hold.target and hold.target.digest == facts.digest for hold in facts.pins):
        # A pull would bypass the limit of heals.
        return "removed from the runtime although pinned; waiting for the next heal"
    untold = lookup is not None and lookup.leaves_it_to_the_runtime
    if lookup is None or (lookup.shape is None and not untold):
        return "its registry lookup is in progress or waits for its turn"
    if lookup.private and not request.share_private:
        return desired.PRIVATE
    # What the runtime tries without our lookup, it tries without a login, but a mirror may not ask.
    doubtful = lookup.private is None and lookup.has_login and (lookup.mirrored or not untold)
    if doubtful and not request.share_private:
        why = lookup.failed.message if lookup.failed is not None else "its registry did not say"
        return f"not known to be public ({why}); allow it with share_private, or wait"
    if untold and facts.limited:
        return "its registry lookup failed, and bytes_per_second allows no pull without one"
    if failed is not None and (failed.retry_at is None or failed.retry_at > now):
        return failed.message
    if request.by == "policy" and facts.pull_at > now:
        return f"its turn comes in {facts.pull_at - now:.0f} s (spread, windows)"
    return ""
