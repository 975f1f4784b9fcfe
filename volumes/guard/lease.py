"""Who may format: one pure decision, and the steps that carry it out.

Everything that is not known is a no. The order of steps keeps the invariant that the property
tests check after an interruption at every step: whenever the kernel has a lease, the ledger has an
open permission for that volume, and so a volume that might have been formatted is never again
taken for one that was not.
"""

import enum
from dataclasses import dataclass

from volumes.ledger.entry import Knowledge
from volumes.probe.verdict import Kind, Verdict

Attachment = tuple[tuple[int, int], int | None, int, str]


@dataclass(frozen=True)
class Policy:
    """``quiet``: seconds without an I/O error. ``require_extents``: see the settings."""

    quiet: float = 60.0
    require_extents: bool = False


@dataclass(frozen=True)
class Evidence:
    """What every source of truth says. None is 'could not be learnt'.

    ``before`` and ``after``: the device's identity when the probes began and now.
    ``ledger``: this node. ``mirror``: the image's metadata. ``extents``: the cluster.
    ``quiet_for``: seconds since the kernel logged an error of this device or its client.
    ``cluster_size``: the image's size as its cluster says it, in bytes.
    """

    is_rbd: bool
    before: Attachment | None
    after: Attachment | None
    first: Verdict | None
    second: Verdict | None
    ledger: Knowledge
    mirror: Knowledge
    extents: Knowledge
    quiet_for: float | None
    read_only: bool | None
    in_use: bool | None
    snapshot: bool = False
    cluster_size: int | None = None
    why_unknown: str = ""


def refusals(evidence: Evidence, policy: Policy) -> tuple[str, ...]:
    """Why the device may not be formatted without an operator's word; empty: it may."""
    reasons = [
        *_of_device(evidence),
        *_of_probe(evidence),
        *_of_memory(evidence, policy),
    ]
    if evidence.quiet_for is None:
        reasons.append("the kernel's log cannot be read, so I/O errors are not known")
    elif not evidence.quiet_for >= policy.quiet:
        reasons.append(
            f"the kernel logged an I/O error {max(0.0, evidence.quiet_for):.0f}s ago, "
            f"{policy.quiet:g}s of quiet are needed"
        )
    return tuple(reasons)


def _of_device(evidence: Evidence) -> list[str]:
    reasons = []
    if evidence.before is None or evidence.after is None:
        reasons.append("the device is gone")
    elif evidence.before != evidence.after:
        reasons.append("the device was attached anew between the probes")
    elif not evidence.after[3]:
        reasons.append("nothing says which volume it is, so the ledger cannot be asked")
    elif evidence.after[1] is None:
        reasons.append("this kernel does not number attachments (DISKSEQ, Linux 5.15)")
    if evidence.snapshot:
        reasons.append("it is a snapshot")
    if evidence.read_only is not False:
        reasons.append("it is attached read-only" if evidence.read_only else "read-only or not?")
    if evidence.in_use is not False:
        reasons.append("it is mounted or held" if evidence.in_use else "in use or not?")
    return reasons


def _of_probe(evidence: Evidence) -> list[str]:
    reasons = []
    for which, verdict in (("first", evidence.first), ("second", evidence.second)):
        if verdict is None:
            reasons.append(f"there is no {which} probe")
        elif verdict.verdict is not Kind.BLANK_VERIFIED:
            reasons.append(f"the {which} probe says {verdict}")
        elif evidence.after is not None and (
            verdict.diskseq != evidence.after[1] or verdict.size != evidence.after[2]
        ):
            reasons.append(f"the {which} probe saw another attachment")
    return reasons


def _of_memory(evidence: Evidence, policy: Policy) -> list[str]:
    reasons = []
    asked_and_empty = evidence.extents is Knowledge.NONE
    for which, knowledge in (("ledger", evidence.ledger), ("image's metadata", evidence.mirror)):
        if knowledge is Knowledge.CONTENT:
            reasons.append(f"the {which} says that it holds data")
        elif knowledge is Knowledge.MAYBE and not asked_and_empty:
            reasons.append(
                f"the {which} says that a format was permitted before and may have been done"
            )
        elif knowledge is Knowledge.UNKNOWN:
            reasons.append(f"the {which} cannot be read ({evidence.why_unknown})")
    if evidence.ledger is Knowledge.NOT_ASKED:
        reasons.append("the ledger was not asked")
    if evidence.extents is Knowledge.CONTENT:
        reasons.append("the cluster says that extents of it are allocated")
    elif evidence.extents is Knowledge.NOT_ASKED:
        if evidence.is_rbd and policy.require_extents:
            reasons.append("there are no credentials to ask its cluster (require_extents)")
    elif evidence.extents is not Knowledge.NONE:
        reasons.append(f"the cluster could not say what is allocated ({evidence.why_unknown})")
    size = evidence.after[2] if evidence.after is not None else None
    if None not in (size, evidence.cluster_size) and size != evidence.cluster_size:
        reasons.append(
            f"the image has {evidence.cluster_size} bytes in its cluster, the device has {size}"
        )
    return reasons


class Step(enum.Enum):
    """Each is done completely or not at all; they are done in the order given."""

    RECORD_PERMISSION = enum.auto()  # in the ledger, durable
    MIRROR = enum.auto()  # the ledger's entry into the image's metadata; may fail
    GRANT = enum.auto()  # the lease in the kernel
    SHORTEN = enum.auto()  # the lease ends in LINGER_SECONDS
    REVOKE = enum.auto()
    RECORD_CONTENT = enum.auto()
    CLOSE_PERMISSION = enum.auto()  # it was not used


# A program that makes a file system may open the device again after its mark is there.
LINGER_SECONDS = 5.0

GRANTING = (Step.RECORD_PERMISSION, Step.MIRROR, Step.GRANT)


def conclude(
    *, has_content: bool, verdict_known: bool, leased: bool, expired: bool, opens: int, open_: bool
) -> tuple[Step, ...]:
    """What to do about a device after a look at it.

    ``leased``: the kernel has a lease for it; ``expired``: and it ran out; ``opens``: write opens
    under it; ``open_``: the ledger has an open permission; ``verdict_known``: the look told what is
    there. A permission is closed as unused only on the kernel's own count of an expired lease:
    without the lease (after a reboot) nobody knows, and it stays open.
    """
    if has_content:
        end = (Step.REVOKE if expired else Step.SHORTEN,) if leased else ()
        return (Step.RECORD_CONTENT, Step.MIRROR, *end)
    if not leased or not expired:
        return ()
    if opens == 0 and open_ and verdict_known:
        return (Step.CLOSE_PERMISSION, Step.MIRROR, Step.REVOKE)
    return (Step.REVOKE,) if opens or not open_ else ()
