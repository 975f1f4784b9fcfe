"""What to put right in containerd so that each pin is whole and nothing is left of one. Pure."""

from dataclasses import dataclass

from preheat.runtimes import base

# A hold that expires is renewed when less than this share of its time is left.
RENEW_BELOW = 0.5
# One with so much more than its time was made before the setting was shortened.
SHORTENED_SECONDS = 60.0


@dataclass(frozen=True)
class Mends:
    """``unmarked``: pins whose record lost its mark. ``stray``: records whose mark of ours stands
    for no pin. ``renew``: holds whose expiry must change.
    """

    unmarked: tuple[base.Hold, ...] = ()
    stray: tuple[base.Record, ...] = ()
    renew: tuple[base.Hold, ...] = ()


def decide(
    inventory: base.Inventory, honoured: bool | None, release_after: float | None, now: float
) -> Mends:
    """``honoured``: whether the runtime tells the kubelet about marks; None while not known."""
    records = {each.name: each for each in inventory.records}
    # What somebody else pins is left to them.
    others = {r.target.digest for r in inventory.records if r.pinned and r.name not in _ids(r)}
    pins = {hold.image_id: hold for hold in inventory.held("pin") if hold.image_id}
    unmarked = []
    for image_id, hold in pins.items():
        record = records.get(image_id)
        if honoured is False or record is None or record.target.digest in others:
            continue
        # Setting a mark also tells whether the runtime honours it.
        if honoured is None or not (record.pinned and record.ours):
            unmarked.append(hold)
    kept = pins.keys() if honoured is not False else set()
    stray = [each for each in inventory.records if each.ours and each.name not in kept]
    lasting = [hold for hold in inventory.holds if hold.role != "pull"]
    renew = [hold for hold in lasting if _is_due(hold, release_after, now)]
    return Mends(tuple(unmarked), tuple(stray), tuple(renew))


def _ids(record: base.Record) -> tuple[str, ...]:
    """The names under which we mark a record: its image id."""
    return (record.name,) if record.name.startswith("sha256:") else ()


def _is_due(hold: base.Hold, release_after: float | None, now: float) -> bool:
    if release_after is None:
        return hold.expires is not None
    if hold.expires is None:
        return True
    left = hold.expires - now
    return not release_after * RENEW_BELOW <= left <= release_after + SHORTENED_SECONDS
