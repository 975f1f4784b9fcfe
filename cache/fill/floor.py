"""What the disk of the store keeps free beside the reserve of the settings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Least:
    """What stays free, whatever the settings say: of bytes and of inodes a share and an amount."""

    share: float = 0.0
    bytes: int = 0
    inodes_share: float = 0.0
    inodes: int = 0
