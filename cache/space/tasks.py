"""What the agent gives a pass: its source, its generation and its limits."""

from collections.abc import Sequence
from typing import Any

from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.fill import evict as evict_pass
from cache.fill import protocol
from cache.sources import base
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
        **_common(dataset, target, limits),
        native=reached.native,
        mounted=mountinfo.inside(reached.place or reached.root, mountinfo.read()),
        used=target.record.used,
        before=before.folder if before is not None else "",
        before_made_ns=int(made * 1e9),
        inodes=target.record.inodes,
        share=target.record.kept_share,
        manifest=_manifest(reached),
    )


def _manifest(reached: base.Reached) -> protocol.Manifest | None:
    """A file that is read through the mount is looked up there, which costs more than a listing."""
    if reached.manifest is None or reached.native is None:
        return None
    folder, path = reached.manifest
    return protocol.Manifest(folder, path.split("/"), reached.marks)


def verify(dataset: Dataset, limits: protocol.Limits, *, source: bool) -> protocol.AnyTask:
    """``source``: compare with the source too."""
    if dataset.source.block:
        return _block(dataset.current, limits)
    reachable = dataset.reached is not None
    return protocol.VerifyTask(
        **_common(dataset, dataset.current, limits), against_source=source, reachable=reachable,
        also=_others(dataset, dataset.current),
    )  # fmt: skip


def scrub(
    dataset: Dataset, target: Generation, limits: protocol.Limits, cursor: str,
    ahead: Sequence[Generation] = (),
) -> protocol.AnyTask:  # fmt: skip
    """``cursor``: the round that it continues. ``ahead``: whose own scrub reads what is shared."""
    if target.source.block:
        return _block(target, limits)
    return protocol.VerifyTask(
        **_common(dataset, target, limits), against_source=False,
        reachable=target.reached is not None, scrub=cursor,
        ahead=[each.folder for each in ahead], also=_others(dataset, target),
    )  # fmt: skip


def _others(dataset: Dataset, target: Generation) -> list[str]:
    """Who may have a bad file of ``target`` too: an update that is under way links the files of the
    current one."""
    return [each.folder for each in dataset.every_generation() if each is not target]


def withdraw(
    dataset: Dataset, target: Generation, limits: protocol.Limits, part: str
) -> protocol.WithdrawTask:
    return protocol.WithdrawTask(**_common(dataset, target, limits), part=part)


def evict(dataset: Dataset, limits: protocol.Limits, part: str, share: int) -> evict_pass.EvictTask:
    return evict_pass.EvictTask(**_common(dataset, dataset.current, limits), part=part, share=share)


def _common(dataset: Dataset, target: Generation, limits: protocol.Limits) -> dict[str, Any]:
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
