"""What stands: troubles that last become findings, findings whose trouble is gone clear.

Pure. Invariants: a finding keeps its ``since`` while it stands; an unknown rule clears nothing
and raises nothing, and time that it was unknown is no patience;
a trouble that comes and goes keeps its finding up (it must stay away for longer each time), so
that nothing is said again and again.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kit.findings import Finding, Severity
from volumes.rules.base import Trouble

DOC = "docs/audit.md"
# A finding that came back this often in an hour is flapping; then it must stay away for this long.
FLAPS = 3
FLAP_WINDOW_SECONDS = 3600.0
FLAP_CLEAR_SECONDS = 600.0
MOST_OF_A_RULE = 200
MOST_DORMANT = 500


@dataclass(frozen=True)
class Entry:
    """One trouble and its life."""

    rule: str
    severity: Severity
    trouble: Trouble
    patience: float
    first: float  # since when without a gap
    last: float  # when it was seen last
    raised: bool = False
    since: float = 0.0
    gone: float | None = None  # since when it is no longer seen
    returns: tuple[float, ...] = ()  # when it came back
    stale: str = ""  # why it could not be looked at again
    stale_since: float = 0.0
    dark: float = 0.0  # seconds since ``first`` in which nobody could see whether it was there

    @property
    def dormant(self) -> bool:
        """It has cleared; kept only to see whether it comes back again and again."""
        return not self.raised and self.gone is not None

    @property
    def flapping(self) -> bool:
        return len(self.returns) >= FLAPS


@dataclass(frozen=True)
class Judged:
    """One rule's result, with its settings applied."""

    rule: str
    troubles: tuple[tuple[Trouble, Severity, float], ...]  # with severity and patience
    unknown: str = ""


Standing = Mapping[str, Entry]


def identity(rule: str, trouble: Trouble) -> str:
    """Stable: the same trouble has the same id each time, on the same boot."""
    return "/".join(part for part in (rule, trouble.subject.replace("/", "_"), trouble.key) if part)


def advance(
    standing: Standing, judged: Iterable[Judged], now: float, clear_after: float
) -> dict[str, Entry]:
    """The new standing. ``now``: Unix time; rules that are not in ``judged`` are forgotten."""
    after: dict[str, Entry] = {}
    for result in judged:
        seen: set[str] = set()
        waiting = 0
        for trouble, severity, patience in result.troubles[:MOST_OF_A_RULE]:
            name = identity(result.rule, trouble)
            seen.add(name)
            fresh = Entry(result.rule, severity, trouble, patience, now, now)
            after[name] = _seen(standing.get(name), fresh, now)
        for name, entry in standing.items():
            if entry.rule != result.rule or name in seen:
                continue
            kept = _unseen(entry, result.unknown, now, clear_after)
            if kept is None:
                continue
            if not (kept.raised or kept.dormant):
                waiting += 1
                if waiting > MOST_OF_A_RULE:
                    continue
            after[name] = kept
    dormant = sorted((e.gone or 0.0, name) for name, e in after.items() if e.dormant)
    for _, name in dormant[: max(0, len(dormant) - MOST_DORMANT)]:
        del after[name]
    return after


def _seen(before: Entry | None, fresh: Entry, now: float) -> Entry:
    at = now if fresh.trouble.seen is None else fresh.trouble.seen
    if before is None:
        return dataclasses.replace(fresh, first=at, raised=fresh.patience <= 0, since=at)
    returns = tuple(t for t in before.returns if now - t < FLAP_WINDOW_SECONDS)
    first, dark = before.first, before.dark
    if before.gone is not None:
        returns = (*returns, now)[-16:]
        if not before.raised:
            first, dark = at, 0.0  # patience counts without a gap
    elif before.stale:
        dark += now - before.stale_since
    lasted = at - first - dark
    raised = before.raised or lasted >= fresh.patience
    return dataclasses.replace(
        fresh,
        first=first,
        dark=dark,
        raised=raised,
        since=before.since if before.raised else first,
        returns=returns,
    )


def _unseen(entry: Entry, unknown: str, now: float, clear_after: float) -> Entry | None:
    if unknown:
        if entry.dormant:
            return entry
        since = entry.stale_since if entry.stale else now
        return dataclasses.replace(entry, stale=unknown, stale_since=since)
    gone = entry.gone if entry.gone is not None else now
    wait = FLAP_CLEAR_SECONDS if entry.flapping else clear_after
    if entry.dormant:
        return entry if now - gone < FLAP_WINDOW_SECONDS else None
    if not entry.raised:
        return None
    if now - gone >= wait:
        return dataclasses.replace(entry, raised=False, gone=gone, stale="")
    return dataclasses.replace(entry, gone=gone, stale="")


def pending(standing: Standing, now: float) -> float | None:
    """Seconds until the next entry may be raised or cleared; None when none is waiting."""
    waits = [
        max(0.0, entry.first + entry.dark + entry.patience - now)
        for entry in standing.values()
        if not entry.raised and not entry.dormant and not entry.stale  # waits for a look, not time
    ]
    waits += [
        0.0
        for entry in standing.values()
        if entry.raised and entry.gone is not None and not entry.flapping and not entry.stale
    ]
    return min(waits, default=None)


def unconfirmed(standing: Standing, now: float) -> bool:
    """Whether something has lasted long enough and only the look that may raise it is missing."""
    return any(
        entry.trouble.seen is not None and now - entry.first - entry.dark >= entry.patience
        for entry in standing.values()
        if not entry.raised and not entry.dormant and not entry.stale
    )


def findings(standing: Standing) -> list[Finding]:
    """Everything that is raised, as the reporting port takes it."""
    return [_finding(name, entry) for name, entry in standing.items() if entry.raised]


def _finding(name: str, entry: Entry) -> Finding:
    evidence = dict(entry.trouble.evidence)
    if entry.trouble.device:
        evidence["device"] = entry.trouble.device
    if entry.trouble.pid:
        evidence["pid"] = str(entry.trouble.pid)
    if entry.stale:
        evidence["not_looked_at_again"] = entry.stale
    if entry.flapping:
        evidence["flapping"] = f"came back {len(entry.returns)} times in an hour"
    anchor = "log-lines" if entry.rule.startswith("log-") else entry.rule
    evidence["doc"] = f"{DOC}#{anchor}"
    return Finding(
        id=name,
        rule=entry.rule,
        severity=entry.severity,
        subject=entry.trouble.subject,
        message=entry.trouble.message,
        advice=entry.trouble.advice,
        evidence=evidence,
        since=entry.since,
    )
