"""Which volumes are mounted for which pods: a small file for each, below the state directory.

A file is written before its volume is mounted and deleted after it was unmounted, so a killed agent
leaves no mount without one. After a reboot there are files without mounts; ``load`` drops those.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

import kit.errors
import kit.files
import kit.formats

log = structlog.get_logger("csi")

FOLDER = "csi"  # below the state directory
FORMAT = 1


@dataclass(frozen=True)
class Volume:
    """One mounted volume. ``pod``: namespace/name, or '' when kubelet did not say."""

    id: str
    target: str
    dataset: str
    layout: str
    pod: str = ""

    def __str__(self) -> str:
        return f"pod {self.pod or 'unknown'} has it at {self.target}"


def folder_of(state_dir: Path) -> Path:
    return state_dir / FOLDER


def file_of(folder: Path, target: str) -> Path:
    return folder / f"{hashlib.sha256(target.encode()).hexdigest()[:24]}.json"


def read(folder: Path) -> list[Volume]:
    """All that can be read; one of a newer agent, or a torn one, is left as it is."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            fields = json.loads(path.read_bytes())
            kit.formats.check(str(path), fields, FORMAT)
            fields.pop(kit.formats.KEY, None)
            found.append(Volume(**fields))
        except (OSError, ValueError, TypeError, AttributeError, kit.errors.HostError) as error:
            log.warning("record of a volume cannot be read", path=str(path), why=str(error))
    return found


def load(folder: Path, mounted: Collection[str]) -> dict[str, Volume]:
    """Volumes by their target. ``mounted``: all mount points; a volume that has none is dropped."""
    volumes = {volume.target: volume for volume in read(folder)}
    for target in [each for each in volumes if each not in mounted]:
        forget(folder, target)
        del volumes[target]
    return volumes


def write(folder: Path, volume: Volume) -> None:
    """OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fields = {kit.formats.KEY: FORMAT, **dataclasses.asdict(volume)}
    kit.files.save(file_of(folder, volume.target), json.dumps(fields).encode())


def forget(folder: Path, target: str) -> None:
    file_of(folder, target).unlink(missing_ok=True)
