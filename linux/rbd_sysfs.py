"""RBD images and Ceph clients behind this node's block devices.

The kernel's client (krbd) names image and client of /dev/rbdN in /sys/bus/rbd/devices/N
(Documentation/ABI/testing/sysfs-bus-rbd). rbd-nbd names its image only on its command line:
``rbd-nbd [options] map|attach [POOL/[NAMESPACE/]]IMAGE[@SNAPSHOT]`` (rbd-nbd(8)). Reading a command
line reads the memory of the process and can hang with it, so ``nbd_image`` is for child processes.
"""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_SPEC = re.compile(r"(?:([^/@]+)/(?:([^/@]+)/)?)?([^/@]+)(?:@([^/@]+))?")
_DEFAULT_POOL = "rbd"  # rbd_default_pool
# Every other option of rbd-nbd takes the next word. An unknown flag can therefore hide the image,
# but never lead to a wrong one.
_FLAGS = frozenset(
    (
        *("--exclusive", "--quiesce", "--read-only", "--try-netlink", "--show-cookie"),
        *("--notrim", "-d", "-f"),
    )
)
_LONGEST_COMMAND = 1 << 16
_MOST_KEPT = 4096


@dataclass(frozen=True)
class RbdImage:
    """An RBD image as the cluster names it. ``snapshot`` is empty for the image itself."""

    pool: str
    name: str
    namespace: str = ""
    snapshot: str = ""
    image_id: str = ""
    fsid: str = ""
    pool_id: int = 0

    @property
    def spec(self) -> str:
        """As the rbd command takes it."""
        middle = f"{self.namespace}/" if self.namespace else ""
        end = f"@{self.snapshot}" if self.snapshot else ""
        return f"{self.pool}/{middle}{self.name}{end}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.pool, self.namespace, self.name

    @property
    def head(self) -> str:
        """The image that a snapshot belongs to: what must not be mapped twice."""
        return f"{self.fsid}:{self.pool}/{self.namespace}/{self.name}"


@dataclass(frozen=True)
class RbdClient:
    """The Ceph client behind a kernel mapping."""

    mapping_id: str  # what must be written to sysfs to unmap it
    client: str  # "client4144", as in kernel messages; empty when the driver does not say
    address: str  # "10.0.0.5:0/123456"
    features: int = 0
    config: str = ""  # map options


def text(path: str) -> str:
    """A small file of sysfs or /proc; empty when it is not there or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
            return stream.read().strip()
    except OSError:
        return ""


def listed(folder: str) -> list[str]:
    """Names in a directory; none when it is not there, or its process or device has gone."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def integer(digits: str, base: int = 10) -> int:
    """0 when the text is no number."""
    try:
        return int(digits, base)
    except ValueError:
        return 0


def mapping(number: str, sysfs: str | Path) -> tuple[RbdImage | None, RbdClient | None]:
    """Image and client of /dev/rbd<number>; None where the kernel has no such mapping."""
    home = f"{sysfs}/bus/rbd/devices/{number}"
    if not os.path.isdir(home):
        return None, None
    snapshot = text(f"{home}/current_snap")
    image = RbdImage(
        pool=text(f"{home}/pool"),
        name=text(f"{home}/name"),
        namespace=text(f"{home}/pool_ns"),
        snapshot="" if snapshot == "-" else snapshot,
        image_id=text(f"{home}/image_id"),
        fsid=text(f"{home}/cluster_fsid"),
        pool_id=integer(text(f"{home}/pool_id")),
    )
    client = RbdClient(
        mapping_id=number,
        client=text(f"{home}/client_id"),
        address=text(f"{home}/client_addr"),
        features=integer(text(f"{home}/features"), 16),
        # It begins with addresses and the user's name, and may hold or locate the key.
        config=re.sub(r"(secret|key)=[^, ]*", r"\1=<hidden>", text(f"{home}/config_info")),
    )
    return image, client


def supported_features(sysfs: str | Path = "/sys") -> int:
    """Image features that the kernel's client has; 0 when it is not loaded."""
    return integer(text(f"{sysfs}/bus/rbd/supported_features"), 16)


def nbd_server(name: str, sysfs: str | Path) -> int | None:
    """The process that serves the nbd device ``name``, for example rbd-nbd; None: none, or another
    driver's device."""
    pid = text(f"{sysfs}/block/{name}/pid")
    return int(pid) if pid.isdecimal() else None


def nbd_image(home: str, diskseq: int | None, proc: str | Path) -> RbdImage | None:
    """The image behind the nbd device at ``home`` in sysfs; None when it is unknown. Can hang.

    A command line is read once for each attach, which ``diskseq`` identifies.
    """
    try:
        pid = int(text(f"{home}/pid"))
        if diskseq is None:
            return _image_of_process(f"{proc}/{pid}")
        return _image_of_attach(f"{proc}/{pid}", home, diskseq)
    except (OSError, ValueError):
        return None  # not attached, or its process has ended


@functools.lru_cache(maxsize=_MOST_KEPT)
def _image_of_attach(process: str, home: str, diskseq: int) -> RbdImage | None:
    return _image_of_process(process)


def _image_of_process(process: str) -> RbdImage | None:
    with open(f"{process}/cmdline", "rb") as stream:  # noqa: PTH123
        words = stream.read(_LONGEST_COMMAND).decode("utf-8", "surrogateescape")
    return parse_nbd_command(words.removesuffix("\0").split("\0"))


def parse_nbd_command(words: list[str]) -> RbdImage | None:
    """The image that a command line maps; None when it is not rbd-nbd mapping one."""
    if not words or os.path.basename(words[0]) != "rbd-nbd":
        return None
    plain: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            plain.append(word)
        elif word not in _FLAGS:
            options[name] = value if equals else next(rest, "")
    if len(plain) != 2 or plain[0] not in ("map", "attach"):
        return None
    spec = _SPEC.fullmatch(plain[1])
    if spec is None:
        return None
    pool, namespace, image, snapshot = spec.groups("")
    if not snapshot and "--snap-id" in options:
        snapshot = f"id {options['--snap-id']}"  # not the image's head, that is what counts
    return RbdImage(pool or _DEFAULT_POOL, image, namespace=namespace, snapshot=snapshot)
