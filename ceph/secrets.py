"""The one reader of Ceph keys. No error, log line or command line ever holds a key."""

import re
from pathlib import Path

import kit.errors
import kit.files

LARGEST = 64 * 1024  # bytes; a keyring may hold the keys of many users
READ_SECONDS = 10.0
_KEY = re.compile(r"[A-Za-z0-9+/]{20,}={0,2}")


async def fetch(path: Path, user: str, thing: str) -> str:
    """As ``read``, in a child: the file may be on a file system that hangs. SourceError."""
    import kit.child  # the child, which reads, does without an event loop

    try:
        key: str = await kit.child.call(read, str(path), user, thing, deadline=READ_SECONDS)
        return key
    except kit.child.DeadlineError as error:
        raise kit.errors.SourceError(
            thing,
            f"secret_file {path} cannot be read ({error.cause})",
            "put the user's key on a disk of the node; it is tried again",
        ) from None


def read(path: str | Path, user: str, thing: str) -> str:
    """The key of ``user`` (without 'client.') in a bare secret file or a keyring. May hang.

    SourceError about ``thing``, whose text never shows what the file holds.
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
    return key


def has_key(secret_file: str, user: str) -> str:
    """For doctor. SourceError when the file holds no key of the user."""
    read(secret_file, user, f"key of client.{user}")
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
