"""Which volumes are mounted for which pods: a small file for each, below the state directory.

A file is written before its volume is mounted and deleted after it was unmounted, so a killed agent
leaves no mount without one. After a reboot there are files without mounts; ``load`` drops those.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

import kit.errors
import kit.formats

log = structlog.get_logger("csi")

FOLDER = "csi"  # below the state directory
FORMAT = 1


@dataclass(frozen=True)
class DatasetVolume:
    """One mounted volume. ``pod``: namespace/name, or '' when kubelet did not say."""

    id: str
    target: str
    dataset: str
    layout: str
    pod: str = ""

    def holds(self, dataset: str) -> bool:
        """Whether it is of that dataset, or may be: its record is lost."""
        return self.dataset in (dataset, "")

    def __str__(self) -> str:
        return f"pod {self.pod or 'unknown'} has it at {self.target}"


def folder_of(state_dir: Path) -> Path:
    return state_dir / FOLDER


def file_of(folder: Path, target: str) -> Path:
    return folder / f"{hashlib.sha256(target.encode()).hexdigest()[:24]}.json"


def read(folder: Path) -> list[DatasetVolume]:
    """All that can be read; one of a newer agent, or a damaged one, is left as it is."""
    found = (_one(path, kit.formats.look) for path in _paths(folder))
    return [each for each in found if isinstance(each, DatasetVolume)]


def load(folder: Path, mounted: Collection[str]) -> dict[str, DatasetVolume]:
    """Volumes by their target. ``mounted``: all mount points; a volume that has none is dropped.

    The name of a damaged record, which is kept aside, tells its target. While that is mounted, the
    volume may be of any dataset (``DatasetVolume.holds``).
    """
    volumes: dict[str, DatasetVolume] = {}
    damaged: set[Path] = set()
    for path in _paths(folder):
        one = _one(path, kit.formats.read)
        if isinstance(one, kit.formats.Damage):
            damaged.add(path)
        elif one is not None and one.target in mounted:
            volumes[one.target] = one
        elif one is not None:
            forget(folder, one.target)
    for target in mounted if damaged else ():
        if file_of(folder, target) in damaged:
            volumes[target] = DatasetVolume("", target, "", "")
    return volumes


def _paths(folder: Path) -> list[Path]:
    found = [*folder.glob("*.json"), *folder.glob(f"*.json{kit.formats.SUFFIX}")]
    return sorted({path.with_name(path.name.removesuffix(kit.formats.SUFFIX)) for path in found})


def _one(path: Path, read: Callable[..., Any]) -> DatasetVolume | kit.formats.Damage | None:
    """None for one of a newer agent, too."""
    try:
        found: DatasetVolume | kit.formats.Damage | None = read(
            path, FORMAT, lambda value: msgspec.convert(value, DatasetVolume)
        )
    except kit.errors.HostError as error:
        log.warning("record of a volume cannot be read", path=str(path), why=str(error))
        return None
    if isinstance(found, kit.formats.Damage):
        log.warning("record of a volume cannot be read", path=str(path), why=found.why)
    return found


def write(folder: Path, volume: DatasetVolume) -> None:
    """OSError."""
    file = file_of(folder, volume.target)
    kit.formats.save(str(file), dataclasses.asdict(volume), FORMAT)


def forget(folder: Path, target: str) -> None:
    kit.formats.forget(file_of(folder, target))
