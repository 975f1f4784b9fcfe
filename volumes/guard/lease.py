"""Who may format a device: the facts, the decision, and the steps that carry it out. All pure.

The kernel program refuses every write open of a guarded device that has no lease. So a new volume
can be formatted only after this module decided that it is blank. It takes every source of truth
(two probes, the ledger, the image's metadata, the cluster's extents, the PersistentVolume, the
kernel's log) and refuses when one of them says "data" or does not answer.

``checks`` collects the facts, and ``steps`` executes the steps, one after the other, as they are
listed here. Two invariants follow from the order, even when the agent is killed between two steps:

* whenever the kernel has a lease, the ledger has an open permission for that volume; so a volume
  that may have been formatted never again counts as one that was not;
* a lease belongs to one attachment (DISKSEQ). The kernel's map knows device numbers only, and a
  number may pass to another volume while no agent runs. So the kernel's second program deletes the
  lease of a number that a new disk gets; and where disks stay (nbd, loop), whoever meets an
  attachment for the first time revokes a lease that was not given to it.

The property tests drive these functions through thousands of lives of a volume.
"""

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from linux import kmsg
from volumes.ledger import statement
from volumes.ledger.store import Knowledge
from volumes.probe.examine import Kind, Verdict

Attachment = tuple[tuple[int, int], int | None, int, str]  # number, DISKSEQ, size, volume


# --- facts


@dataclass(frozen=True)
class LeasePolicy:
    """``quiet``: seconds without an I/O error. The others: see the settings."""

    quiet: float = 60.0
    require_extents: bool = False
    outage: float = 600.0
    young: float = 86400.0


@dataclass(frozen=True)
class Evidence:
    """What every source says. None: it could not be found out.

    ``before`` and ``after``: the attachment when the first probe began, and after the second.
    ``ledger``: this node's. ``mirror``: the image's metadata. ``extents``: the cluster.
    ``quiet_for``: seconds since the kernel logged an error of this device or its client.
    ``cluster_size``: the image's size in bytes, from the cluster.
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
    witness: statement.Statement = statement.NO_CLUSTER  # the PersistentVolume


@dataclass(frozen=True)
class Mapped:
    """The Ceph client of a device: its cluster, and the monitors' addresses that it was given.
    ``others``: those that the clients of other devices were given."""

    fsid: str = ""
    monitors: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()


class ErrorLog:
    """When the kernel last logged an I/O error, by device and by Ceph client.

    Times are CLOCK_MONOTONIC seconds. ``readable`` False: nothing is known.
    """

    MOST_DEVICES = 4096
    MOST_CLIENTS = 256
    OF_DEVICE = tuple(
        re.compile(pattern)
        for pattern in (
            *kmsg.IO_ERRORS.values(),
            r"rbd: (?P<device>rbd\d+): .*(?:result -\d+|watch error|failed)",
            r"block (?P<device>nbd\d+): (?:.*(?:error|failed|timed out)|Dead|Possible stuck)",
            r"EXT4-fs (?:error|warning) \(device (?P<device>[\w-]+)\)",
            r"XFS \((?P<device>[\w-]+)\): .*(?:[Ee]rror|[Ss]hut|Corruption)",
            r"BTRFS:? \w+ \(device (?P<device>[\w-]+).*(?:errno=|errs: |forced readonly)",
        )
    )
    # libceph does not name the device. Newer kernels name the cluster (fsid), and lines about a
    # monitor its address; the others count for every RBD device. A connection that closes while
    # OPEN is normal (idle ones are dropped); one that cannot be made is an error.
    OF_CLIENT = re.compile(
        r"libceph(?: \((?P<fsid>\S+) \d+\))?: (?:mon\d+ \(\d+\)(?P<monitor>\S+) )?"
        r".*(?:mismatch|session lost|osd\d+ down|bad |[Ee]rror|timed out|timeout|blocklist"
        r"|blacklist|socket closed \(con state (?!OPEN))"
    )
    # The kernel limits how often it prints; an error of any device may be among the rest.
    SUPPRESSED = re.compile(
        r"(?:blk_print_req_error|print_req_error|buffer_io_error|rbd).*suppressed"
    )

    def __init__(self) -> None:
        self.readable = False
        self._devices: dict[str, float] = {}
        self._clients: dict[str, float] = {}  # by fsid or monitor; empty: any
        self._any = -math.inf

    def note(self, text: str, time: float) -> None:
        """One line of the kernel's log."""
        for pattern in self.OF_DEVICE:
            if match := pattern.search(text):
                self._devices[match["device"]] = time
                if len(self._devices) > self.MOST_DEVICES:
                    oldest = min(self._devices, key=lambda name: self._devices[name])
                    self._any = max(self._any, self._devices.pop(oldest))
        if match := self.OF_CLIENT.search(text):
            about = match["fsid"] or match["monitor"] or ""
            known = about in self._clients or len(self._clients) < self.MOST_CLIENTS
            self._clients[about if known else ""] = time
        if self.SUPPRESSED.search(text):
            self._any = max(self._any, time)

    def lost(self, time: float) -> None:
        """Lines were overwritten before they were read."""
        self._any = max(self._any, time)

    def quiet_for(self, device: str, client: Mapped | None, now: float) -> float | None:
        """Seconds since the last error that concerns the device; infinite without one.

        ``client``: None for a device that is no RBD image.
        """
        if not self.readable:
            return None
        last = max(self._devices.get(device, -math.inf), self._any)
        if client is not None:
            ours = (t for about, t in self._clients.items() if _concerns(about, client))
            last = max(last, *ours, -math.inf)
        return now - last


def _concerns(about: str, client: Mapped) -> bool:
    """Whether a line about this cluster or monitor is about the client; in doubt it is. A monitor
    that nobody was given was learnt later, by any of them."""
    if ":" in about:  # an address
        return about in client.monitors or not client.monitors or about not in client.others
    return about in ("", client.fsid) or not client.fsid


def raw_seconds(driver: str, ends_with_disk: bool) -> float:
    """How long a raw block volume may be written without an agent that renews it.

    ``ends_with_disk``: the kernel ends a lease when a new disk gets its number. Then it may last as
    long as the attachment, except with drivers whose disks stay and are attached anew.
    """
    return math.inf if ends_with_disk and driver in NEW_DISKS else RAW_SECONDS


def grace_seconds(driver: str, ends_with_disk: bool) -> float:
    """How long a lease holds without an agent that is alive; 0: to its end.

    Where disks stay, only an agent sees that another medium has come to the device.
    """
    return 0.0 if ends_with_disk and driver in NEW_DISKS else GRACE_SECONDS


# --- the decision


def undisputed(
    first: Verdict, *, leased: bool, attached: bool, asked: bool, writer: tuple[str, ...] = ()
) -> tuple[str, ...] | None:
    """The reasons against a format when the first probe settles it; None: ask every source.

    ``writer``: what ``at_work`` says of the process to which the lease belongs, or did until it
    expired.
    ``asked``: somebody tried to write, or the device is new. A lease that ended unused is given
    again only then.
    """
    if first.verdict is not Kind.BLANK_VERIFIED:
        return (f"it is not blank: {first}",)
    if writer or leased:
        return writer
    if not attached:
        return ("the guard is not attached",)
    if not asked:
        return ("its lease ended unused; the next attempt to write gets a new one",)
    return None


def at_work(writer: int, *, seen: bool = True, ended: bool = False) -> tuple[str, ...]:
    """The reason against a format by another process than the writer, which may be none.

    ``seen``: the agent sees the host's processes, and so whether that one has ended. ``ended``: it
    has, and the lease is not freed yet.
    """
    if writer and ended:
        return (f"process {writer} had the lease and has ended: the next look frees the lease",)
    if writer and not seen:
        end = "does not show whether it has ended: wait for the end of the lease"
        return (f"process {writer} has the lease, and the agent's pid namespace {end}",)
    return (f"process {writer} formats it now: wait for its end",) if writer else ()


def refusals(evidence: Evidence, policy: LeasePolicy) -> tuple[str, ...]:
    """Why the device may not be formatted without an operator's permission; empty: it may."""
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
            f"{policy.quiet:g}s without one are needed"
        )
    return tuple(reasons)


def _of_device(evidence: Evidence) -> list[str]:
    reasons = []
    if evidence.before is None or evidence.after is None:
        reasons.append("the device was detached")
    elif evidence.before != evidence.after:
        reasons.append("another device was attached to its number between the probes")
    elif not evidence.after[3]:
        reasons.append("the device does not name its volume, so the ledger cannot be asked")
    elif evidence.after[1] is None:
        reasons.append("this kernel does not number attachments (DISKSEQ, Linux 5.15)")
    if evidence.snapshot:
        reasons.append("it is a snapshot")
    if evidence.read_only is None:
        reasons.append("it is not known whether it is read-only")
    elif evidence.read_only:
        reasons.append("it is attached read-only")
    if evidence.in_use is None:
        reasons.append("it is not known whether it is in use")
    elif evidence.in_use:
        reasons.append("it is mounted, or another device is stacked on it")
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
            reasons.append(f"the {which} probe read another attachment")
    return reasons


def _of_memory(evidence: Evidence, policy: LeasePolicy) -> list[str]:
    reasons = []
    no_extents = evidence.extents is Knowledge.NONE
    for which, knowledge in (("ledger", evidence.ledger), ("image's metadata", evidence.mirror)):
        if knowledge is Knowledge.CONTENT:
            reasons.append(f"the {which} says that it holds data")
        elif knowledge is Knowledge.MAYBE and not no_extents:
            reasons.append(
                f"the {which} says that a format was permitted before and may have happened"
            )
        elif knowledge is Knowledge.UNKNOWN:
            reasons.append(f"the {which} cannot be read ({evidence.why_unknown})")
    if evidence.ledger is Knowledge.NOT_ASKED:
        reasons.append("the ledger was not asked")
    if evidence.extents is Knowledge.CONTENT:
        reasons.append("the cluster says that extents of it are allocated")
    elif evidence.extents is Knowledge.NOT_ASKED:
        if evidence.is_rbd and policy.require_extents:
            reasons.append("no credentials for its cluster are configured (require_extents)")
    elif not no_extents:
        reasons.append(f"the cluster could not say what is allocated ({evidence.why_unknown})")
    reasons += statement.refusals(
        evidence.witness, no_extents=no_extents, outage=policy.outage, young=policy.young
    )
    size = evidence.after[2] if evidence.after is not None else None
    if None not in (size, evidence.cluster_size) and size != evidence.cluster_size:
        reasons.append(
            f"the image has {evidence.cluster_size} bytes in its cluster, the device has {size}"
        )
    return reasons


# --- the steps


class Step(enum.Enum):
    """Each step is done completely or not at all, in the order given."""

    RECORD_PERMISSION = enum.auto()  # in the ledger, durable
    MIRROR = enum.auto()  # copy the ledger's entry into the image's metadata; may fail
    CONFIRM = enum.auto()  # still the same attachment; otherwise revoke the lease and stop here
    RESERVE = enum.auto()  # a lease that has ended: a new disk takes it away in the kernel
    GRANT = enum.auto()  # the lease in the kernel, if the reserved one is still there
    FREE = enum.auto()  # the lease belongs to the next process that uses it
    SHORTEN = enum.auto()  # the lease ends in LINGER_SECONDS
    REVOKE = enum.auto()
    RECORD_CONTENT = enum.auto()
    CLOSE_PERMISSION = enum.auto()  # it was not used


# The writer closed the device, or is one that an earlier agent did not note: it may open it again.
LINGER_SECONDS = 5.0

GRANTING = (Step.RECORD_PERMISSION, Step.MIRROR, Step.RESERVE, Step.CONFIRM, Step.GRANT)
# A pod waits for a raw block volume, and its cluster may be slow.
PUBLISHING = (Step.RECORD_PERMISSION, Step.RESERVE, Step.CONFIRM, Step.GRANT, Step.MIRROR)
RENEWING = (Step.CONFIRM, Step.GRANT)

NEW_DISKS = frozenset({"rbd", "device-mapper"})  # drivers that add a disk at each attach
RAW_SECONDS = 120.0
GRACE_SECONDS = 5.0
BEAT_SECONDS = 1.0  # between signs of life of an agent


def met(lease_diskseq: int | None, known: Attachment | None, now: Attachment) -> tuple[Step, ...]:
    """What to do about a lease on the number of a device that is checked.

    ``lease_diskseq``: the attachment the kernel's lease was given to (0: not known), None without a
    lease. ``known``: the attachment that this process saw there before; None after its start.
    """
    if lease_diskseq is None or known == now:
        return ()
    if lease_diskseq and lease_diskseq == now[1] and (known is None or same_medium(known, now)):
        return ()  # it was given to this medium, by an earlier agent too; only its size changed
    return (Step.REVOKE,)


def same_medium(one: Attachment, other: Attachment) -> bool:
    """Whether only the size differs. Of nbd a DISKSEQ may outlive its volume: netlink connects
    another one without a new number."""
    return (*one[:2], one[3]) == (*other[:2], other[3])


def broken_off(begun: Sequence[Step]) -> tuple[Step, ...]:
    """What to do after the last of the ``begun`` steps failed.

    A permission that was recorded and whose GRANT was not begun permitted nothing, and this process
    knows it. One whose GRANT was begun may have reached the kernel: it stays open. What the kernel
    has for the number goes first: no opens are counted under a reservation, and an earlier
    permission, under which somebody wrote, would be closed as unused.
    """
    if Step.RECORD_PERMISSION not in begun[:-1] or Step.GRANT in begun:
        return ()
    return (Step.REVOKE, Step.CLOSE_PERMISSION, Step.MIRROR)


def conclude(
    *,
    has_content: bool,
    blank: bool,
    leased: bool,
    expired: bool,
    opens: int,
    permitted: bool,
    earlier: bool,
    by_pod: bool = False,
    over: bool = False,
    writing: bool = False,
    everybodys: bool = False,
    allowed: bool = False,
) -> tuple[Step, ...]:
    """What to do after a probe.

    ``leased``: the kernel has a lease for the device; ``expired``: it has ended; ``opens``: write
    opens under it; ``permitted``: the ledger has an open permission. Only the kernel's own count
    under an expired lease closes a permission as unused: without the lease (after a reboot) nobody
    knows the count, and the permission stays open. ``by_pod``: it is of a raw block volume, which
    no count closes: a pod that opened the device once may go on writing without another open.
    ``earlier``: another permission was open when this one was given. It stays open, so the lease
    goes first: were the agent killed in between, its count would close that one, too.

    The kernel gives the lease to the first process that writes. ``over``: that one had ended before
    the probe, or closed the device; ``writing``: it is there after it, and may open the device
    again, as programs do that make a file system. ``everybodys``: the lease of an agent that gave
    it to no process.
    ``allowed``: by an operator, whatever is there: each try passes.
    """
    closable = permitted and not by_pod
    if has_content:
        end: tuple[Step, ...] = (Step.REVOKE,) if leased else ()
        if leased and not expired and (writing or (everybodys and opens)):
            end = () if writing and not over else (Step.SHORTEN,)
        return (Step.RECORD_CONTENT, Step.MIRROR, *end)
    if not leased or not expired:
        return (Step.FREE,) if leased and over and (blank or allowed) else ()
    if writing and not over:
        return ()  # it goes on writing after the lease, so nobody else gets one
    if opens == 0 and closable and blank:
        if earlier:
            return (Step.REVOKE, Step.CLOSE_PERMISSION, Step.MIRROR)
        return (Step.CLOSE_PERMISSION, Step.MIRROR, Step.REVOKE)
    return (Step.REVOKE,) if opens or not closable else ()


def detached(opens: int, permitted: bool, by_pod: bool = False) -> tuple[Step, ...]:
    """What to do after a device was detached and its lease revoked, which let ``opens`` pass."""
    unused = opens == 0 and permitted and not by_pod
    return (Step.CLOSE_PERMISSION, Step.MIRROR) if unused else ()
