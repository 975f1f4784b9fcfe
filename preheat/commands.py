"""``nodeagent image``: container images kept ready on this node."""

import asyncio
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import click

import kit.errors
import kit.units
from kit import terminal
from kit.room import CommandContext
from kit.terminal import Shown

_FIELDS = (
    *("ref", "digest", "state", "pinned", "bytes_total", "bytes_done", "reason"),
    *("by", "keep", "priority", "in_use"),
)


class ImageError(kit.errors.AgentError):
    """The image that the command waited for did not become ready."""

    exit_code = 5


image = click.Group("image")


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
    if row["reason"] and row["state"] != "ready":
        yield f"  {row['reason']}"


@terminal.command(image, "list")
def list_images(ctx: CommandContext) -> Shown:
    """All images that are requested or pinned on this node."""
    rows = _call(ctx, "GET", "")["images"]
    return [{key: row[key] for key in _FIELDS} for row in rows], _table_lines


def _table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "No image is requested or pinned here; see preheat.images in the settings."
    width = max((len(row["ref"]) for row in rows), default=0)
    for row in rows:
        pinned = "pinned" if row["pinned"] else "-"
        line = f"{row['ref']:<{width}}  {row['state']:<9}  {pinned:<6}  {_share(row):<20}"
        yield (line + (f"  {row['reason']}" if row["state"] != "ready" else "")).rstrip()


@terminal.command(image, "show")
@click.argument("ref")
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
        "in use": "yes" if row["in_use"] else "no",
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
@click.argument("ref")
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
    if wait and row["state"] != "ready":
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
    with bar:
        task = bar.add_task("looking", total=None)
        async for row in ctx.client().lines(query):
            bar.update(
                task,
                description=row["state"],
                total=row["bytes_total"] or None,
                completed=row["bytes_done"],
            )
    return row


def _simple(name: str, text: str) -> None:
    @click.argument("ref")
    def run(ctx: CommandContext, ref: str) -> Shown:
        return _call(ctx, "POST", f"/{name}", {"ref": ref}), _row_lines

    run.__doc__ = text
    terminal.command(image, name)(run)


_simple("pin", "Pin REF, so that garbage collection does not delete it; pull it first if needed.")
_simple("unpin", "Release REF: delete its pin; the settings do not request it again until you do.")
_simple("pause", "Stop pulling REF; the bytes fetched so far stay.")
_simple("resume", "Continue to pull REF, or retry at once after a failure.")
_simple("cancel", "Stop pulling REF and delete the bytes fetched so far.")


@terminal.command(image, "plan")
def plan(ctx: CommandContext) -> Shown:
    """What is pulled next, what is not and why, and how much images share layers."""
    return _call(ctx, "GET", "/plan"), _plan_lines


def _plan_lines(found: dict[str, Any]) -> Iterator[str]:
    size = kit.units.format_size
    disk = found["disk"]
    room = f"{size(max(0, disk['room']))} before the kubelet's thresholds"
    yield f"disk: {size(disk['free'])} free of {size(disk['capacity'])}, {room}"
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
