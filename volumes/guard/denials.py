"""Denied write opens: who made them, and which of them are findings.

The kernel reports a denial with numbers only; ``resolve`` finds the process, container and pod. A
denial alone is no trouble: the first mkfs on each new volume is denied, and its lease follows
within a second. So a denial waits for the decision on its device and becomes a finding only when
that is a refusal. Those of one caller are kept together, with a count.
"""

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import kit.findings
from linux import procfs
from volumes.guard import kernel
from volumes.probe.examine import CONTENT, Kind

KeyT = TypeVar("KeyT", bound=tuple[Hashable, ...])
_HELD = CONTENT | {Kind.UNKNOWN_CONTENT, Kind.AMBIVALENT}  # it can be read, and is not blank
KEPT = 256  # newest denials, for the status
MOST_GROUPS = 128  # (volume, program) pairs with a finding of their own
MOST_CALLERS = 16  # of one device that are kept apart; a program may change its name each time
OTHERS = "other programs"  # all further ones of that device
FINDING_SECONDS = 3600.0  # a finding clears this long after the last denial


@dataclass(frozen=True)
class Denial:
    """``at``: Unix seconds. ``reasons``: why there was no lease; empty before the decision.

    ``early``: made before the decision on a device of which the ledger knew no content. In dry-run
    the first mkfs of a new volume succeeds before the agent has checked it, and so would one that
    destroys data: a finding that says so. ``whose``: what the scope says of a device that no driver
    guards; it is reported, and was written to.
    """

    at: float
    device: str
    volume: str
    title: str
    denied: bool  # False: dry-run
    pid: int
    program: str
    parent: str
    command: str
    cgroup: str
    pod: str
    container: str
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    early: bool = False
    whose: str = ""
    count: int = 1

    @property
    def caller(self) -> tuple[Hashable, ...]:
        """Equal for denials that are kept together. The device comes first."""
        return self.device, self.volume, self.program, self.cgroup, self.denied, self.early

    @property
    def group(self) -> tuple[str, str]:
        """Equal for denials of one finding: a device's name passes from volume to volume."""
        return self.volume or self.device, self.program


def resolve(event: kernel.Event, mount: int | None, device: str, volume: str, title: str) -> Denial:
    """The event with names.

    ``mount``: the cgroup hierarchy, open: it still names the container of a process that has ended.
    With containers in cgroup v1 only /proc does.
    """
    path = ""
    if mount is not None:
        try:
            path = procfs.cgroup_path(mount, event.cgroup)
        except OSError:
            pass  # not permitted, or another hierarchy: try /proc
    pod, container = procfs.pod_and_container(path)
    command = " ".join(event.arguments)
    with contextlib.suppress(OSError):  # it has ended
        if not pod:
            pod, container = procfs.pod_of(event.pid)
        if not command:
            raw = Path(f"/proc/{event.pid}/cmdline").read_bytes()[:256]
            command = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return Denial(
        at=time.time() - max(0.0, time.monotonic() - event.time),
        device=device,
        volume=volume,
        title=title,
        denied=event.denied,
        pid=event.pid,
        program=event.program,
        parent=event.parent,
        command=command,
        cgroup=path,
        pod=pod,
        container=container,
    )


@dataclass
class Denials:
    """The newest denials by caller, and one finding per volume and program. All bounded."""

    waiting: dict[str, dict[tuple[Hashable, ...], Denial]] = field(
        default_factory=dict
    )  # by device: undecided
    delayed: int = 0  # denied once, then leased, as with every new volume
    _last: OrderedDict[tuple[Hashable, ...], Denial] = field(default_factory=OrderedDict)
    _groups: OrderedDict[tuple[str, str], Denial] = field(default_factory=OrderedDict)

    @property
    def last(self) -> list[Denial]:
        """The newest ones, those of one caller joined."""
        return list(self._last.values())

    def add(self, denial: Denial) -> None:
        """Keep a denial until the decision on its device."""
        waiting = self.waiting.setdefault(denial.device, {})
        denial = self._known(denial)
        waiting[denial.caller] = _joined(waiting.get(denial.caller), denial)

    def _known(self, denial: Denial) -> Denial:
        """Itself, or as one of the others."""
        callers = {key for key in self._last if key[0] == denial.device}
        callers |= self.waiting.get(denial.device, {}).keys()
        if denial.caller in callers or len(callers) < MOST_CALLERS:
            return denial
        return replace(denial, program=OTHERS, cgroup="")

    def more(self, denial: Denial, count: int) -> None:
        """The kernel denied it so many times more, and did not report each."""
        denial = self._known(denial)
        group = denial.group
        if denial.caller in self._last:
            last = self._last[denial.caller]
            self._last[denial.caller] = replace(last, count=last.count + count)
        if group in self._groups:
            found = self._groups[group]
            self._groups[group] = replace(found, count=found.count + count)

    def decided(self, device: str, verdict: str, reasons: tuple[str, ...]) -> None:
        """The decision on the device; without reasons it may be formatted now."""
        for denial in self.waiting.pop(device, {}).values():
            final = replace(denial, verdict=verdict, reasons=reasons)
            _keep(self._last, final.caller, final, KEPT)
            if not reasons:
                self.delayed += 1
                continue
            _keep(self._groups, final.group, final, MOST_GROUPS)

    def forget(self, device: str) -> None:
        """The device was detached; its findings stay for their time."""
        self.decided(device, "detached", ("the device was detached",))

    def findings(self, now: float) -> list[kit.findings.Finding]:
        """``now``: Unix seconds."""
        found = []
        for key, denial in list(self._groups.items()):
            if now - denial.at > FINDING_SECONDS:
                del self._groups[key]
                continue
            found.append(_finding(denial))
        return found


def _joined(before: Denial | None, new: Denial) -> Denial:
    return new if before is None else replace(new, count=before.count + new.count)


def _keep(kept: OrderedDict[KeyT, Denial], key: KeyT, new: Denial, most: int) -> None:
    """Where there are too many the oldest one goes of the device or volume that has most."""
    kept[key] = _joined(kept.pop(key, None), new)
    if len(kept) > most:
        shares = Counter(each[0] for each in kept)
        largest = max(shares.values())
        del kept[next(each for each in kept if shares[each[0]] == largest)]


def _advice(denial: Denial) -> str:
    if denial.whose:
        return (
            "Nothing is wrong: the guard only tells what it would do here. If the device is the "
            "node's own, name it in volumes.guard.own"
        )
    if not denial.denied:
        return (
            "It was NOT stopped. Stop the volume's users and examine what it holds now: 'nodeagent "
            f"volume probe /dev/{denial.device}'. In mode enforce it would have been denied"
        )
    # No command that permits the format: what stands ready here is pasted at night.
    if denial.verdict.partition(" ")[0] in _HELD:
        return (
            "The volume is unchanged and holds data: never allow the format. Correct the device, "
            "the type of file system or the PersistentVolume that the pod names. 'nodeagent volume "
            f"explain /dev/{denial.device}' says what is known of the volume"
        )
    return (
        "Do not force it: the volume is unchanged. 'nodeagent volume explain "
        f"/dev/{denial.device}' says what is known of the volume and what to do next. A volume "
        "that is proven blank is formatted at the next try"
    )


def _finding(denial: Denial) -> kit.findings.Finding:
    if denial.early and not denial.denied:
        return kit.findings.Finding(
            id=f"format-unchecked:{denial.volume or denial.device}:{denial.program}",
            rule="format-unchecked",
            severity=kit.findings.Severity.INFO,
            subject=denial.title or denial.device,
            message=f"{denial.program} wrote to {denial.device} before the agent had looked at it, "
            "and dry-run let it: nobody knows what was there",
            advice="A new volume looks like that, and so does a loss of data. In mode enforce the "
            "first write waits for the look. If the volume is older than this finding, compare it "
            "with its snapshots before it is used",
            evidence={"pid": str(denial.pid), "command": denial.command, "pod": denial.pod,
                      "verdict": denial.verdict, "volume": denial.volume},
        )  # fmt: skip
    subject = denial.title or denial.device
    target = f"{denial.device} ({subject}) for writing"
    rule, severity = "format-would-be-denied", kit.findings.Severity.CRITICAL
    did = f"opened {target}; in mode enforce, the guard denies that"
    if denial.whose:
        rule, severity = "scope-would-deny", kit.findings.Severity.INFO
        did = f"opened {target}; the guard only reports that"
    elif denial.denied:
        rule, did = "format-denied", f"was not allowed to open {target}"
    return kit.findings.Finding(
        id=f"{rule}:{denial.volume or denial.device}:{denial.program}",
        rule=rule,
        severity=severity,
        subject=subject,
        message=f"{denial.program} {did}: {'; '.join(denial.reasons)}",
        advice=_advice(denial),
        evidence={
            "pid": str(denial.pid),
            "command": denial.command,
            "parent": denial.parent,
            "pod": denial.pod,
            "container": denial.container,
            "verdict": denial.verdict,
            "volume": denial.volume,
            "times": str(denial.count),
        },
    )
