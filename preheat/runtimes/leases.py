"""Holds as containerd leases: the lease is the whole state, in its labels.

id       nodeagent-pull-<h>, nodeagent-pin-<h>, nodeagent-note-<h>; h is 24 hex digits of a hash
         over the reference (and the digest, for a pin), so two agents make the same lease
labels   nodeagent/owner = preheat        what our listing filters by
         nodeagent/role, /ref, /by, /state, /keep, /created, /image-id
         nodeagent/target = JSON          media type, digest and size of the top descriptor
         nodeagent/name.<n>               image records to put back
         containerd.io/gc.expire          pulls only: nothing stays for ever when an agent dies
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping
from typing import cast

from preheat import manifest
from preheat.runtimes import base
from preheat.runtimes import messages as m

OWNER_FILTER = 'labels."nodeagent/owner"==preheat'
EXPIRE = "containerd.io/gc.expire"
_P = "nodeagent/"
MOST_NAMES = 16


def lease_id(role: str, ref: str, digest: str = "") -> str:
    key = hashlib.sha256(f"{ref}\n{digest}".encode()).hexdigest()[:24]
    return f"nodeagent-{role}-{key}"


def labels(hold: base.Hold) -> dict[str, str]:
    found = {
        _P + "owner": "preheat",
        _P + "role": hold.role,
        _P + "ref": hold.ref,
        _P + "by": hold.by,
        _P + "created": f"{hold.created:.0f}",
    }
    for key, value in (("state", hold.state), ("keep", hold.keep), ("image-id", hold.image_id)):
        if value:
            found[_P + key] = value
    if hold.target is not None:
        found[_P + "target"] = json.dumps(dataclasses.asdict(hold.target), separators=(",", ":"))
    for position, name in enumerate(hold.names[:MOST_NAMES]):
        found[f"{_P}name.{position}"] = name
    if hold.expires is not None:
        when = datetime.datetime.fromtimestamp(hold.expires, datetime.UTC)
        found[EXPIRE] = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def read(lease: m.Lease) -> base.Hold | None:
    """The hold in a lease; None when it is not one of ours or somebody wrote nonsense there."""
    found = lease.labels
    role, by = found.get(_P + "role", ""), found.get(_P + "by", "")
    ref = found.get(_P + "ref", "")
    if role not in ("pull", "pin", "note") or by not in ("operator", "policy", "retained"):
        return None
    try:
        target = _target(found.get(_P + "target"))
        created = float(found.get(_P + "created", "0"))
        expires = None
        if EXPIRE in found:
            expires = datetime.datetime.fromisoformat(found[EXPIRE]).timestamp()
    except (ValueError, TypeError, KeyError):
        return None
    if not ref or (role == "pin" and target is None):
        return None
    return base.Hold(
        id=lease.id,
        role=cast(base.Role, role),
        ref=ref,
        by=cast(base.By, by),
        target=target,
        image_id=found.get(_P + "image-id", ""),
        names=_names(found),
        state=found.get(_P + "state", ""),
        keep=found.get(_P + "keep", ""),
        created=created,
        expires=expires,
    )


def _names(found: Mapping[str, str]) -> tuple[str, ...]:
    keys = (f"{_P}name.{position}" for position in range(MOST_NAMES))
    return tuple(found[key] for key in keys if key in found)


def _target(text: str | None) -> manifest.Target | None:
    if text is None:
        return None
    value = json.loads(text)
    target = manifest.Target(str(value["media_type"]), str(value["digest"]), int(value["size"]))
    if not manifest.is_digest(target.digest) or target.size <= 0 or not target.media_type:
        raise ValueError(text)
    return target
