"""``nodeagent volume list|show|audit|findings|act``: clients of the volume audit."""

import asyncio
import json
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import click

import kit.units
from nodeagent.cli import context


def _call(ctx: context.Context, method: str, path: str, body: Any = None) -> Any:
    return asyncio.run(ctx.client().call(method, path, body))


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip())


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_(ctx: context.Context, as_json: bool) -> None:
    """Guarded block devices: what they hold, where they are mounted, what is wrong."""
    devices = _call(ctx, "GET", "/v1/audit/devices")["devices"]
    if as_json:
        _print(devices)
        return
    if not devices:
        click.echo("no guarded device is mapped")
        return
    rows = [("DEVICE", "IMAGE OR FILE", "SIZE", "MODE", "STATE", "VOLUME", "FINDINGS")]
    rows += [
        (
            device["name"],
            device["image"] or device["backing"] or "-",
            kit.units.format_size(device["size"]),
            "ro" if device["read_only"] else "rw",
            device["state"],
            device["volume"] or "-",
            str(len(device["findings"]) or "-"),
        )
        for device in devices
    ]
    _table(rows)


@click.command("show")
@click.argument("device")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def show(ctx: context.Context, device: str, as_json: bool) -> None:
    """Everything known of DEVICE: mounts in every namespace, users, records, findings."""
    name = urllib.parse.quote(device.removeprefix("/dev/"), safe="")
    found = _call(ctx, "GET", f"/v1/audit/devices/{name}")
    if as_json:
        _print(found)
        return
    what = found["image"] or found["backing"] or found["driver"]
    click.echo(f"{found['name']} ({found['number']})  {what}  {found['state']}")
    for mount in found["mounts"]:
        click.echo(f"  mounted at {mount['target']} ({', '.join(mount['options'])})")
    for mount in found["elsewhere"]:
        owners = ", ".join(f"pid {o['pid']} ({o['comm']})" for o in mount["owners"])
        who = owners or ", ".join(mount["kept_by"]) or "no process"
        click.echo(
            f"  also in mount namespace {mount['namespace']} at {mount['target']} "
            f"({mount['propagation']}): {who}"
        )
    for user in found["users"]:
        owner = user["owner"]
        click.echo(f"  used by pid {owner['pid']} ({owner['comm']}): {', '.join(user['ways'])}")
    if found["record"]:
        click.echo(f"  staged by kubelet at {found['record']['staging']}")
    for each in found["cluster"]["watchers"] if found["cluster"] else ():
        click.echo(f"  open for writing by {each['client']} at {each['address']}")
    for each in found["found"]:
        _finding(each)


def _finding(found: dict[str, Any]) -> None:
    age = kit.units.format_duration(time.time() - found["since"])
    click.echo(f"{found['severity'].upper()} {found['rule']} for {age}: {found['message']}")
    click.echo(f"  what to do: {found['advice']}")
    click.echo(f"  id: {found['id']}")


@click.command("findings")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--rule", help="Only this rule.")
@click.pass_obj
def findings(ctx: context.Context, as_json: bool, rule: str | None) -> None:
    """What is wrong with this node's volumes, and what to do about it."""
    found = _call(ctx, "GET", "/v1/audit/findings")["findings"]
    found = [each for each in found if rule in (None, each["rule"])]
    if as_json:
        _print(found)
        return
    for each in found:
        _finding(each)
    if not found:
        click.echo("nothing found; 'nodeagent volume audit' says what was looked at")


@click.command("audit")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--last", is_flag=True, help="Show the last pass instead of making one now.")
@click.pass_obj
def audit(ctx: context.Context, as_json: bool, last: bool) -> None:
    """Look at everything now and say what each rule found, or why it cannot tell."""
    answer = _call(ctx, *(("GET", "/v1/audit") if last else ("POST", "/v1/audit/pass")))
    if as_json:
        _print(answer)
        return
    click.echo(
        f"{answer['devices']} devices of {', '.join(answer['drivers'])}, "
        f"{answer['mount_namespaces']} mount namespaces"
    )
    _table(
        [("RULE", "STATE", "WHY")] + [(r["rule"], r["state"], r["why"]) for r in answer["rules"]]
    )
    for source, counts in answer["logs"].items():
        click.echo(
            f"log {source}: {counts['seen']} lines, {counts['matched']} matched, "
            f"{counts['dropped'] + counts['lost']} not looked at"
        )
    for source, why in answer["log_trouble"].items():
        click.echo(f"log {source}: {why}")
    for reason in [*answer["reasons"], *answer["gaps"]]:
        click.echo(f"not seen: {reason}")
    for each in answer["findings"]:
        _finding(each)


@click.command("act")
@click.argument("finding")
@click.option("--yes", is_flag=True, help="Do it. Without this only what would be done is said.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def act(ctx: context.Context, finding: str, yes: bool, as_json: bool) -> None:
    """Do what the agent can do about FINDING (an id); looks again just before."""
    result = _call(ctx, "POST", "/v1/audit/act", {"finding": finding, "dry_run": not yes})
    if as_json:
        _print(result)
    else:
        click.echo(f"{result['outcome']}: {result['what']} ({result['detail']})")


def join(group: click.Group) -> None:
    """Add these commands to ``nodeagent volume``."""
    for command in (list_, show, audit, findings, act):
        group.add_command(command)
