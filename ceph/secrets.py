"""The one reader of Ceph keys. No error, log line or command line ever holds a key.

A key has a type. Ceph 16 and 18 know one only, aes; clusters that were made with Ceph 20.2.4 give
their users keys of another, aes256k. A client that does not know it fails as with a wrong key or as
if nobody answered; so it is not asked.
"""

import base64
import contextlib
import re
import subprocess
from pathlib import Path

import kit.errors
import kit.files

LARGEST = 64 * 1024  # bytes; a keyring may hold the keys of many users
READ_SECONDS = 10.0
_KEY = re.compile(r"[A-Za-z0-9+/]{20,}={0,2}")
_AES256K = b"\2\0"  # a key's first two bytes are its type
_KNOWN = "19.2.6, 20.2.4"  # the first clients that know the type, one of each series
_CLIENT_SECONDS = 5.0


async def fetch(path: Path, user: str, thing: str, *, by_kernel: bool = False) -> str:
    """As ``read``, in a child: the file may be on a file system that hangs. SourceError."""
    import kit.child  # the child, which reads, does without an event loop

    try:
        key: str = await kit.child.call(
            read, str(path), user, thing, by_kernel, deadline=READ_SECONDS
        )
        return key
    except kit.child.DeadlineError as error:
        raise kit.errors.SourceError(
            thing,
            f"secret_file {path} cannot be read ({error.cause})",
            "put the user's key on a disk of the node; it is tried again",
        ) from None


def read(path: str | Path, user: str, thing: str, by_kernel: bool = False) -> str:
    """The key of ``user`` (without 'client.') in a bare secret file or a keyring. May hang.

    SourceError about ``thing``, whose text never shows what the file holds; also when this node's
    Ceph client cannot use the key. ``by_kernel``: that client is not asked to.
    """
    try:
        text = kit.files.read_small(path, LARGEST).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise kit.errors.SourceError(
            thing, f"secret_file {path} cannot be read ({why})", "put the user's key there"
        ) from None
    key = _of_keyring(text, user) if "[" in text else text
    if key is None:
        raise kit.errors.SourceError(
            thing, f"secret_file {path} has no key for client.{user}", "add it, or name the user"
        )
    if not _KEY.fullmatch(key):
        raise kit.errors.SourceError(
            thing,
            f"secret_file {path} does not hold a Ceph key",
            "put the output of 'ceph auth print-key' there",
        )
    if not by_kernel and is_aes256k(key) and (client := node_client()) and not knows(client):
        raise unknown(user, thing, f"this node's Ceph client {client}")
    return key


def is_aes256k(key: str) -> bool:
    with contextlib.suppress(ValueError):
        return base64.b64decode(key).startswith(_AES256K)
    return False


def knows(client: str) -> bool:
    """Whether a Ceph client of this version ("20.2.4") can use keys of type aes256k."""
    version, *known = ([int(n) for n in v.split(".")] for v in (client, *_KNOWN.split(", ")))
    return version >= known[-1] or any(version[:2] == k[:2] and version >= k for k in known)


def unknown(user: str, thing: str, client: str) -> kit.errors.SourceError:
    """The error for a key that ``client`` cannot use."""
    return kit.errors.SourceError(
        thing,
        f"the key of client.{user} is of type aes256k, which {client} does not know",
        f"use a client that does (Ceph {_KNOWN} or newer, Linux 7.0), or give the user a key of "
        f"type aes: 'ceph mon set auth_allowed_ciphers aes,aes256k', 'ceph auth rotate "
        f"client.{user} --key-type aes'",
    )


def node_client() -> str:
    """Version of this node's Ceph client as its own tool gives it; empty without one."""
    try:
        done = subprocess.run(
            ("rados", "--version"), capture_output=True, text=True, timeout=_CLIENT_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    return found[0] if found else ""


def has_key(secret_file: str, user: str, by_kernel: bool = False) -> str:
    """For doctor. SourceError when the file holds no key of the user, or one that is of no use."""
    read(secret_file, user, f"key of client.{user}", by_kernel)
    return f"{secret_file} has a key for client.{user}"


def _of_keyring(text: str, user: str) -> str | None:
    section = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("["):
            section = stripped.strip("[]")
        key, equals, value = stripped.partition("=")
        if equals and key.strip() == "key" and section == f"client.{user}":
            return value.strip()
    return None
