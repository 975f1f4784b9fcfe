"""What a pass over one dataset may use: the shares that settings and other datasets leave it."""

import dataclasses
from collections.abc import Iterable

from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.fill.protocol import Least
from cache.space import victims
from cache.store import image_copy
from cache.store.subset import Amount

# Training jobs read the same SSD: two readers find bad blocks soon enough.
VERIFY_WORKERS = 2


def inodes_of(dataset: Dataset) -> int:
    """What it takes in the store, at most: names that generations share count for each."""
    return sum(_inodes(each) for each in dataset.every_generation())


def _inodes(generation: Generation) -> int:
    if generation.source.block:  # what is counted as files are chunks of one file
        return image_copy.INODES if generation.used() else 0
    return max(generation.record.inodes, generation.figures.done_files)


def _beside(dataset: Dataset, target: Generation) -> Amount:
    """What it takes without what is the target's own."""
    return Amount(dataset.used(beside=target), inodes_of(dataset) - _inodes(target))


def of(
    dataset: Dataset,
    kind: str,
    all_datasets: Iterable[Dataset],
    foreign: int,
    target: Generation,
    least: Least,
) -> protocol.Limits:
    """``kind`` of pass over ``target``. ``foreign``: SSD bytes of the store of no dataset.
    ``least``: what the kubelet wants free.

    The other generations of the dataset count into its own budget.
    """
    cache, own, fill = dataset.cache, dataset.settings, dataset.cache.fill
    rest = Amount(foreign)
    for each in all_datasets:
        if each is not dataset:
            rest += Amount(each.used(), inodes_of(each))
    others = rest + _beside(dataset, target)
    # The limits of the settings are for reads from sources.
    only_store = kind == "verify" and not dataset.verification.source
    return protocol.Limits(
        workers=VERIFY_WORKERS if only_store else fill.workers,
        bytes_per_second=0 if only_store else fill.bytes_per_second,
        files_per_second=0 if only_store else fill.files_per_second,
        budget=_least(cache.budget, own.budget, rest.bytes),
        own=0 < own.budget < cache.budget - rest.bytes,
        own_inodes=0 < own.budget_inodes < (cache.budget_inodes or 2**62) - rest.inodes,
        others=others.bytes,
        inodes=_least(cache.budget_inodes, own.budget_inodes, rest.inodes) or 2**62,
        other_inodes=others.inodes,
        reserve=cache.reserve,
        least=least,
    )


def of_its_own(dataset: Dataset, allowed: protocol.Limits) -> protocol.Limits:
    """``allowed``, without what the node's budget and the disk lack: those of a kept dataset."""
    own, others = dataset.settings, Amount(allowed.others, allowed.other_inodes)
    rest = others - _beside(dataset, dataset.current)
    return dataclasses.replace(
        allowed, disk=False,
        budget=_least(0, own.budget, rest.bytes) or 2**62,
        inodes=_least(0, own.budget_inodes, rest.inodes) or 2**62,
    )  # fmt: skip


def _least(node: int, own: int, others: int) -> int:
    """The node's budget, or less when the dataset's own ends sooner; 0: no limit."""
    ends = [node] if node else []
    return min([*ends, others + own] if own else ends, default=0)


def share_of(dataset: Dataset) -> victims.Share:
    """What it takes, and whether something may be taken out of it now."""
    record, own = dataset.generation, dataset.settings
    # One that stopped for another dataset has committed what it has, and knows all that it lacks.
    stopped = record.state == "filling" and dataset.gave_way and record.skeleton
    stopped = stopped and not dataset.source.block
    settled = (record.state in ("complete", "partial") or stopped) and dataset.job is None
    # A generation that is being filled shares files with this one: its figures would be wrong.
    ready = settled and dataset.next is None and not dataset.verification.pending
    usable = not dataset.removed and dataset.no_store is None and dataset.newer is None
    has = record.kept_share > 0 and dataset.figures.done_files > 0
    return victims.Share(
        dataset.name, dataset.used(), inodes_of(dataset),
        budget=own.budget, budget_inodes=own.budget_inodes, priority=own.priority,
        keep=own.keep, in_use=bool(dataset.use.by), used=dataset.use.last,
        ready=ready and usable and has and not record.evicting,
    )  # fmt: skip
