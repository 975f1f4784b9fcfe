"""Entries that could not be copied, read from a generation's index."""

import os
from typing import TYPE_CHECKING, Any

import kit.child
import kit.errors
from cache.fill import index

if TYPE_CHECKING:
    from cache.dataset import Dataset

SECONDS = 15.0


async def page(dataset: "Dataset", limit: int, after: str) -> dict[str, Any]:
    """``limit`` of them from behind ``after`` (the ``next`` of the page before)."""
    number, _, name = after.partition("/")
    if after and not number.isdigit():
        raise kit.errors.SettingsError("after", f"{after!r} is no 'next' of ours", "leave it out")
    path = f"{dataset.folder}/{index.NAME}"
    try:
        start = [int(number or 0), os.fsdecode(bytes.fromhex(name))]
    except ValueError as error:
        raise kit.errors.SettingsError(
            "after", f"{after!r} is no 'next' of ours", "leave it out"
        ) from error
    found: dict[str, Any] = await kit.child.call(read, path, limit, start, deadline=SECONDS)
    return found


def read(path: str, limit: int, after: list[Any]) -> dict[str, Any]:
    """Runs in a child. Names that are no UTF-8 are shown with \\xNN escapes."""
    try:
        opened = index.Index.read_only(path)
    except OSError:
        return {"failures": [], "next": None}  # nothing was ever scanned
    try:
        rows = opened.failures(limit, (int(after[0]), str(after[1])))
        failures = [
            {"path": _shown("/".join([*opened.path(number), name])), "reason": reason}
            for number, name, reason in rows
        ]
    finally:
        opened.close()
    # In hex: a name may have bytes that no URL carries.
    more = f"{rows[-1][0]}/{os.fsencode(rows[-1][1]).hex()}" if len(rows) == limit else None
    return {"failures": failures, "next": more}


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
