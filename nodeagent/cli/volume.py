"""``nodeagent volume``: the format guard, probes and the ledger.

Status, mode and detach are a kill switch and also work without an agent, straight at the kernel.
"""

import asyncio
import dataclasses
import getpass
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import kit.errors
from linux import blockdev
from nodeagent import client, configfile
from nodeagent.cli import context
from nodeagent.settings import Settings
from volumes import settings
from volumes import status as volume_status
from volumes.guard import kernel, override
from volumes.ledger import store
from volumes.probe import prober

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_REASON = click.option("--reason", default="", help="Why; kept in the operator log.")
_DIRECT = click.option(
    "--direct", is_flag=True, help="Do not ask the agent: straight at the kernel, as root."
)
_KILL_SECONDS = 5.0  # a kill switch does not wait for a hanging agent


@click.group("volume")
def group() -> None:
    """Volumes: format guard, probes, ledger."""


@group.group("guard")
def guard() -> None:
    """The program in the kernel that refuses to format what holds data."""


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{os.environ.get('SUDO_USER') or user} on {os.uname().nodename}"


def _settings(ctx: context.Context) -> Settings:
    """The file's settings; the defaults when there is no file, so that a kill switch works."""
    try:
        return configfile.load(ctx.config)
    except kit.errors.SettingsError as error:
        if ctx.config.exists():
            click.echo(f"nodeagent: {error}; using the defaults", err=True)
        return Settings()


def _call(
    ctx: context.Context,
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
    except (client.UnreachableError, TimeoutError, kit.errors.SettingsError):
        if direct is None or ctx.api is not None:
            raise
    return direct()


def _room(ctx: context.Context) -> tuple[settings.GuardSettings, Path]:
    """Guard settings and state directory of this node, for work without the agent."""
    if os.geteuid() != 0:
        raise kit.errors.HostError("no agent answers", "and this is not root", "run it as root")
    loaded = _settings(ctx)
    wanted = loaded.volumes or settings.VolumesSettings()
    return wanted.guard, loaded.state_dir


def _show(answer: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    click.echo(json.dumps(answer, indent=2) if as_json else text(answer))


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
        lines.append(f"fallback: exec guard {s['fallback']['exec_guard']}; read-only flags on "
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
@_JSON
@_DIRECT
@click.pass_obj
def status(ctx: context.Context, as_json: bool, direct: bool) -> None:
    """What is attached and enforced, proved by an attempt."""

    def here() -> Any:
        wanted, state_dir = _room(ctx)
        return volume_status.without_agent(wanted, state_dir) | {
            "operator_log": override.noted(state_dir)
        }

    answer = here() if direct else _call(ctx, ("GET", "/v1/volumes/guard", None), here, 10.0)
    _show(answer, as_json, _status_text)


@guard.command("set-mode")
@click.argument("mode", type=click.Choice(["off", "dry-run", "enforce", "settings"]))
@_REASON
@_JSON
@_DIRECT
@click.pass_obj
def set_mode(ctx: context.Context, mode: str, reason: str, as_json: bool, direct: bool) -> None:
    """Change the mode now, past the settings file; 'settings' gives it back to the file."""

    def here() -> Any:
        wanted, state_dir = _room(ctx)
        override.note(state_dir, "set-mode", _who(), reason, mode=mode)
        override.set_mode(wanted, state_dir, mode, _who(), reason)
        return volume_status.without_agent(wanted, state_dir)

    body = {"mode": mode, "by": _who(), "reason": reason}
    request = ("PUT", "/v1/volumes/guard/mode", body)
    _show(here() if direct else _call(ctx, request, here, _KILL_SECONDS), as_json, _status_text)


@guard.command("detach")
@_REASON
@_JSON
@_DIRECT
@click.pass_obj
def detach(ctx: context.Context, reason: str, as_json: bool, direct: bool) -> None:
    """The kill switch: take the program out of the kernel; it stays out until set-mode."""

    def here() -> Any:
        wanted, state_dir = _room(ctx)
        override.detach(wanted, state_dir, _who(), reason)
        override.note(state_dir, "detach", _who(), reason)
        return volume_status.without_agent(wanted, state_dir)

    request = ("POST", "/v1/volumes/guard/detach", {"by": _who(), "reason": reason})
    _show(here() if direct else _call(ctx, request, here, _KILL_SECONDS), as_json, _status_text)


@guard.command("attach")
@_JSON
@click.pass_obj
def attach(ctx: context.Context, as_json: bool) -> None:
    """Attach as the settings say, without an agent: for the boot, before kubelet starts."""
    wanted, state_dir = _room(ctx)
    handle = override.handle(wanted)
    mode = override.wanted_mode(wanted, state_dir)
    handle.apply(kernel.wanted(wanted, mode, blockdev.majors()))
    handle.close()
    _show(volume_status.without_agent(wanted, state_dir), as_json, _status_text)
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


@group.command("probe")
@click.argument("device")
@_JSON
@click.pass_obj
def probe(ctx: context.Context, device: str, as_json: bool) -> None:
    """What DEVICE holds: reads only, and tells 'could not read' from 'nothing there'."""

    def here() -> Any:
        wanted, state_dir = _room(ctx)
        found = blockdev.by_path(device)
        ledger = store.Store(state_dir / "volumes" / "ledger")
        ledger.load()

        async def look() -> Any:
            looker = prober.Prober(wanted.probe_timeout)
            try:
                return await looker.probe(device)
            finally:
                await looker.close()

        seen = asyncio.run(look())
        return volume_status.describe_probe(found, seen, ledger.get(found.volume))

    request = ("POST", "/v1/volumes/probe", {"device": str(Path(device).absolute())})
    _show(_call(ctx, request, here), as_json, _probe_text)


def _ledger_text(answer: dict[str, Any]) -> str:
    lines = []
    for each in answer["volumes"]:
        when = time.strftime("%F %T", time.localtime(each["last_seen"]))
        content = f"{each['type']} {each['uuid']}" if each["type"] else "no content seen"
        note = ", a format was permitted" if each["permitted"] else ""
        lines.append(f"{each['volume']} ({each['title']}): {content}, {when} {each['node']}{note}")
    return "\n".join(lines) or "no volume is known"


@group.command("ledger")
@click.option("--accept", metavar="VOLUME", help="Accept that its content is another one now.")
@_JSON
@click.pass_obj
def ledger(ctx: context.Context, accept: str | None, as_json: bool) -> None:
    """What each volume was last seen to hold."""

    def here() -> Any:
        _, state_dir = _room(ctx)
        found = store.Store(state_dir / "volumes" / "ledger")
        found.load()
        return {"volumes": [dataclasses.asdict(each) for each in found.entries()]}

    if accept is not None:
        body = {"volume": accept, "by": _who()}
        answer = _call(ctx, ("POST", "/v1/volumes/ledger/accept", body))
        _show(answer, as_json, lambda a: f"{a['volume']}: {a['type']} {a['uuid']} accepted")
        return
    _show(_call(ctx, ("GET", "/v1/volumes/ledger", None), here), as_json, _ledger_text)


@group.command("allow-format")
@click.argument("device")
@click.option("--volume-id", required=True, help="The volume as 'nodeagent volume probe' shows it.")
@click.option("--reason", required=True, help="Why its content may go; kept in the operator log.")
@_JSON
@click.pass_obj
def allow_format(
    ctx: context.Context, device: str, volume_id: str, reason: str, as_json: bool
) -> None:
    """Permit to format DEVICE once, whatever it holds, for a short time."""
    path = str(Path(device).absolute())
    body = {"device": path, "volume": volume_id, "reason": reason, "by": _who()}
    answer = _call(ctx, ("POST", "/v1/volumes/allow-format", body))
    _show(answer, as_json, lambda a: f"{a['device']} may be formatted for {a['seconds']:g}s")
