"""What a probe says."""

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    HAS_FS = "has_fs"
    PARTITIONED = "partitioned"
    ENCRYPTED = "encrypted"
    BLANK_VERIFIED = "blank_verified"
    UNKNOWN_CONTENT = "unknown_content"
    AMBIVALENT = "ambivalent"
    UNREADABLE = "unreadable"
    NO_MEDIA = "no_media"
    TIMEOUT = "timeout"


CONTENT = frozenset({Kind.HAS_FS, Kind.PARTITIONED, Kind.ENCRYPTED})


@dataclass(frozen=True)
class Verdict:
    """``verdict`` and what belongs to it; the rest is empty or zero."""

    verdict: Kind
    device: str = ""
    type: str = ""  # has_fs, encrypted: libblkid's TYPE; partitioned: its PTTYPE
    uuid: str = ""
    label: str = ""
    offset: int = 0  # unknown_content: the first byte seen that is not zero
    where: str = ""  # unreadable, no_media: what could not be done
    errno: int = 0
    size: int = 0  # bytes
    diskseq: int | None = None  # the kernel's number of this attachment
    bytes_read: int = 0
    content_at: int | None = None  # unreadable: content was seen there all the same
    seconds: float = 0.0
    seed: int = 0  # of the sampled places

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> "Verdict":
        known = {name: answer[name] for name in cls.__dataclass_fields__ if name in answer}
        return cls(**{**known, "verdict": Kind(answer["verdict"])})

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}

    @property
    def has_content(self) -> bool:
        """Something was recognised on it."""
        return self.verdict in CONTENT

    def __str__(self) -> str:
        match self.verdict:
            case Kind.HAS_FS | Kind.ENCRYPTED | Kind.PARTITIONED:
                return f"{self.verdict} {self.type} {self.uuid}".strip()
            case Kind.UNKNOWN_CONTENT:
                return f"{self.verdict} at offset {self.offset}"
            case Kind.UNREADABLE:
                code = errno.errorcode.get(self.errno, str(self.errno))
                return f"{self.verdict} ({self.where}: {code}, {os.strerror(self.errno)})"
            case _:
                return str(self.verdict)
