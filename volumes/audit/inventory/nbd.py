"""Which image an nbd device shows: what its rbd-nbd was told to map. In the scan child only.

``rbd-nbd [options] map|attach [POOL/[NAMESPACE/]]IMAGE[@SNAPSHOT]`` (rbd-nbd(8)); the process is
named by /sys/block/nbdN/pid.
"""

import functools
import os
import re

from volumes.audit.inventory.model import Image

_SPEC = re.compile(r"(?:([^/@]+)/(?:([^/@]+)/)?)?([^/@]+)(?:@([^/@]+))?")
_DEFAULT_POOL = "rbd"  # rbd_default_pool
# Every other option takes the next word; so one that is not known can hide an image, never make
# one up.
_FLAGS = frozenset(
    {
        "--exclusive",
        "--quiesce",
        "--read-only",
        "--try-netlink",
        "--show-cookie",
        "--notrim",
        "-d",
        "-f",
    }
)
_LARGEST = 1 << 16
MOST_KEPT = 4096


def parse(words: list[str]) -> Image | None:
    """The image from the words of a command line; None when it is not rbd-nbd mapping one."""
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
        snapshot = f"id {options['--snap-id']}"  # it is not the image's head, that is what counts
    return Image(pool or _DEFAULT_POOL, image, namespace=namespace, snapshot=snapshot)


def image(proc: str, home: str, diskseq: int) -> Image | None:
    """The image behind the nbd device at ``home`` in sysfs; None when nothing says it.

    Read once for each attach (``diskseq``): a command line is read from the process's memory,
    which can hang with the process.
    """
    try:
        with open(f"{home}/pid", encoding="ascii") as stream:  # noqa: PTH123
            pid = int(stream.read())
        return (_told if diskseq else _told.__wrapped__)(proc, pid, home, diskseq)
    except (OSError, ValueError):
        return None  # not attached, or its process has gone


@functools.lru_cache(maxsize=MOST_KEPT)
def _told(proc: str, pid: int, home: str, diskseq: int) -> Image | None:
    with open(f"{proc}/{pid}/cmdline", "rb") as stream:  # noqa: PTH123
        words = stream.read(_LARGEST).decode("utf-8", "surrogateescape")
    return parse(words.removesuffix("\0").split("\0"))
