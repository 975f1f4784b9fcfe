"""``nodeagent dataset``: a client of the admin API."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import click

import kit.errors
import kit.units
from kit import terminal
from kit.room import CommandContext
from kit.terminal import Shown

# Exit codes of commands that wait, beside those of kit.errors (docs/cli.md).
PARTIAL, STOPPED = 10, 11
_PLAIN_LINE_SECONDS = 5.0
_HELD_SECONDS = 30.0  # the agent has tried again by then
MOST_FAILURES = 100  # lines of 'show --failures'
_GIVEN_UP = ("cancelled", "evicted", "removed")
_MOVING = ("queued", "scanning", "filling", "verifying")

_name = click.argument("name", **terminal.completing("/v1/datasets", "datasets", "name"))


class NotFinishedError(kit.errors.AgentError):
    """The command waited for something that ended in another way."""

    def __init__(self, code: int, thing: str, cause: str, remedy: str) -> None:
        super().__init__(thing, cause, remedy)
        self.exit_code = code  # type: ignore[misc]  # one class for the codes of waiting


dataset = click.Group("dataset")


def _path(name: str, what: str = "") -> str:
    return f"/v1/datasets/{quote(name, safe='')}{what}"


@terminal.command(dataset, "list")
def listing(ctx: CommandContext) -> Shown:
    """All datasets."""
    answer = terminal.call(ctx, "GET", "/v1/datasets")
    orphans = answer["orphans"]
    return (
        answer["datasets"],
        lambda found: _table_lines(found, orphans),
        lambda found: _table_lines(found, orphans, wide=True),
    )


def _table_lines(
    datasets: list[dict[str, Any]], orphans: list[str], *, wide: bool = False
) -> Iterator[str]:
    rows = []
    for d in datasets:
        total = d["files"]["total"]
        share = f"{d['files']['done'] * 100 // total}%" if total else "-"
        files, size = f"{d['files']['done']}/{total}", kit.units.format_size(d["store_bytes"])
        more = [_hits(d.get("hits")) or "not known", d.get("used_by") or "nobody"] if wide else []
        rows.append([d["name"], d["state"], d["served_by"], share, files, size, *more, d["view"]])
    more = ["SSD HITS", "READ BY"] if wide else []
    head = ["NAME", "STATE", "SERVED BY", "STORED", "FILES", "ON SSD", *more, "VIEW"]
    yield from terminal.table(head, rows)
    for name in orphans:
        yield f"{name}: not in the settings; 'dataset remove {name}' deletes it"


def _hits(hits: dict[str, Any] | None) -> str:
    """The share with its bounds; empty where it is not known."""
    if not hits:
        return ""
    share = kit.units.format_share
    sample = f" ({share(hits['low'])} to {share(hits['high'])})" if hits["opens"] else ""
    return f"{share(hits['ratio'])}{sample}"


@terminal.command(dataset, "show")
@_name
@click.option("--failures", is_flag=True, help="Also list entries that could not be copied.")
def show(ctx: CommandContext, name: str, failures: bool) -> Shown:
    """Everything about one dataset."""
    shown = terminal.call(ctx, "GET", _path(name))
    if failures:
        shown["failures"] = list(_failures(ctx, name))
    return shown, _details


def _failures(ctx: CommandContext, name: str) -> Any:
    after = ""
    while after is not None:
        page = terminal.call(ctx, "GET", _path(name, "/failures"), limit=1000, after=after)
        yield from page["failures"]
        after = page["next"]


def _details(d: dict[str, Any]) -> Iterator[str]:
    size = kit.units.format_size
    about = "about " if d["estimated"] else ""
    files, data = d["files"], d["bytes"]
    read_by = f"read by {d['source']['read_by']}" if d["source"]["reachable"] else "not reachable"
    if d["state"] == "complete" and not d["source"]["reachable"]:
        read_by = "not needed any more"
    stored = f"{files['done']} of {about}{files['total']} stored"
    odd = f"{files['failed']} failed, {files['skipped']} skipped (sockets, fifos, devices)"
    sizes = f"{size(data['done'])} of {about}{size(data['total'])} stored"
    yield f"name       {d['name']}"
    yield f"state      {d['state']}" + (f": {d['why']}" if d["why"] else "")
    yield f"view       {d['view']} (served by {d['served_by']})"
    place = f"{d['source']['kind']} {_place(d['source'])}"
    yield f"source     {place} ({d['freshness']}), {read_by}"
    yield f"files      {stored}, {odd}"
    yield f"bytes      {sizes}, {size(d['store_bytes'])} on the SSD"
    if files["no_room"]:
        word = "evicted   " if d["state"] == "evicted" else "no room    for"
        yield f"{word} {files['no_room']} files, {size(data['no_room'])}"
    if d.get("kept_share", 1) < 1:
        kept = f"at most {d['kept_share']:.1%} of the files, always the same ones"
        yield f"to keep    {kept}; the rest is at the source"
    if hits := d.get("hits"):
        share, _, sample = _hits(hits).partition(" ")
        yield f"hits       {share} of what is read is on the SSD{' ' if sample else ''}{sample}"
    if d.get("used"):
        by = f"now, {d['used_by']}" if d["used_by"] else _ago(d["used"])
        yield f"used       {by}" + (" (kept)" if d["keep"] else "")
    if d.get("update"):
        why = f" ({d['update']['why']})" if d["update"].get("why") else ""
        yield f"update     to {_next_name(d['update'])}: {d['update']['state']}{why}"
    if d["phase"]:
        yield f"progress   {_progress_text(d)}"
    if d["verify"]:
        yield f"verify     {_verify_text(d['verify'])}"
    if d.get("compare"):
        yield f"compared   {_compare_text(d['compare'])}"
    if d["scrub"]["state"]:
        yield f"scrub      {_scrub_text(d['scrub'])}"
    for note in d["notes"]:
        yield f"note       {note}"
    if failures := d.get("failures"):
        stuck = d.get("update") and d["update"]["state"] == "partial"
        of = f", of the update to {_next_name(d['update'])}" if stuck else ""
        yield f"failures   {len(failures)}{of}"
        yield from (f"  {each['path']}: {each['reason']}" for each in failures[:MOST_FAILURES])
        if len(failures) > MOST_FAILURES:
            yield f"  and {len(failures) - MOST_FAILURES} more; '-o json' prints all"


def _next_name(next_one: dict[str, Any]) -> str:
    return str(next_one["snapshot"] or next_one["generation"])


def _ago(at: float) -> str:
    return f"{kit.units.format_duration(max(0.0, time.time() - at))} ago"


def _verify_text(verify: dict[str, Any]) -> str:
    if "checked_files" not in verify:
        return str(verify["state"])
    left, again = verify.get("not_compared"), verify["state"] == "good" and verify["bad"]
    return (
        f"{verify['state']}{' again' if again else ''}: {verify['checked_files']} files checked, "
        f"{verify['bad']} files or directories bad{' before' if again else ''}, "
        f"{verify['replaced']} replaced, {verify['withdrawn']} withdrawn"
        + (f", {left} not compared" if left else "")
    )


def _compare_text(found: dict[str, Any]) -> str:
    if found["at"] is None:
        return f"not yet: {found['why']}"
    text = f"with the source {_ago(found['at'])}, {found['entries']} entries: "
    differ = f"{found['differing']} differ, {found['path']}: {found['what']}"
    return text + (differ if found["differing"] else "none differs")


def _scrub_text(scrub: dict[str, Any]) -> str:
    files = scrub["files"]
    why = {"suspect": "after errors of the SSD", "crash": "after an unclean shutdown"}
    return (
        f"{scrub['state']}: {files['checked']}/{files['total']} files, {scrub['bad']} bad, "
        f"{scrub['replaced']} replaced, {scrub['withdrawn']} withdrawn"
        + (f" ({why[scrub['reason']]})" if scrub["reason"] in why else "")
    )


def _filled(d: dict[str, Any]) -> dict[str, Any]:
    """What is filled: the next generation while there is one, as the one that serves is not."""
    new = d.get("update")
    return {**d, **new, "state": f"update {new['state']}", "why": ""} if new else d


def _progress_text(d: dict[str, Any]) -> str:
    d = _filled(d)
    files, data, rate, left = d["files"], d["bytes"], d["rate"], d["eta_seconds"]
    eta = "" if left is None else f", {kit.units.format_duration(left)} left"
    size = kit.units.format_size
    state = f"{d['state']} ({d['why']})" if d["state"] == "queued" and d["why"] else d["state"]
    return (
        f"{state} {files['done']}/{files['total']} files, {size(data['done'])}/"
        f"{size(data['total'])}, {rate['files']:.0f} files/s, {size(rate['bytes'])}/s"
        + (f", {files['failed']} failed" if "failed" in files else "")
        + eta
    )


@dataset.command()
@_name
@click.option("--wait", is_flag=True, help="Wait until it is complete, or cannot be completed.")
@click.option("--now", is_flag=True, help="Before all others: a fill that runs stops meanwhile.")
@terminal.json_option
@click.pass_obj
def warm(ctx: CommandContext, name: str, wait: bool, now: bool, as_json: bool) -> None:
    """Fill the store with NAME; continue after a pause, a cancel or a failure."""
    shown = terminal.call(ctx, "POST", _path(name, "/warm"), {"now": now})
    if wait:
        shown = asyncio.run(_follow(ctx, name, _warm_ended, quiet=as_json, fills=True))
    if as_json:
        terminal.print_json(shown)
    elif shown["state"] == "complete":
        terminal.say(f"{name} is complete: {shown['files']['done']} files, read at {shown['view']}")
    elif not wait:
        follow = f"nodeagent dataset warm {name} --wait"
        state = "asked to fill" if shown["state"] == "cold" else shown["state"]
        terminal.say(f"{name} is {state}; follow it with '{follow}'")
    if wait:
        _judge(shown)


def _warm_ended(d: dict[str, Any]) -> bool:
    return d["state"] in ("complete", "partial", *_GIVEN_UP)


def _held(d: dict[str, Any]) -> tuple[str, bool]:
    """What keeps a fill or an update from going on, in words; whether it is worth an end."""
    name, new = d["name"], d.get("update")
    if d["state"] in _MOVING:
        return "", False
    why = (new or d)["why"].removeprefix(f"dataset {name}: ")
    if new:
        turn = why.startswith("waits for ")  # it is somebody else's
        said = f"update of {name} {why if turn else f'waits: {why}'}"
        return (said, not turn) if why else ("", False)
    unseen = d["state"] == "waiting" and not why  # its source was not asked yet
    if unseen or d["state"] not in ("waiting", "failed", "paused", "partial", *_GIVEN_UP):
        return "", False
    said = f"{name} is {d['state']}"
    return (f"{said}: {why}" if why else said), d["state"] != "paused"


def _judge(d: dict[str, Any], update: str = "") -> None:
    """NotFinishedError says how it ended, if not well. ``update``: the word of one, or nothing."""
    thing, remedy = f"dataset {d['name']}", f"see 'nodeagent dataset show {d['name']}'"
    why, code = d["why"].removeprefix(f"{thing}: "), kit.errors.SourceError.exit_code
    ends = ("complete", "waiting", "failed", "partial", *_GIVEN_UP)
    # Where nothing else can be said, a fill waits for the update.
    if (new := d.get("update")) and (update or d["state"] not in ends):
        code = PARTIAL if new["state"] == "partial" else code
        remedy = f"see 'nodeagent dataset show {d['name']} --failures'"
        raise NotFinishedError(code, f"{update or 'update'} of {d['name']}", new["why"], remedy)
    if d["state"] in ("waiting", "failed"):
        raise NotFinishedError(STOPPED if d["state"] == "failed" else code, thing, why, "")
    if d["state"] == "partial":
        raise NotFinishedError(PARTIAL, thing, f"only partly stored: {d['why']}", remedy)
    if d["state"] in _GIVEN_UP:
        raise NotFinishedError(STOPPED, thing, f"it was {d['state']}", remedy)


class _Patience:
    """Of a command that waits."""

    def __init__(self) -> None:
        self._reasons = terminal.Reasons()
        self._done, self._held_since = -1, math.inf

    def ends(self, d: dict[str, Any]) -> bool:
        """Whether what holds it up has done so for too long. Says what that is."""
        (why, grave), now, done = _held(d), time.monotonic(), _filled(d)["bytes"]["done"]
        self._reasons.tell(why)
        if done != self._done or not grave:
            self._done, self._held_since = done, math.inf
        if grave:
            self._held_since = min(self._held_since, now)
        return grave and now - self._held_since >= _HELD_SECONDS


async def _follow(
    ctx: CommandContext, name: str, ended: Any, *, quiet: bool, fills: bool = False
) -> dict[str, Any]:
    """Show the progress of a dataset until ``ended``; the dataset then. ``fills``: also until it is
    clear that nothing more comes."""
    stream, patience = ctx.client().lines(_path(name, "/progress")), _Patience()
    if not quiet:
        stream = (_with_bar if terminal.on_terminal() else _with_lines)(stream)
    async for last in stream:
        if ended(last) or (fills and patience.ends(last)):
            found: dict[str, Any] = last
            return found
    raise NotFinishedError(
        STOPPED,
        f"dataset {name}",
        "the agent ended the stream",
        f"see 'nodeagent dataset show {name}'",
    )


async def _with_lines(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    said, state = 0.0, ""
    async for shown in stream:
        now = time.monotonic()
        if now - said >= _PLAIN_LINE_SECONDS or shown["state"] != state:
            said, state = now, shown["state"]
            terminal.say(_progress_text(shown), error=True)
        yield shown


async def _with_bar(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    from rich import progress as bars  # only where there is a terminal
    from rich.console import Console

    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[text]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None, text="")
        async for shown in stream:
            now = _filled(shown)
            done, total, state = now["files"]["done"], now["files"]["total"], now["state"]
            text = terminal.plain(_progress_text(shown).removeprefix(f"{state} "))
            bar.update(task, completed=done, total=total or None, description=state, text=text)
            yield shown


def _simple(verb: str, text: str) -> None:
    @_name
    def command(ctx: CommandContext, name: str) -> Shown:
        shown = terminal.call(ctx, "POST", _path(name, f"/{verb}"))
        return shown, lambda d: [f"{name} is {d['state']}"]

    command.__doc__ = text
    terminal.command(dataset, verb)(command)


_simple("pause", "Stop filling NAME until 'resume' or 'warm'.")
_simple("resume", "Continue to fill a paused or cancelled NAME.")
_simple("cancel", "Stop filling, verifying or rescanning NAME; what is stored stays and serves.")


@dataset.command()
@_name
@click.option("--source", is_flag=True, help="Compare with the source too, which reads all of it.")
@click.option("--wait/--no-wait", default=True, help="Wait for the result (default).")
@terminal.json_option
@click.pass_obj
def verify(ctx: CommandContext, name: str, source: bool, wait: bool, as_json: bool) -> None:
    """Compare the stored files of NAME with their checksums; replace bad ones."""
    shown = terminal.call(ctx, "POST", _path(name, "/verify"), {"source": source})
    if wait:
        shown = asyncio.run(_follow(ctx, name, _verify_ended, quiet=as_json))
    text = _verify_text if wait else lambda last: f"{name}: verify is {last['state']}"
    terminal.show((shown, lambda d: [text(d["verify"])]), as_json=as_json)
    if wait:
        result = shown["verify"]
        if result["state"] in ("failed", "cancelled"):
            raise NotFinishedError(STOPPED, f"dataset {name}", f"verify {result['state']}", "")
        if result["bad"] > result["replaced"]:
            why = f"{result['bad']} bad files, {result['replaced']} replaced"
            raise NotFinishedError(PARTIAL, f"dataset {name}", why, "check the SSD and the source")


@dataset.command()
@_name
@click.option("--to", default="0", show_default=True, help="SSD bytes that may stay, as 20GiB.")
@click.option("--force", is_flag=True, help="Also when it is kept (cache.datasets[].keep).")
@click.option("--wait/--no-wait", default=True, help="Wait until it is done (default).")
@terminal.json_option
@click.pass_obj
def evict(ctx: CommandContext, name: str, to: str, force: bool, wait: bool, as_json: bool) -> None:
    """Take files of NAME out of the store, unless a job uses it; jobs then read the source's."""
    try:
        most = kit.units.parse_size(to)
    except ValueError as error:
        raise kit.errors.SettingsError("--to", str(error), "") from error
    shown = terminal.call(ctx, "POST", _path(name, "/evict"), {"to": most, "force": force})
    if wait:
        shown = asyncio.run(_follow(ctx, name, _evict_ended, quiet=as_json))
    terminal.show((shown, _evict_lines), as_json=as_json)
    if wait and shown["evict"] and shown["evict"]["state"] == "failed":
        why = shown["evict"]["why"]
        raise NotFinishedError(
            STOPPED, f"eviction from {name}", why, f"see 'nodeagent dataset show {name}'"
        )


def _place(source: dict[str, Any]) -> str:
    """A directory, or an image as rbd names it."""
    if "path" in source:
        return str(source["path"])
    if source["kind"] == "pvc":
        at = f"@{source['snapshot']}" if source["snapshot"] else ""
        return f"{source['namespace']}/{source['name']}{at}"
    parts = (source["pool"], source.get("namespace"), source["image"])
    return "/".join(part for part in parts if part) + f"@{source['snapshot']}"


def _evict_ended(d: dict[str, Any]) -> bool:
    return not d["evict"] or d["evict"]["state"] in ("evicted", "failed")


def _evict_lines(d: dict[str, Any]) -> Iterator[str]:
    size, last = kit.units.format_size, d["evict"]
    if last:
        yield f"{d['name']}: {last['state']}, {last['files']} files, {size(last['bytes'])} are free"
    stays = f"{d['files']['done']} files, {size(d['store_bytes'])} with directories and index"
    back = f"; 'nodeagent dataset warm {d['name']}' fills it again"
    yield f"{stays} stay" + (back if d["state"] == "evicted" else "")


@dataset.command()
@_name
@click.option("--snapshot", default="", help="The snapshot; default: as the settings say.")
@click.option("--wait", is_flag=True, help="Wait until it serves, or cannot.")
@terminal.json_option
@click.pass_obj
def update(ctx: CommandContext, name: str, snapshot: str, wait: bool, as_json: bool) -> None:
    """Take NAME to another snapshot; what serves goes on serving until that one is complete."""
    shown = terminal.call(ctx, "POST", _path(name, "/update"), {"snapshot": snapshot})
    if wait:
        shown = asyncio.run(
            _follow(ctx, name, lambda d: _update_ended(d, snapshot), quiet=as_json, fills=True)
        )
    terminal.show((shown, _update_lines), as_json=as_json)
    if wait:
        _judge(shown, "update")


def _update_ended(d: dict[str, Any], snapshot: str = "") -> bool:
    if (next_one := d.get("update")) is not None:
        return next_one["state"] == "partial" and bool(next_one["why"])
    return d["state"] == "complete" and (not snapshot or d["snapshot"] == snapshot)


def _update_lines(d: dict[str, Any]) -> Iterator[str]:
    yield f"{d['name']} serves {d['snapshot'] or d['generation']}"
    if (next_one := d.get("update")) is not None:
        files = next_one["files"]
        done = f"{files['done']} of {files['total']} files"
        yield f"{_next_name(next_one)} comes: {next_one['state']}, {done}" + (
            f" ({next_one['why']})" if next_one["why"] else ""
        )


@dataset.command()
@_name
@click.option("--wait", is_flag=True, help="Wait until it serves, or cannot.")
@terminal.json_option
@click.pass_obj
def rescan(ctx: CommandContext, name: str, wait: bool, as_json: bool) -> None:
    """List the source of a frozen NAME again; what differs is copied, then all of it serves."""
    shown = terminal.call(ctx, "POST", _path(name, "/rescan"))
    before = shown["generation"]
    if wait:
        shown = asyncio.run(_follow(ctx, name, _update_ended, quiet=as_json, fills=True))
    terminal.show((shown, _update_lines), as_json=as_json)
    if wait:
        _judge(shown, "rescan")
        if shown["generation"] == before:
            remedy = f"see 'nodeagent dataset show {name}'"
            raise NotFinishedError(STOPPED, f"rescan of {name}", "it was cancelled", remedy)


@terminal.command(dataset, "publish-manifest")
@_name
@click.option("--to", required=True, help="File *.manifest on the node, as on a writable CephFS.")
def publish_manifest(ctx: CommandContext, name: str, to: str) -> Shown:
    """Write which files the complete snapshot of NAME has, so that other nodes need not list it."""
    answer = terminal.call(ctx, "POST", _path(name, "/manifest"), {"to": to})
    return answer, _manifest_lines


def _manifest_lines(written: dict[str, Any]) -> Iterator[str]:
    size = kit.units.format_size(written["bytes"])
    what = f"{written['entries']} entries in {written['directories']} directories"
    yield f"{written['path']}: {what} of {written['snapshot']}, {size}"
    if written["through_mount"]:
        yield f"{written['through_mount']} of them are read through the mount by every node"


@terminal.command(dataset, "rollback")
@_name
def rollback(ctx: CommandContext, name: str) -> Shown:
    """Take NAME back to the generation that served before, until the next 'update'."""
    shown = terminal.call(ctx, "POST", _path(name, "/rollback"))
    return shown, lambda d: [f"{d['name']} goes back to the generation before"]


@terminal.command(dataset, "generations")
@_name
def generations(ctx: CommandContext, name: str) -> Shown:
    """The generations of NAME: the current one, the next one, and earlier ones."""
    answer = terminal.call(ctx, "GET", _path(name, "/generations"))
    return answer, lambda found: _generation_lines(found["generations"])


def _generation_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    size = kit.units.format_size
    rows = [
        [
            g["generation"], g["snapshot"] or "-", g["state"], str(g["files"]),
            size(g["store_bytes"]), size(g["shared_bytes"]), "; ".join(g["users"][:1]) or "-",
        ]
        for g in found
    ]  # fmt: skip
    head = ["GENERATION", "SNAPSHOT", "STATE", "FILES", "ON SSD", "SHARED", "USED BY"]
    yield from terminal.table(head, rows)


def _verify_ended(d: dict[str, Any]) -> bool:
    return bool(d["verify"]) and d["verify"]["state"] not in ("queued", "running")


@dataset.command()
@_name
@click.option("--yes", is_flag=True, help="Do not ask; without a terminal nobody is asked.")
@terminal.json_option
@click.pass_obj
def remove(ctx: CommandContext, name: str, yes: bool, as_json: bool) -> None:
    """Take the view of NAME down and delete its store, unless a process uses the view."""
    if not yes and terminal.asks():
        click.confirm(f"Delete what is stored of {name}?", abort=True, err=True)
    answer = terminal.call(ctx, "DELETE", _path(name))
    terminal.show((answer, lambda _: [f"{name} is removed"]), as_json=as_json)
    if answer["in_settings"] and not as_json:
        again = f"nodeagent dataset warm {name}"
        terminal.say(f"it is still in the settings; it stays removed until '{again}'", error=True)
