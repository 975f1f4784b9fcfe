"""``nodeagent image``: container images kept ready on this node."""

import asyncio
import contextlib
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import kit.errors
import kit.traces
import kit.units
from kit import terminal
from kit.room import CommandContext
from kit.terminal import Shown

_FIELDS = (
    *("ref", "digest", "state", "pinned", "bytes_total", "bytes_done", "reason"),
    *("by", "keep", "priority", "in_use", "last_used", "dropped_until"),
)


class ImageError(kit.errors.AgentError):
    """The image that the command waited for did not become ready."""

    exit_code = 5


image = click.Group("image")
_ref = click.argument("ref", **terminal.completing("/v1/images", "images", "ref"))


def _call(ctx: CommandContext, method: str, path: str, body: Any = None, **query: str) -> Any:
    return terminal.call(ctx, method, f"/v1/images{path}", body, **query)


def _share(row: dict[str, Any]) -> str:
    total = row["bytes_total"]
    if not total:
        return "-"
    done = 100 * row["bytes_done"] / total
    return f"{done:.0f} % of {kit.units.format_size(total)}"


def _row_lines(row: dict[str, Any]) -> Iterator[str]:
    pinned = "pinned" if row["pinned"] else "not pinned"
    yield f"{row['ref']}: {row['state']}, {pinned}, {_share(row)}"
    if reason := _reason(row):
        yield f"  {reason}"


@terminal.command(image, "list")
def list_images(ctx: CommandContext) -> Shown:
    """All images that are requested or pinned on this node."""
    rows = _call(ctx, "GET", "")["images"]
    return [{key: row[key] for key in _FIELDS} for row in rows], _table_lines, _wide_lines


def _table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "No image is requested or pinned here; see preheat.images in the settings."
    else:
        head = ("IMAGE", "STATE", "PIN", "FETCHED", "REASON")
        yield from terminal.table(head, [_cells(row) for row in rows])


def _wide_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    head = ("IMAGE", "STATE", "PIN", "FETCHED", "BY", "KEEP", "PRIORITY", "USED", "DIGEST")
    yield from terminal.table((*head, "REASON"), [_wide_cells(row) for row in rows])


def _wide_cells(row: dict[str, Any]) -> tuple[str, ...]:
    *most, reason = _cells(row)
    digest = row["digest"] or "-"
    return (*most, row["by"], row["keep"], str(row["priority"]), _used(row), digest, reason)


def _used(row: dict[str, Any]) -> str:
    """When an image was last used, for people."""
    if row["in_use"]:
        return "now"
    if row["last_used"] is None:
        return "never"
    return f"{kit.units.format_duration(time.time() - row['last_used'])} ago"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    pinned = "pinned" if row["pinned"] else "-"
    return row["ref"], row["state"], pinned, _share(row), _reason(row)


def _reason(row: dict[str, Any]) -> str:
    return row["reason"] if row["state"] != "ready" or row["dropped_until"] else ""


@terminal.command(image, "show")
@_ref
def show(ctx: CommandContext, ref: str) -> Shown:
    """Everything about one image; each layer while it is pulled."""
    return _call(ctx, "GET", "/one", ref=ref), _detail_lines


def _detail_lines(row: dict[str, Any]) -> Iterator[str]:
    yield from _row_lines(row)
    size = kit.units.format_size
    lines = {
        "digest": row["digest"] or "not known yet",
        "requested by": f"{row['by']}, pin {row['keep']}, priority {row['priority']}",
        "to fetch": size(row["bytes_missing"]),
        "unpacked": size(row["bytes_unpacked"]),
        "used": _used(row),
    }
    if row["failure_kind"]:
        again = "no retry"
        if row["retry_at"] is not None:
            again = f"retry in {kit.units.format_duration(row['retry_at'] - time.time())}"
        lines["failure"] = f"{row['failure_kind']}, attempt {row['attempts']}, {again}"
    for key, value in lines.items():
        yield f"  {key + ':':<14} {value}"
    for layer in row["layers"]:
        done, total = layer["bytes_done"], layer["bytes_total"]
        yield f"  {layer['digest'][:19]}  {100 * done / total:4.0f} %  {size(total):>10}"


@image.command("preheat")
@_ref
@click.option("--wait", is_flag=True, help="Show progress until it is ready; fail if it fails.")
@click.option("--pin", default="always", metavar="RULE", help="always, never or a time like 72h.")
@terminal.json_option
@click.pass_obj
def preheat(ctx: CommandContext, ref: str, wait: bool, pin: str, as_json: bool) -> None:
    """Pull REF to this node now and pin it."""
    rule: Any = pin if pin in ("always", "never") else {"for": pin}
    row = _call(ctx, "POST", "/preheat", {"ref": ref, "pin": rule})
    if wait:
        row = asyncio.run(_wait(ctx, row, quiet=as_json))
    terminal.show((row, _row_lines), as_json=as_json)
    if wait and row["state"] not in ("ready", "lazy"):
        raise ImageError(f"image {ref}", f"{row['state']} ({row['reason']})", "")


async def _wait(ctx: CommandContext, row: dict[str, Any], quiet: bool) -> dict[str, Any]:
    from rich import console, progress  # only where something is drawn

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        disable=quiet,
        transient=True,
    )
    query = f"/v1/images/watch?ref={urllib.parse.quote(row['ref'], safe='')}"
    reasons = terminal.Reasons()
    with bar:
        task = bar.add_task("looking", total=None)
        async for now in ctx.client().lines(query):
            if row["reason"] and row["state"] != "looking":  # of the last one the error tells it
                reasons.tell(f"{row['ref']} is {row['state']}: {row['reason']}")
            row = now
            bar.update(
                task,
                description=row["state"],
                total=row["bytes_total"] or None,
                completed=row["bytes_done"],
            )
    return row


def _simple(name: str, text: str) -> None:
    @_ref
    def run(ctx: CommandContext, ref: str) -> Shown:
        return _call(ctx, "POST", f"/{name}", {"ref": ref}), _row_lines

    run.__doc__ = text
    terminal.command(image, name)(run)


_simple("pin", "Pin REF, so that garbage collection does not delete it; pull it first if needed.")
_simple("unpin", "Release REF: delete its pin; the settings do not request it again until you do.")
_simple("pause", "Stop pulling REF; the bytes fetched so far stay.")
_simple("resume", "Continue to pull REF, or retry at once after a failure.")
_simple("cancel", "Stop pulling REF and delete the bytes fetched so far.")


@terminal.command(image, "release-all")
@click.option("--yes", is_flag=True, help="Release it; without this it is only listed.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The runtime's socket; default: preheat.socket of the settings file.",
)
def release_all(ctx: CommandContext, yes: bool, socket: Path | None) -> Shown:
    """List the pins, holds and labels of ours in the runtime; with --yes take them out.

    For a node whose agent was removed: no agent may run. Images stay.
    """
    from preheat import uninstall  # grpc, which other commands do without

    settings, state_dir = ctx.offline("preheat")
    with kit.traces.without_agent(state_dir) if yes else contextlib.nullcontext():
        found = asyncio.run(uninstall.release_all(socket or settings.socket, yes=yes))
    rows = [each.as_json() for each in found]
    return {"found": rows, "released": yes}, _trace_lines


def _trace_lines(shown: dict[str, Any]) -> Iterator[str]:
    found = shown["found"]
    if not found:
        yield "Nothing of ours is in the container runtime."
        return
    rows = [(each["kind"], each["name"]) for each in found]
    yield from terminal.table(("WHAT", "NAME"), rows)
    yield ""
    yield f"{len(found)} in all; " + ("released." if shown["released"] else "--yes releases them.")


@terminal.command(image, "plan")
def plan(ctx: CommandContext) -> Shown:
    """What is pulled next, what is not and why, and how much images share layers."""
    return _call(ctx, "GET", "/plan"), _plan_lines


def _plan_lines(found: dict[str, Any]) -> Iterator[str]:
    size = kit.units.format_size
    disk = found["disk"]
    room = f"{size(max(0, disk['room']))} before the kubelet's thresholds"
    yield f"disk: {size(disk['free'])} free of {size(disk['capacity'])}, {room}"
    yield f"thresholds: {disk['thresholds']}"
    yield f"pins: {size(found['pinned_bytes'])} of {size(found['pin_budget'])}"
    if found["pause"]:
        yield f"paused: {found['pause']}"
    for title in ("running", "pull", "waiting", "pin"):
        for ref in found[title]:
            yield f"{title}: {ref}"
    for title in ("release", "skip"):
        for each in found[title]:
            yield f"{title}: {each['ref']} ({each['text']})"
    for each in found["reuse"]:
        share = 100 * each["shared"] / each["total"] if each["total"] else 0
        bases = f" with {', '.join(each['bases'])}" if each["bases"] else ""
        yield f"layers: {each['ref']} shares {share:.0f} % of {size(each['total'])}{bases}"
