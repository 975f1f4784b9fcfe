"""``nodeagent dataset``: a client of the admin API."""

import asyncio
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

_name = click.argument("name")


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
    return answer["datasets"], lambda found: _table_lines(found, answer["orphans"])


def _table_lines(datasets: list[dict[str, Any]], orphans: list[str]) -> Iterator[str]:
    rows = []
    for d in datasets:
        total = d["files"]["total"]
        share = f"{d['files']['done'] * 100 // total}%" if total else "-"
        files, size = f"{d['files']['done']}/{total}", kit.units.format_size(d["store_bytes"])
        rows.append([d["name"], d["state"], d["served_by"], share, files, size, d["view"]])
    head = ["NAME", "STATE", "SERVED BY", "STORED", "FILES", "ON SSD", "VIEW"]
    yield from terminal.table(head, rows)
    for name in orphans:
        yield f"{name}: not in the settings; 'dataset remove {name}' deletes it"


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
    yield f"source     {d['source']['kind']} {d['source']['path']} ({d['freshness']}), {read_by}"
    yield f"files      {stored}, {odd}"
    yield f"bytes      {sizes}, {size(d['store_bytes'])} on the SSD"
    if files["no_room"]:
        yield f"no room    for {files['no_room']} files, {size(data['no_room'])}"
    if d["phase"]:
        yield f"progress   {_progress_text(d)}"
    if d["verify"]:
        yield f"verify     {_verify_text(d['verify'])}"
    for note in d["notes"]:
        yield f"note       {note}"
    for failure in d.get("failures", ()):
        yield f"  {terminal.plain(failure['path'])}: {failure['reason']}"


def _verify_text(verify: dict[str, Any]) -> str:
    if "checked_files" not in verify:
        return str(verify["state"])
    left = verify.get("not_compared")
    return (
        f"{verify['state']}: {verify['checked_files']} files, {verify['bad']} bad, "
        f"{verify['replaced']} replaced, {verify['withdrawn']} withdrawn"
        + (f", {left} not compared" if left else "")
    )


def _progress_text(d: dict[str, Any]) -> str:
    files, data, rate, left = d["files"], d["bytes"], d["rate"], d["eta_seconds"]
    eta = "" if left is None else f", {kit.units.format_duration(left)} left"
    size = kit.units.format_size
    return (
        f"{d['state']} {files['done']}/{files['total']} files, {size(data['done'])}/"
        f"{size(data['total'])}, {rate['files']:.0f} files/s, {size(rate['bytes'])}/s, "
        f"{files['failed']} failed{eta}"
    )


@dataset.command()
@_name
@click.option("--wait", is_flag=True, help="Wait until it is complete, or cannot be completed.")
@terminal.json_option
@click.pass_obj
def warm(ctx: CommandContext, name: str, wait: bool, as_json: bool) -> None:
    """Fill the store with NAME; continue after a pause, a cancel or a failure."""
    shown = terminal.call(ctx, "POST", _path(name, "/warm"))
    if wait:
        shown = asyncio.run(_follow(ctx, name, _warm_ended, quiet=as_json))
    if as_json:
        terminal.print_json(shown)
    elif shown["state"] == "complete":
        click.echo(f"{name} is complete: {shown['files']['done']} files, read at {shown['view']}")
    elif not wait:
        follow = f"nodeagent dataset warm {name} --wait"
        click.echo(f"{name} is {shown['state']}; follow it with '{follow}'")
    if wait:
        _judge(shown)


def _warm_ended(d: dict[str, Any]) -> bool:
    if d["state"] in ("waiting", "failed"):
        return bool(d["why"])
    return d["state"] in ("complete", "partial", "cancelled", "removed")


def _judge(d: dict[str, Any]) -> None:
    thing, remedy = f"dataset {d['name']}", "see 'nodeagent dataset show'"
    if d["state"] in ("waiting", "failed"):
        why = d["why"].removeprefix(f"{thing}: ")
        raise NotFinishedError(kit.errors.SourceError.exit_code, thing, why, "")
    if d["state"] == "partial":
        raise NotFinishedError(PARTIAL, thing, f"only partly stored: {d['why']}", remedy)
    if d["state"] in ("cancelled", "removed"):
        raise NotFinishedError(STOPPED, thing, f"it was {d['state']}", remedy)


async def _follow(ctx: CommandContext, name: str, ended: Any, *, quiet: bool) -> dict[str, Any]:
    """Show the progress of a dataset until ``ended``; the dataset then."""
    stream = ctx.client().lines(_path(name, "/progress"))
    if not quiet:
        stream = (_with_bar if terminal.on_terminal() else _with_lines)(stream)
    async for last in stream:
        if ended(last):
            found: dict[str, Any] = last
            return found
    raise NotFinishedError(
        STOPPED, f"dataset {name}", "the agent ended the stream", "see 'nodeagent dataset show'"
    )


async def _with_lines(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    said, state = 0.0, ""
    async for shown in stream:
        now = time.monotonic()
        if now - said >= _PLAIN_LINE_SECONDS or shown["state"] != state:
            said, state = now, shown["state"]
            click.echo(_progress_text(shown), err=True)
        yield shown


async def _with_bar(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    from rich import progress as bars  # only where there is a terminal
    from rich.console import Console

    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[text]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None, text="")
        async for shown in stream:
            done, total = shown["files"]["done"], shown["files"]["total"]
            text = _progress_text(shown).partition(" ")[2]
            bar.update(
                task, completed=done, total=total or None, description=shown["state"], text=text
            )
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
_simple("cancel", "Stop filling or verifying NAME; what is stored stays and serves.")


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


def _verify_ended(d: dict[str, Any]) -> bool:
    return bool(d["verify"]) and d["verify"]["state"] not in ("queued", "running")


@dataset.command()
@_name
@terminal.json_option
@click.pass_obj
def remove(ctx: CommandContext, name: str, as_json: bool) -> None:
    """Take the view of NAME down and delete its store, unless a process uses the view."""
    answer = terminal.call(ctx, "DELETE", _path(name))
    terminal.show((answer, lambda _: [f"{name} is removed"]), as_json=as_json)
    if answer["in_settings"] and not as_json:
        again = f"nodeagent dataset warm {name}"
        click.echo(f"it is still in the settings; it stays removed until '{again}'", err=True)
