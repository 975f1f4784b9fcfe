"""The life of findings: a trouble that lasts becomes a finding, one that stays away clears. Pure.

Each trouble has one Entry. It is raised when the trouble lasted for its rule's patience, and
cleared when the trouble stayed away for ``clear_after``. A cleared entry is kept for an hour
(``dormant``), to notice a trouble that comes back again and again: such a finding is ``flapping``
and must stay away longer before it clears, so that it is not reported each time.

Invariants: a finding keeps its ``since`` while it is raised. A rule that is unknown raises nothing
and clears nothing. Unknown periods do not count towards patience.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import kit.findings
from volumes.audit.rules.agent import LOG_PREFIX
from volumes.audit.types import Severity, Trouble

DOC = "docs/runbook.md"
# A finding that returned this often in an hour is flapping, and must then stay away this long.
FLAPS = 3
FLAP_WINDOW_SECONDS = 3600.0
FLAP_CLEAR_SECONDS = 600.0
MOST_OF_A_RULE = 200
MOST_DORMANT = 500


@dataclass(frozen=True)
class Entry:
    """One trouble and its history. Times are Unix times."""

    rule: str
    severity: Severity
    trouble: Trouble
    patience: float
    first: float  # since when it has been there without a gap
    last: float  # when it was last seen
    raised: bool = False
    since: float = 0.0
    gone: float | None = None  # since when it has not been seen
    returns: tuple[float, ...] = ()  # when it came back
    stale: str = ""  # why the rule is unknown now
    stale_since: float = 0.0
    dark: float = 0.0  # seconds since ``first`` during which the rule was unknown

    @property
    def dormant(self) -> bool:
        """It cleared, and is kept only to notice that it comes back."""
        return not self.raised and self.gone is not None

    @property
    def flapping(self) -> bool:
        return len(self.returns) >= FLAPS

    @property
    def waiting(self) -> bool:
        """It may be raised once it has lasted long enough."""
        return not self.raised and not self.dormant and not self.stale

    @property
    def clearing(self) -> bool:
        """It is raised, was not seen again, and will clear if that lasts."""
        return self.raised and self.gone is not None and not self.stale

    def lasted(self, now: float) -> float:
        return now - self.first - self.dark


@dataclass(frozen=True)
class Judged:
    """One rule's result with the operator's changes applied. Each trouble has its severity and
    patience."""

    rule: str
    troubles: tuple[tuple[Trouble, Severity, float], ...]
    unknown: str = ""


State = Mapping[str, Entry]


def identity(rule: str, trouble: Trouble) -> str:
    """The finding's id: the same trouble has the same id each time on the same boot."""
    return "/".join(part for part in (rule, trouble.subject.replace("/", "_"), trouble.key) if part)


def advance(
    state: State, judged: Iterable[Judged], now: float, clear_after: float
) -> dict[str, Entry]:
    """The state after one round. Entries of rules that are not in ``judged`` are dropped."""
    after: dict[str, Entry] = {}
    for result in judged:
        seen: set[str] = set()
        waiting = 0
        for trouble, severity, patience in result.troubles[:MOST_OF_A_RULE]:
            name = identity(result.rule, trouble)
            seen.add(name)
            fresh = Entry(result.rule, severity, trouble, patience, now, now)
            after[name] = _seen(state.get(name), fresh, now)
        for name, entry in state.items():
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
    return dataclasses.replace(
        fresh,
        first=first,
        dark=dark,
        raised=before.raised or lasted >= fresh.patience,
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
    if entry.dormant:
        return entry if now - gone < FLAP_WINDOW_SECONDS else None
    if not entry.raised:
        return None
    if now - gone >= (FLAP_CLEAR_SECONDS if entry.flapping else clear_after):
        return dataclasses.replace(entry, raised=False, gone=gone, stale="")
    return dataclasses.replace(entry, gone=gone, stale="")


def pending(state: State, now: float) -> float | None:
    """Seconds until the next entry may be raised or cleared; None when no entry waits for that."""
    waits = [max(0.0, e.patience - e.lasted(now)) for e in state.values() if e.waiting]
    waits += [0.0 for e in state.values() if e.clearing and not e.flapping]
    return min(waits, default=None)


def youngest(state: State, rules: Collection[str], now: float) -> float | None:
    """Age of the youngest finding of these rules."""
    raised = (entry for entry in state.values() if entry.raised and entry.rule in rules)
    return min((now - entry.since for entry in raised), default=None)


def unconfirmed(state: State, now: float) -> bool:
    """Whether a trouble has lasted long enough and only one more visit to the namespaces, which
    must see it again, is missing."""
    return any(
        entry.trouble.seen is not None and entry.lasted(now) >= entry.patience
        for entry in state.values()
        if entry.waiting
    )


def findings(state: State) -> list[kit.findings.Finding]:
    """Everything that is raised, for the agent's reporter."""
    return [_finding(name, entry) for name, entry in state.items() if entry.raised]


def _finding(name: str, entry: Entry) -> kit.findings.Finding:
    evidence = dict(entry.trouble.evidence)
    if entry.trouble.device:
        evidence["device"] = entry.trouble.device
    if entry.trouble.pid:
        evidence["pid"] = str(entry.trouble.pid)
    if entry.stale:
        evidence["not_looked_at_again"] = entry.stale
    if entry.flapping:
        evidence["flapping"] = f"came back {len(entry.returns)} times in an hour"
    anchor = "log-line" if entry.rule.startswith(LOG_PREFIX) else entry.rule
    evidence["doc"] = f"{DOC}#{anchor}"
    return kit.findings.Finding(
        id=name,
        rule=entry.rule,
        severity=entry.severity,
        subject=entry.trouble.subject,
        message=entry.trouble.message,
        advice=entry.trouble.advice,
        evidence=evidence,
        since=entry.since,
    )
