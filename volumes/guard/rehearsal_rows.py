"""The rows of the rehearsal (``rehearsal``), and what child processes read for it. Imports little:
the process that calls fork from keeps what they load as long as the agent runs.
"""

import dataclasses
import mmap
import os
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import kit.errors
import kit.formats
from volumes.guard import record

MOST_ROWS = 256  # the one that was added to longest ago goes
_PAGE = 4096


class Would(StrEnum):
    """``LEASE``: refuse the first try, and permit the next one: the device was proven blank.
    ``REFUSE``: it held something, or could not be read. ``LOOK``: nobody knows what it held: the
    write came before the first look, or after another write. It is refused until a look decides."""

    LEASE = "lease"
    REFUSE = "refuse"
    LOOK = "look"


@dataclass(frozen=True)
class Row:
    """``title``: what tells the device apart where its name does not, as the setting ``own`` takes
    it. ``first``, ``last``: Unix seconds. Of several writes all else is of the last one."""

    would: Would
    device: str
    title: str
    whose: str
    held: str  # what the probe before the write found
    program: str
    command: str
    pod: str
    first: float
    last: float
    times: int = 1

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for writes of one row."""
        if self.would is not Would.REFUSE:
            return self.would, self.program
        return self.would, self.title or self.device, self.whose, self.held, self.program


@dataclass
class Rows:
    """``times``: writes of each kind, also of rows that went. ``lost``: how many rows went because
    there were more."""

    since: float  # Unix seconds
    lost: int = 0
    times: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: OrderedDict[tuple[str, ...], Row] = dataclasses.field(default_factory=OrderedDict)

    def add(self, new: Row) -> None:
        self.times[str(new.would)] += new.times
        before = self.kept.pop(new.key, None)
        if before is not None:
            new = dataclasses.replace(new, first=before.first, times=before.times + new.times)
        self.kept[new.key] = new
        refused = [key for key, each in self.kept.items() if each.would is Would.REFUSE]
        if len(refused) > MOST_ROWS:  # of the others there is one of a program
            del self.kept[refused[0]]
            self.lost += 1
        elif len(self.kept) > 2 * MOST_ROWS:  # which may change its name each time
            self.kept.popitem(last=False)
            self.lost += 1

    def drop(self, devices: Collection[tuple[str, str]], before: float) -> None:
        """Rows of these devices (name and title), which are the node's own by now, and old ones."""
        for key, each in list(self.kept.items()):
            own = each.would is Would.REFUSE and (each.device, each.title) in devices
            if own or each.last < before:
                self.times[str(each.would)] -= each.times
                del self.kept[key]

    def as_json(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(each) for each in self.kept.values()]
        times = {str(would): self.times[str(would)] for would in Would}
        return {"since": self.since, "lost": self.lost, "times": times, "rows": rows}


def of_json(fields: Mapping[str, Any]) -> Rows:
    """Raises whatever a wrong shape leads to."""
    found = Rows(float(fields["since"]))
    for each in fields["rows"]:
        found.add(Row(**{**each, "would": Would(each["would"])}))
    found.lost = int(fields["lost"])
    found.times = Counter({str(would): int(fields["times"][would]) for would in Would})
    return found


def load(state_dir: str) -> dict[str, Any] | None:
    """What the file says; None without it, or when it is damaged: then it is set aside. HostError
    when a newer agent wrote it, or when it cannot be read now."""
    file = record.rehearsal_file(Path(state_dir))
    found = kit.formats.read(file, record.FORMAT, of_json)
    if isinstance(found, kit.formats.Damage) and found.unread:
        raise kit.errors.HostError(str(file), found.why, "see the disk of the state directory")
    return found.as_json() if isinstance(found, Rows) else None


def try_read(path: str) -> None:
    """Read the first and the last page of a device, past the page cache. OSError. A probe of a
    device whose reads fail makes hundreds, and the kernel then keeps errors of others to itself."""
    with mmap.mmap(-1, _PAGE) as page:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            for offset in (0, max(0, size // _PAGE - 1) * _PAGE):
                os.preadv(descriptor, [page], offset)
        finally:
            os.close(descriptor)
