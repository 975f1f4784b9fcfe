"""What the agent gives a pass: its source, its generation and its limits."""

from typing import Any

from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.store import identity
from linux import mountinfo


def fill(dataset: Dataset, target: Generation, limits: protocol.Limits) -> protocol.AnyTask:
    """For a generation of the dataset whose source was reached."""
    reached = target.reached
    assert reached is not None
    if target.source.block:
        return _block(target, limits)
    before = dataset.before(target)
    made = float(before.record.marks.get(identity.MADE, "0")) if before is not None else 0.0
    return protocol.FillTask(
        **common(dataset, target, limits),
        native=reached.native,
        mounted=mountinfo.inside(reached.place or reached.root, mountinfo.read()),
        used=target.record.used,
        before=before.folder if before is not None else "",
        before_made_ns=int(made * 1e9),
        inodes=target.record.inodes,
        share=target.record.kept_share,
        # A file that is read through the mount is looked up there, which costs more than a listing.
        manifest=reached.manifest if reached.native is not None else None,
    )


def verify(
    dataset: Dataset, target: Generation, limits: protocol.Limits, *, source: bool = False,
    **scrub: Any,
) -> protocol.AnyTask:  # fmt: skip
    """``source``: compare with the source too. ``scrub``: fields of ``VerifyTask``."""
    if target.source.block:
        return _block(target, limits)
    # Others may have a bad file of it, too: an update that is under way links those of the current.
    others = [each.folder for each in dataset.every_generation() if each is not target]
    return protocol.VerifyTask(
        **common(dataset, target, limits), **scrub, also=others,
        against_source=source, reachable=target.reached is not None,
    )  # fmt: skip


def common(dataset: Dataset, target: Generation, limits: protocol.Limits) -> dict[str, Any]:
    """The fields of every task. Without a source, the tree stands for it."""
    reached = target.reached
    return {
        "generation": target.folder,
        "source": reached.root if reached is not None else target.layer,
        "stamp": reached.stamp if reached is not None else "",
        "immutable": target.source.immutable,
        "limits": limits,
        "beside": dataset.before(target) is not None,
    }


def _block(target: Generation, limits: protocol.Limits) -> protocol.BlockTask:
    reached = target.reached
    access = reached.image if reached is not None else None
    return protocol.BlockTask(
        generation=target.folder, access=access, limits=limits,
        partly=reached is not None and reached.mixes,
    )  # fmt: skip
