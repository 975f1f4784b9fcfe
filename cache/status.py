"""How datasets show to operators: in the API, as findings, and as metrics."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import Metric

import kit.child
import kit.errors
import kit.findings
import kit.processes
import kit.units
from cache.dataset import choices
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Eviction, ScrubReason, Totals, Verification
from cache.dataset.generation import Generation
from cache.dataset.hits import Ratio
from cache.dataset.standing import State, finding, named
from cache.fill.protocol import Phase
from cache.store import disk, generations, subset
from cache.views.view import Stage
from cache.work import compare
from cache.work.compare import ShownCompare
from kit.findings import Finding, Severity
from kit.metrics import counter, gauge, state

FAILURES_SECONDS = 15.0
_NOTHING = Totals()


# --- the API: what is shown of a dataset. JSON, the page and metrics are made of it; /openapi.json
# describes it by the comments beside the fields (scripts/openapi.py).


@dataclass(frozen=True)
class EntryCounts:
    """Entries that are not directories."""

    total: int
    done: int  # in the store, durable
    failed: int
    skipped: int  # sockets, fifos, devices
    no_room: int


@dataclass(frozen=True)
class ByteCounts:
    total: int
    done: int
    no_room: int


@dataclass(frozen=True)
class ShownStored:
    total: int = 0
    done: int = 0


@dataclass(frozen=True)
class ShownChecked:
    total: int
    checked: int


@dataclass(frozen=True)
class ShownUpdate:
    """The next generation."""

    generation: str
    snapshot: str = ""
    state: generations.State = "new"
    why: str = ""  # why it does not go on
    files: ShownStored = ShownStored()
    bytes: ShownStored = ShownStored()


@dataclass(frozen=True)
class JobRate:
    """Files and bytes per second of the running job."""

    files: float
    bytes: int
    history: Sequence[int]  # bytes since the job began, in points of equal time, the oldest first


@dataclass(frozen=True)
class ShownScrub:
    """Background check of stored files."""

    state: str  # empty before the first; running, good, bad, cancelled (goes on later), failed
    reason: ScrubReason  # suspect: after errors of the SSD; crash: after an unclean shutdown
    why: str
    suspect: bool  # the view shows the source until stored files are verified
    files: ShownChecked
    bytes: ShownChecked
    bad: int
    replaced: int
    withdrawn: int
    ended: float | None  # Unix time of the end of the last whole one


@dataclass(frozen=True)
class ShownDataset:
    name: str
    state: State
    why: str  # reason for the state, or empty
    view: str  # directory that jobs read
    served_by: Stage
    freshness: Literal["snapshot", "follow", "frozen"]
    priority: int
    warm: bool
    generation: str  # id of the current generation
    snapshot: str | None  # snapshot of the current generation
    update: ShownUpdate | None  # the next generation
    source: dict[str, Any]  # its settings (no secrets), `reachable` and `read_by`
    files: EntryCounts
    bytes: ByteCounts
    estimated: bool  # totals are not counted yet
    phase: Phase
    rate: JobRate
    eta_seconds: int | None
    store_bytes: int  # SSD bytes used
    kept_share: float  # share of the files that fit; 1: all
    refreshes: int  # how often the view was refreshed
    verify: dict[str, Any] | None
    scrub: ShownScrub
    compare: ShownCompare | None  # comparison of a frozen dataset with its source
    evict: Eviction | None  # last eviction by an operator
    keep: bool  # never evicted for other datasets
    hits: Ratio | None  # share of reads from the SSD; null: unknown
    # Ratio per minute of the last hour, the oldest first; null: unknown.
    hits_history: Sequence[float | None]
    # Unix time of the last use by a job. Without a use: the time when the dataset was added.
    used: int | None
    used_by: str  # who uses the view now, or opened files a short time ago; empty: nobody
    completed: float | None  # Unix time
    notes: Sequence[str]


def of_dataset(shown: Dataset) -> ShownDataset:
    figures, generation, reached, job = shown.figures, shown.generation, shown.reached, shown.job
    files_rate, bytes_rate = job.rates() if job is not None else (0.0, 0.0)
    seconds_left = job.eta() if job is not None else None
    trend = job.trend() if job is not None else ()
    source = shown.settings.source.model_dump(mode="json", exclude={"secret_file"})
    read_by = reached.client if reached else None
    return ShownDataset(
        name=shown.name,
        state=shown.state(),
        why=shown.why(),
        view=shown.view,
        served_by=shown.stage,
        freshness=shown.settings.freshness,
        priority=shown.settings.priority,
        warm=shown.settings.warm or generation.wanted,
        generation=shown.current.id,
        snapshot=generation.snapshot or None,
        update=_update(shown),
        source=source | {"reachable": reached is not None, "read_by": read_by},
        files=EntryCounts(
            total=figures.files,
            done=figures.done_files,
            failed=figures.failed,
            skipped=figures.skipped,
            no_room=generation.left_files,
        ),
        bytes=ByteCounts(figures.bytes, figures.done_bytes, generation.left_bytes),
        estimated=figures.estimated,
        phase=job.phase if job is not None else "",
        rate=JobRate(round(files_rate, 1), round(bytes_rate), [round(each) for each in trend]),
        eta_seconds=None if seconds_left is None else round(seconds_left),
        store_bytes=shown.used(),
        kept_share=round(generation.kept_share / subset.ALL, 4),
        refreshes=shown.refreshes,
        verify=_verification(shown.verification),
        scrub=_scrub(shown),
        compare=compare.shown(shown),
        evict=shown.eviction if shown.eviction.state else None,
        keep=shown.settings.keep,
        hits=shown.hits.ratio(shown.stage, time.monotonic()),
        hits_history=shown.hits.history(),
        used=round(shown.use.last) or None,
        used_by=shown.use.reader(time.time()),
        completed=generation.completed or None,
        notes=[*shown.notes, *_of_identity(shown)],
    )


def _update(shown: Dataset) -> ShownUpdate | None:
    lost = str(shown.next_trouble or "")
    if (next_one := shown.next) is None:
        wanted = choices.pending(shown)  # a rescan that is about to begin
        return None if wanted is None else ShownUpdate(wanted, why=lost)
    figures = next_one.figures
    waits = shown.waits_for() if next_one.queued else ""
    why = lost if next_one.reached is None and lost else next_one.record.why
    if next_one.queued:  # the record has why its last fill ended
        why = f"waits for {waits}" if waits else ""
    return ShownUpdate(
        generation=next_one.id,
        snapshot=next_one.record.snapshot,
        state=next_one.record.state,
        why=why,
        files=ShownStored(figures.files, figures.done_files),
        bytes=ShownStored(figures.bytes, figures.done_bytes),
    )


@dataclass(frozen=True)
class ShownGeneration:
    generation: str  # its name below by-id
    snapshot: str | None
    state: Literal["current", "next", "earlier", "retired"]
    complete: bool
    suspect: bool  # the SSD had errors since its files were verified
    damaged: int  # bad files on the SSD; an earlier generation with some is discarded
    why: str  # why it is not complete, or what is wrong with it
    files: int
    bytes: int
    store_bytes: int  # SSD bytes used
    shared_bytes: int  # of these, shared with the generation before
    shared_files: int
    served: float | None  # Unix time since which it served
    users: Sequence[str]  # why it is not discarded yet


def generations_of(shown: Dataset, users: Mapping[str, Sequence[str]]) -> Sequence[ShownGeneration]:
    """All generations of a dataset, the current one first.

    ``users``: who uses a generation that is to be discarded.
    """
    every = shown.every_generation()
    return [
        ShownGeneration(
            generation=each.id,
            snapshot=each.record.snapshot or None,
            state=_role(shown, each),
            complete=each.record.state == "complete",
            suspect=shown.soundness.suspects(each.record),
            damaged=each.record.damaged,
            why=each.record.why,
            files=each.record.files,
            bytes=each.record.bytes,
            store_bytes=each.used(),
            shared_bytes=each.used() - each.used(every),
            shared_files=each.record.shared_files,
            served=each.record.served or None,
            users=users.get(each.id, ()),
        )
        for each in every
    ]


def _role(shown: Dataset, each: Generation) -> Literal["current", "next", "earlier", "retired"]:
    if each is shown.current:
        return "current"
    if each is shown.next:
        return "next"
    return "earlier" if each in shown.earlier else "retired"


def _of_identity(shown: Dataset) -> list[str]:
    notes = [shown.source.note] if shown.source.note else []
    if shown.reached is not None and shown.reached.note:
        notes.append(shown.reached.note)
    if shown.trouble is not None and shown.state() == "complete":  # of others it is a finding
        notes.append(f"its source: {shown.trouble}")
    if shown.generation.replaced:
        notes.append(f"began anew: {shown.generation.replaced}")
    if links := shown.generation.outside:
        notes.append(f"{links} links lead out of the dataset, as {shown.generation.leads_out!r}")
    if shown.current.unproven:
        notes.append(f"perhaps filled from another source: {shown.current.unproven}")
    return notes


def _verification(last: Verification) -> dict[str, Any] | None:
    if not last.state:
        return None
    shown: dict[str, Any] = {"state": last.state, "source": last.source}
    if last.why or not last.pending:
        shown["why"] = last.why
    if last.result is not None:
        shown |= {**last.result, "at": last.at}
    return shown


def _scrub(dataset: Dataset) -> ShownScrub:
    now = dataset.scrub
    return ShownScrub(
        state=now.state,
        reason=now.reason,
        why=now.why,
        suspect=dataset.suspect,
        files=ShownChecked(now.files, now.checked_files),
        bytes=ShownChecked(now.bytes, now.checked_bytes),
        bad=now.bad,
        replaced=now.replaced,
        withdrawn=now.withdrawn,
        ended=dataset.generation.scrubbed or None,
    )


async def failures(shown: Dataset, limit: int, after: str) -> dict[str, Any]:
    """``limit`` entries that could not be copied or do not fit; while an update is stuck, of that.

    ``after``: ``next`` of the page before.
    """
    wrong = kit.errors.SettingsError(
        "after", f"{after!r} is not the 'next' of a page", "leave it out to read from the start"
    )
    number, _, name = after.partition("/")
    if after and kit.units.parse_count(number.removeprefix("-"), 2**63 - 1) is None:
        raise wrong
    try:
        start = [int(number or 0), os.fsdecode(bytes.fromhex(name))]
    except ValueError as error:
        raise wrong from error
    target = shown.current
    if shown.next is not None and shown.next.record.state == "partial":
        target = shown.next
    found: dict[str, Any] = await kit.child.call(
        generations.failures_page, target.folder, limit, start, deadline=FAILURES_SECONDS
    )
    return found


# --- findings


def findings(
    datasets: Mapping[str, Dataset],
    orphans: Iterable[str],
    no_store: kit.errors.AgentError | None = None,
    lost_views: Iterable[str] = (),
) -> list[Finding]:
    """What an operator should know without asking. ``no_store``: why the store cannot be used."""
    found = [each for shown in datasets.values() if not shown.removed for each in _of_one(shown)]
    if no_store is not None:
        found.insert(
            0,
            Finding(
                id="store-unusable",
                rule="store-unusable",
                severity=Severity.CRITICAL,
                subject=no_store.thing,
                message=f"{no_store.cause}; jobs read from the sources that answer, save "
                "in volumes of layout direct that were mounted before",
                advice=f"{no_store.remedy}; it is tried again by itself",
            ),
        )
    stored = {folder.split("/")[-2] for folder in orphans}
    for name in sorted(set(lost_views) - stored):
        message = f"a view is mounted that belongs to no dataset of the settings: {name}"
        advice = (
            "put the dataset back into the settings, or take the view down with "
            f"'nodeagent dataset remove {name}'"
        )
        found.append(finding("view-orphan", name, Severity.INFO, message, advice))
    for folder in sorted(orphans):
        name = folder.split("/")[-2]
        message = f"{folder} belongs to no dataset of the settings"
        advice = (
            "put the dataset back into the settings, or delete everything of that name with "
            f"'nodeagent dataset remove {name}'"
        )
        found.append(finding("store-orphan", name, Severity.INFO, message, advice, about=folder))
    return found


def damaged(store: str, files: Mapping[str, str]) -> Iterable[Finding]:
    """``files``: of the store, that were kept aside, and what was wrong with them."""
    for name, why in files.items():
        match name.rpartition("/")[2]:
            case disk.MARKER:
                assumed = "it was made anew, for the store has datasets"
            case generations.NAME:
                assumed = (
                    "nothing that was stored of it is used again, and the dataset is filled anew"
                )
            case _:
                assumed = "what it said is learned again"
        yield kit.findings.damaged(store, name, why, assumed)


def _of_one(shown: Dataset) -> Iterable[Finding]:
    if shown.trouble is not None and shown.state() != "complete":
        severity = Severity.CRITICAL if shown.stage is Stage.NONE else Severity.WARNING
        message = f"{shown.trouble.thing}: {shown.trouble.cause}"
        yield finding("dataset-not-served", shown.name, severity, message, shown.trouble.remedy)
    elif shown.generation.why and shown.state() == "failed" and not shown.unfit():
        message = f"dataset {shown.name} cannot be filled: {shown.generation.why}"
        advice = "jobs read through to the source meanwhile; it is tried again after a pause"
        yield finding("dataset-not-filled", shown.name, Severity.WARNING, message, advice)
    if shown.generation.replaced and shown.generation.state != "complete":
        message = f"dataset {shown.name} begins anew: {shown.generation.replaced}"
        advice = (
            "jobs that began before read what was stored then; if this was not meant, correct the "
            "source"
        )
        yield finding("dataset-source-replaced", shown.name, Severity.WARNING, message, advice)
    if shown.next is not None and shown.next.record.state == "partial":
        message = f"the update of {shown.name} does not go on: {shown.next.record.why}"
        advice = (
            "the earlier generation is served; see 'nodeagent dataset show "
            f"{shown.name} --failures', give it the room that it lacks, or correct the source"
        )
        yield finding("dataset-update-stuck", shown.name, Severity.WARNING, message, advice)
    if shown.current.unproven:
        message = (
            f"dataset {shown.name} was perhaps filled from another source of that name: "
            f"{shown.current.unproven}"
        )
        comparison = f"'nodeagent dataset verify {shown.name} --source' compares every byte; "
        advice = (
            f"{'' if shown.source.block else comparison}'nodeagent dataset remove {shown.name}' "
            f"and 'nodeagent dataset warm {shown.name}' fill it again"
        )
        yield finding("dataset-unproven", shown.name, Severity.WARNING, message, advice)
    if shown.generation.state == "partial":
        message = f"dataset {shown.name} is only partly in the store: {shown.generation.why}"
        advice = (
            f"see 'nodeagent dataset show {shown.name} --failures', give it the room it lacks, "
            f"or correct the source; 'nodeagent dataset warm {shown.name}' tries it again at once, "
            "the agent every 15 minutes"
        )
        yield finding("dataset-partial", shown.name, Severity.WARNING, message, advice)
    yield from of_scrubs(shown)
    yield from compare.findings(shown)
    yield from _of_source(shown)
    result = shown.verification.result or {}
    if damaged := shown.generation.damaged:  # known from the list, also after a restart
        message = (
            f"{damaged} files of dataset {shown.name} in the store are bad, and not replaced yet: "
            f"{shown.generation.why}"
        )
        advice = (
            "make its source readable: they are filled again by themselves; check the SSD "
            "(smartctl, kernel log)"
        )
        yield finding("store-bad-files", shown.name, Severity.CRITICAL, message, advice)
    elif bad := result.get("bad"):
        whole = shown.generation.state == "complete"
        replaced = "all are replaced" if whole else f"{result['replaced']} of them were replaced"
        message = f"{bad} files or directories in the store were bad, {replaced}"
        advice = "check the SSD (smartctl, kernel log), then verify again"
        severity = Severity.WARNING if whole else Severity.CRITICAL
        yield finding("store-bad-files", shown.name, severity, message, advice)


def of_scrubs(dataset: Dataset) -> Iterable[Finding]:
    name, now = dataset.name, dataset.scrub
    if dataset.suspect:
        message = (
            f"the SSD had errors, so dataset {name} is read from its source until every stored "
            "file is verified"
        )
        advice = (
            f"nothing, if it ends ('nodeagent dataset show {name}' tells how far it is); check the "
            "SSD (smartctl, kernel log)"
        )
        yield finding("dataset-suspect", name, Severity.WARNING, message, advice)
    advice = "check the SSD (smartctl, kernel log)"
    if now.bad:
        message = (
            f"the scrub of dataset {name} found {now.bad} bad files in the store, "
            f"{now.replaced} were replaced, {now.withdrawn} withdrawn"
        )
        yield finding("store-damage", name, Severity.CRITICAL, message, advice)
    for each in (*dataset.earlier, *dataset.retired):
        which = each.record.snapshot or each.id
        if each.scrub.bad:
            message = f"the scrub of {which}, an earlier generation of dataset {name}, found "
            message += f"{each.scrub.bad} bad files in the store"
            about = f"{name}/{each.id}"
            yield finding("store-damage", name, Severity.CRITICAL, message, advice, about)
        if each.record.damaged and not each.source.block:
            message = f"{each.record.damaged} files of {which}, an earlier generation of dataset "
            message += f"{name}, were bad on the SSD: it is discarded when nobody uses it"
            remedy = f"'nodeagent dataset generations {name}' names who uses it; jobs read "
            if dataset.settings.freshness == "frozen":
                remedy += "the other files of it"
            else:
                remedy += "its source by its id, and miss these files where that cannot be read. "
                remedy += "A rollback fills it again"
            about = f"{name}/{each.id}"
            yield finding("generation-damaged", name, Severity.WARNING, message, remedy, about)


def _of_source(dataset: Dataset) -> Iterable[Finding]:
    """What about a source keeps its files from being cached as they are.

    An overlay opens files of the source as root and crosses no mount, and the store keeps modes,
    owners and POSIX ACLs. What a source decides by more than these is told, and what an overlay
    would lose keeps the dataset at its source (``standing.unfit``).
    """
    name, inside = dataset.name, named(dataset.mounted_inside())
    records = [dataset.generation, *([dataset.next.record] if dataset.next else [])]
    refused = next((each.refused for each in records if each.refused), "")
    crossed = next((each.crossed for each in records if each.crossed), "")

    if refused:
        what = "it" if dataset.generation.refused else "its update"
        message = f"the source of dataset {name} refuses root {refused}, so {what} is not cached"
        advice = (
            "jobs read the source of what is not cached, each as who it is; let root of the nodes "
            "read all of it (NFS: no_root_squash), or cache a copy, then "
            f"'nodeagent dataset warm {name}'"
        )
        yield finding("dataset-source-refuses", name, Severity.WARNING, message, advice)
    if inside or crossed:
        where = inside or crossed
        message = f"another file system is mounted inside the source of dataset {name}, at {where}"
        advice = (
            "jobs see what that place has without the mount, in all stages"
            if inside
            else "it comes when it is opened, so the dataset is not cached: jobs read the source"
        )
        advice += "; make a dataset of each file system, or unmount what does not belong there"
        yield finding("dataset-source-mounts", name, Severity.WARNING, message, advice)
    if dataset.server and dataset.settings.access.mode is None:
        message = (
            f"the source of dataset {name} is on {dataset.server}, whose server may refuse users "
            "more than modes and POSIX ACLs do; the store keeps only these"
        )
        advice = (
            "set access.mode of the dataset: '0750' and access.group for those whom the server "
            "lets read all of it, '0755' where modes and ACLs are all that decides"
        )
        yield finding("dataset-source-rights", name, Severity.INFO, message, advice)
    if links := dataset.generation.outside:
        one = dataset.generation.leads_out
        message = f"symbolic links of dataset {name} lead out of it: {links}, as {one!r}"
        advice = (
            "jobs find nothing there; name a directory above as the source (of a Hugging Face "
            "cache models--ORG--NAME), or put files in their places"
        )
        yield finding("dataset-links-lead-out", name, Severity.INFO, message, advice)


def kept(
    datasets: Mapping[str, Dataset], in_the_way: Callable[[str], Sequence[str]]
) -> Iterable[Finding]:
    """``in_the_way``: what is kept, by the name of what lacks room; '': the store."""
    lacking: dict[str, list[str]] = {}
    for name in ("", *sorted(datasets)):
        for each in in_the_way(name):
            text = f"dataset {name} lacks room" if name else "the store is beyond its budget"
            lacking.setdefault(each, []).append(text)
    for name, texts in sorted(lacking.items()):
        yield finding(
            "dataset-kept", name, Severity.WARNING,
            f"dataset {name} is kept and gives no room: {kit.errors.some(texts)}",
            f"raise cache.budget, or set keep: false for {name}",
        )  # fmt: skip


# --- metrics


def metrics(
    datasets: Mapping[str, Dataset],
    *,
    budget: int,
    used: int,
    past: Totals = _NOTHING,
    store: str = "normal",
) -> Iterable[Metric]:
    """A fixed number of series for each dataset of the settings: at most ten.

    ``past``: of datasets that are gone; a counter never goes down. ``store``: its disk's health.
    """
    shown = {name: of_dataset(dataset) for name, dataset in sorted(datasets.items())}

    def each_is(what: str) -> Mapping[str, str]:
        return {name: getattr(row, what) for name, row in shown.items()}

    sizes = {name: row.bytes.total for name, row in shown.items()}
    text = "Size of all files in the source, as far as listed."
    yield gauge("cache_dataset_bytes", text, sizes, "dataset")
    stored = {name: row.bytes.done for name, row in shown.items()}
    text = "Size of the stored files, as in the source (not the space on the SSD)."
    yield gauge("cache_stored_bytes", text, stored, "dataset")
    failed = {name: row.files.failed for name, row in shown.items()}
    yield gauge("cache_failed_files", "Files that could not be copied.", failed, "dataset")
    text = "State of the dataset."
    yield state("cache_state", text, each_is("state"), "dataset", "state")
    text = "What serves the view."
    yield state("cache_served_by", text, each_is("served_by"), "dataset", "stage")
    on_ssd = {name: row.store_bytes for name, row in shown.items()}
    yield gauge("cache_store_bytes", "SSD space of the dataset.", on_ssd, "dataset")
    made = {name: at for name, each in datasets.items() if (at := each.snapshot_made())}
    text = "Time of the snapshot that jobs read."
    yield gauge("cache_snapshot_timestamp_seconds", text, made, "dataset")
    ratios = {name: row.hits.ratio for name, row in shown.items() if row.hits}
    text = "Share of opened files that are on the SSD (a sample)."
    yield gauge("cache_hit_ratio", text, ratios, "dataset")
    # The source of a complete dataset is let go when the last look at it found no trouble.
    answers = {
        name: row.source["reachable"]
        or (row.state == "complete" and datasets[name].trouble is None)
        for name, row in shown.items()
    }
    text = "0: the agent cannot reach the source, or has not reached it yet."
    yield gauge("cache_source_reachable", text, answers, "dataset")
    kept = sum(len(each.every_generation()) for each in datasets.values())
    yield gauge("cache_generations", "Generations of all datasets.", kept)
    yield gauge("cache_budget_bytes", "Budget of the store.", budget)
    yield gauge("cache_used_bytes", "Size of the store.", used)
    text = "Health of the SSD."
    yield state("cache_store_health", text, {(): store}, "state")
    totals = sum((each.totals() for each in datasets.values()), past)
    text = "Evicted files."
    yield counter("cache_evicted_files", text, totals.evicted_files)
    text = "Bytes scrubbed."
    yield counter("cache_scrub_bytes", text, totals.scrubbed_bytes)
    yield from _scrub_metrics(datasets)
    text = "Child processes of the agent that hang in the kernel."
    yield gauge("children_abandoned", text, kit.processes.hanging())


def _scrub_metrics(datasets: Mapping[str, Dataset]) -> Iterable[Metric]:
    each = dict(sorted(datasets.items()))
    text = "Datasets that show the source until their files are verified."
    yield gauge("cache_suspect_datasets", text, sum(dataset.suspect for dataset in each.values()))
    ended = [at for dataset in each.values() if (at := dataset.generation.scrubbed)]
    text = "Each dataset has a time of its last scrub: the earliest of these times."
    yield gauge("cache_oldest_scrub_timestamp_seconds", text, {(): min(ended)} if ended else {})
    bad = {name: dataset.scrubs.bad for name, dataset in each.items()}
    text = "Damaged files that scrubs found."
    yield counter("cache_scrub_bad", text, bad, "dataset")
