"""``nodeagent volume``: the format guard, probes, the ledger and the volume audit.

Status, mode and detach are a kill switch and also work without an agent, straight at the kernel.
"""

import asyncio
import dataclasses
import getpass
import os
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import kit.errors
import kit.units
from kit import terminal
from kit.room import CommandContext
from linux import blockdev
from volumes import settings
from volumes import status as volume_status
from volumes.guard import kernel, override
from volumes.ledger import store
from volumes.probe import prober

_REASON = click.option("--reason", default="", help="Why; kept in the operator log.")
_DIRECT = click.option(
    "--direct", is_flag=True, help="Do not ask the agent; change the kernel as root."
)
_KILL_SECONDS = 5.0  # a kill switch does not wait for a hanging agent


volume = click.Group("volume")


@volume.group("guard")
def guard() -> None:
    """The program in the kernel that refuses to format what holds data."""


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{os.environ.get('SUDO_USER') or user} on {os.uname().nodename}"


def _ask(
    ctx: CommandContext,
    request: tuple[str, str, Any],
    direct: Callable[[], Any] | None = None,
    seconds: float | None = None,
) -> Any:
    """The agent's answer; ``direct``'s when no agent of this node answers in time."""

    async def ask() -> Any:
        async with asyncio.timeout(seconds):
            return await ctx.client().call(*request)

    try:
        return asyncio.run(ask())
    except (kit.errors.UnreachableError, TimeoutError, kit.errors.SettingsError):
        if direct is None or ctx.api is not None:
            raise
    return direct()


def _offline(ctx: CommandContext) -> tuple[settings.GuardSettings, Path]:
    """Guard settings and state directory of this node, for work without the agent."""
    if os.geteuid() != 0:
        raise kit.errors.HostError(
            "the agent", "does not answer, and only root can do without it", "run this as root"
        )
    section, state_dir = ctx.offline("volumes")
    return section.guard, state_dir


def _status_now(wanted: settings.GuardSettings, state_dir: Path) -> dict[str, Any]:
    return asyncio.run(volume_status.without_agent(wanted, state_dir))


def _show(answer: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    if as_json:
        terminal.print_json(answer)
    else:
        click.echo(text(answer))


def _status_text(s: dict[str, Any]) -> str:
    programs = ", ".join(f"{p['name']} (id {p['id']})" for p in s.get("programs", ()))
    lines = [
        f"kernel:   {s['mode']}" + (f", program {programs}" if programs else ", not attached"),
        f"proof:    {s['proof']}",
        f"scope:    {s.get('cgroup', '?')}" + (" (whole node)" if s.get("whole_node") else ""),
        f"wanted:   {s['wanted_mode']} (settings: {s['settings_mode']})",
        f"majors:   {', '.join(map(str, s.get('majors', ()))) or 'none'}",
        f"agent:    {s['agent']}",
    ]
    if s.get("override"):
        lines.append(f"override: {s['override']['by']}: {s['override']['reason']}")
    if s.get("unsupported"):
        lines.append(f"problem:  {s['unsupported']}")
    if s.get("fallback"):
        lines.append(f"fallback: exec filter {s['fallback']['exec_guard']}; read-only flags on "
                     f"{', '.join(s['fallback']['flagged_read_only']) or 'no device'}")  # fmt: skip
    for name, count in s.get("counters", {}).items():
        lines.append(f"  {name}: {count}")
    for device in s.get("devices", ()):
        state = "may be formatted" if device["may_be_formatted"] else "; ".join(device["reasons"])
        lines.append(f"{device['device']} {device['title']}: {state}")
    for denial in s.get("denials", ())[-10:]:
        when = time.strftime("%F %T", time.localtime(denial["at"]))
        lines.append(f"{when} {denial['device']}: {denial['command'] or denial['program']}"
                     f" pid {denial['pid']} pod {denial['pod'] or '-'}")  # fmt: skip
    return "\n".join(lines)


@guard.command("status")
@terminal.json_option
@_DIRECT
@click.pass_obj
def status(ctx: CommandContext, as_json: bool, direct: bool) -> None:
    """What is attached and enforced, proved by an attempt."""

    def here() -> Any:
        wanted, state_dir = _offline(ctx)
        return _status_now(wanted, state_dir) | {"operator_log": override.noted(state_dir)}

    answer = here() if direct else _ask(ctx, ("GET", "/v1/volumes/guard", None), here, 10.0)
    _show(answer, as_json, _status_text)


@guard.command("set-mode")
@click.argument("mode", type=click.Choice(["off", "dry-run", "enforce", "settings"]))
@_REASON
@terminal.json_option
@_DIRECT
@click.pass_obj
def set_mode(ctx: CommandContext, mode: str, reason: str, as_json: bool, direct: bool) -> None:
    """Change the mode now, over the settings file; 'settings' returns to the file."""

    def here() -> Any:
        wanted, state_dir = _offline(ctx)
        override.note(state_dir, "set-mode", _who(), reason, mode=mode)
        override.set_mode(wanted, state_dir, mode, _who(), reason)
        return _status_now(wanted, state_dir)

    body = {"mode": mode, "by": _who(), "reason": reason}
    request = ("PUT", "/v1/volumes/guard/mode", body)
    _show(here() if direct else _ask(ctx, request, here, _KILL_SECONDS), as_json, _status_text)


@guard.command("detach")
@_REASON
@terminal.json_option
@_DIRECT
@click.pass_obj
def detach(ctx: CommandContext, reason: str, as_json: bool, direct: bool) -> None:
    """The kill switch: detach the program from the kernel, until set-mode."""

    def here() -> Any:
        wanted, state_dir = _offline(ctx)
        override.detach(wanted, state_dir, _who(), reason)
        override.note(state_dir, "detach", _who(), reason)
        return _status_now(wanted, state_dir)

    request = ("POST", "/v1/volumes/guard/detach", {"by": _who(), "reason": reason})
    _show(here() if direct else _ask(ctx, request, here, _KILL_SECONDS), as_json, _status_text)


@guard.command("attach")
@terminal.json_option
@click.pass_obj
def attach(ctx: CommandContext, as_json: bool) -> None:
    """Attach as the settings say, without an agent: at boot, before kubelet starts."""
    wanted, state_dir = _offline(ctx)
    handle = override.handle(wanted)
    mode = override.wanted_mode(wanted, state_dir)
    handle.apply(kernel.wanted(wanted, mode, blockdev.majors()))
    handle.close()
    _show(_status_now(wanted, state_dir), as_json, _status_text)
    if mode is kernel.Mode.OFF:
        click.echo("nodeagent: mode is off: nothing attached", err=True)


def _probe_text(v: dict[str, Any]) -> str:
    known = v.get("ledger")
    detail = f" {v['type']} {v['uuid']}".rstrip() if v.get("type") else ""
    if v["verdict"] == "unreadable":
        detail = f" ({v['where']}: {os.strerror(v['errno'])})"
    if v["verdict"] == "unknown_content":
        detail = f" (first at offset {v['offset']})"
    lines = [f"{v['device']}: {v['verdict'].upper()}{detail}", f"volume: {v['volume'] or '-'}"]
    if known and known["type"]:
        lines.append(f"ledger: {known['type']} {known['uuid']}, last seen on {known['node']}")
    return "\n".join(lines)


@volume.command("probe")
@click.argument("device")
@terminal.json_option
@click.pass_obj
def probe(ctx: CommandContext, device: str, as_json: bool) -> None:
    """Show what DEVICE holds. Only reads; 'unreadable' and 'blank' are different answers."""

    def here() -> Any:
        wanted, state_dir = _offline(ctx)
        found = blockdev.by_path(device)
        ledger = store.Store(state_dir / "volumes" / "ledger")
        ledger.load()

        async def examine() -> Any:
            probing = prober.Prober(wanted.probe_timeout)
            try:
                return await probing.probe(device)
            finally:
                await probing.close()

        seen = asyncio.run(examine())
        return volume_status.describe_probe(found, seen, ledger.get(found.volume))

    request = ("POST", "/v1/volumes/probe", {"device": str(Path(device).absolute())})
    _show(_ask(ctx, request, here), as_json, _probe_text)


def _ledger_text(answer: dict[str, Any]) -> str:
    lines = []
    for each in answer["volumes"]:
        when = time.strftime("%F %T", time.localtime(each["last_seen"]))
        content = f"{each['type']} {each['uuid']}" if each["type"] else "no content seen"
        note = ", a format was permitted and its outcome is unknown" if each["permitted"] else ""
        lines.append(f"{each['volume']} ({each['title']}): {content}, {when} {each['node']}{note}")
    return "\n".join(lines) or "the ledger is empty"


@volume.command("ledger")
@click.option("--accept", metavar="VOLUME", help="Accept the content that VOLUME holds now.")
@terminal.json_option
@click.pass_obj
def ledger(ctx: CommandContext, accept: str | None, as_json: bool) -> None:
    """What each volume was last seen to hold."""

    def here() -> Any:
        _, state_dir = _offline(ctx)
        found = store.Store(state_dir / "volumes" / "ledger")
        found.load()
        return {"volumes": [dataclasses.asdict(each) for each in found.entries()]}

    if accept is not None:
        body = {"volume": accept, "by": _who()}
        answer = _ask(ctx, ("POST", "/v1/volumes/ledger/accept", body))
        _show(answer, as_json, lambda a: f"{a['volume']}: {a['type']} {a['uuid']} accepted")
        return
    _show(_ask(ctx, ("GET", "/v1/volumes/ledger", None), here), as_json, _ledger_text)


@volume.command("allow-format")
@click.argument("device")
@click.option("--volume-id", required=True, help="The volume as 'nodeagent volume probe' shows it.")
@click.option("--reason", required=True, help="Why it may be erased; kept in the operator log.")
@terminal.json_option
@click.pass_obj
def allow_format(
    ctx: CommandContext, device: str, volume_id: str, reason: str, as_json: bool
) -> None:
    """Permit to format DEVICE for a short time, whatever it holds."""
    path = str(Path(device).absolute())
    body = {"device": path, "volume": volume_id, "reason": reason, "by": _who()}
    answer = _ask(ctx, ("POST", "/v1/volumes/allow-format", body))
    _show(answer, as_json, lambda a: f"{a['device']} may be formatted for {a['seconds']:g}s")


@volume.command("list")
@terminal.json_option
@click.pass_obj
def list_(ctx: CommandContext, as_json: bool) -> None:
    """Guarded block devices: what they hold, where they are mounted, what is wrong."""
    devices = terminal.call(ctx, "GET", "/v1/audit/devices")["devices"]
    if as_json:
        terminal.print_json(devices)
        return
    if not devices:
        click.echo("no guarded device is mapped")
        return
    head = ("DEVICE", "IMAGE OR FILE", "SIZE", "MODE", "STATE", "VOLUME", "FINDINGS")
    rows = [
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
    terminal.table(head, rows)


@volume.command("show")
@click.argument("device")
@terminal.json_option
@click.pass_obj
def show(ctx: CommandContext, device: str, as_json: bool) -> None:
    """Everything known about DEVICE: mounts in every namespace, users, records, findings."""
    name = urllib.parse.quote(device.removeprefix("/dev/"), safe="")
    found = terminal.call(ctx, "GET", f"/v1/audit/devices/{name}")
    if as_json:
        terminal.print_json(found)
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


@volume.command("findings")
@terminal.json_option
@click.option("--rule", help="Only this rule.")
@click.pass_obj
def findings(ctx: CommandContext, as_json: bool, rule: str | None) -> None:
    """What is wrong with this node's volumes, and what to do about it."""
    found = terminal.call(ctx, "GET", "/v1/audit/findings")["findings"]
    found = [each for each in found if rule in (None, each["rule"])]
    if as_json:
        terminal.print_json(found)
        return
    for each in found:
        _finding(each)
    if not found:
        click.echo("no findings; 'nodeagent volume audit' shows what the audit can see")


@volume.command("audit")
@terminal.json_option
@click.option("--last", is_flag=True, help="Show the last scan instead of scanning now.")
@click.pass_obj
def audit(ctx: CommandContext, as_json: bool, last: bool) -> None:
    """Scan everything now and show each rule's state, or why it is unknown."""
    answer = terminal.call(ctx, *(("GET", "/v1/audit") if last else ("POST", "/v1/audit/pass")))
    if as_json:
        terminal.print_json(answer)
        return
    click.echo(
        f"{answer['devices']} devices of {', '.join(answer['drivers'])}, "
        f"{answer['mount_namespaces']} mount namespaces"
    )
    rules = [(rule["rule"], rule["state"], rule["why"]) for rule in answer["rules"]]
    terminal.table(("RULE", "STATE", "WHY"), rules)
    for source, counts in answer["logs"].items():
        click.echo(
            f"log {source}: {counts['seen']} lines, {counts['matched']} matched, "
            f"{counts['dropped'] + counts['lost']} not read"
        )
    for source, why in answer["log_trouble"].items():
        click.echo(f"log {source}: {why}")
    for reason in [*answer["reasons"], *answer["gaps"]]:
        click.echo(f"not seen: {reason}")
    for each in answer["findings"]:
        _finding(each)


@volume.command("act")
@click.argument("finding")
@click.option(
    "--yes", is_flag=True, help="Do it. Without this the agent only says what it would do."
)
@terminal.json_option
@click.pass_obj
def act(ctx: CommandContext, finding: str, yes: bool, as_json: bool) -> None:
    """Carry out the agent's action for FINDING (an id), after another scan."""
    result = terminal.call(ctx, "POST", "/v1/audit/act", {"finding": finding, "dry_run": not yes})
    if as_json:
        terminal.print_json(result)
    else:
        click.echo(f"{result['outcome']}: {result['what']} ({result['detail']})")
