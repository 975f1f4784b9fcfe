"""``nodeagent volume``: the format guard, probes, the ledger and the volume audit.

Status, mode and detach are a kill switch and also work without an agent, straight at the kernel.
What works there is imported there: it takes a second of the processor, and most commands only ask.
"""

import asyncio
import dataclasses
import getpass
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kit.errors
import kit.units
from kit import terminal
from kit.room import CommandContext
from kit.terminal import Shown
from linux import blockdev
from volumes.guard import explain as explain_device
from volumes.ledger import store

if TYPE_CHECKING:
    from volumes import settings

_REASON = click.option("--reason", default="", help="Why; kept in the operator log.")
_DIRECT = click.option(
    "--direct", is_flag=True, help="Do not ask the agent; change the kernel as root."
)
_READING = (
    ("GET", "/v1/volumes/guard"),
    ("GET", "/v1/volumes/guard/rehearsal"),
    ("GET", "/v1/volumes/ledger"),
    ("POST", "/v1/volumes/probe"),
)
# What an action ends with, other than done.
_ACT_ERRORS: dict[str, type[kit.errors.AgentError]] = {
    "refused": kit.errors.RefusedError,
    "limited": kit.errors.RefusedError,
    "failed": kit.errors.HostError,
}
_KILL_SECONDS = 5.0  # a kill switch does not wait for a hanging agent


def path_of(_: click.Context | None, __: click.Parameter | None, given: str) -> str:
    """A device by its path or by its name: /dev/rbd4, rbd4."""
    return given if "/" in given else f"/dev/{given}"


_DEVICE = click.argument(
    "device", callback=path_of, **terminal.completing("/v1/audit/devices", "devices", "name")
)


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
    """The agent's answer; ``direct``'s when no agent of this node answers in time, and for what
    only reads also while the agent's part for it does not run or starts."""

    async def ask() -> Any:
        async with asyncio.timeout(seconds):
            return await ctx.client().call(*request)

    try:
        return asyncio.run(ask())
    except (kit.errors.UnreachableError, TimeoutError, kit.errors.SettingsError):
        if direct is None or ctx.api is not None:
            raise
    except kit.errors.DegradedError as error:
        if direct is None or ctx.api is not None:
            raise
        if request[:2] not in _READING:  # an agent that runs would undo it, or do it twice
            raise _with_way(error, "do it without the agent: --direct") from None
        if os.geteuid() != 0:
            raise _with_way(error, "look without the agent: run this as root") from None
        terminal.say(
            f"nodeagent: {error.thing}: {error.cause}; this is what shows without the agent",
            error=True,
        )
        answer = direct()
        if isinstance(answer, dict) and isinstance(answer.get("agent"), str):
            answer["agent"] = f"runs, but {error.cause}"
        return answer
    return direct()


def _with_way(error: kit.errors.DegradedError, way: str) -> kit.errors.DegradedError:
    remedy = f"{error.remedy}, or {way}" if error.remedy else way
    return kit.errors.DegradedError(error.thing, error.cause, remedy)


def _as_root() -> None:
    if os.geteuid() != 0:
        raise kit.errors.HostError(
            "the agent", "does not answer, and only root can do without it", "run this as root"
        )


def _section(ctx: CommandContext) -> "tuple[settings.VolumesSettings, Path]":
    """Settings and state directory of this node, for work without the agent."""
    _as_root()
    return ctx.offline("volumes")


def _offline(ctx: CommandContext) -> "tuple[settings.GuardSettings, Path]":
    section, state_dir = _section(ctx)
    return section.guard, state_dir


def _usable(ctx: CommandContext) -> None:
    """SettingsError unless the settings file says what the guard's mode is to be."""
    section = ctx.section("volumes")
    if section.error is not None:
        raise section.error


def _status_now(wanted: "settings.GuardSettings", state_dir: Path) -> dict[str, Any]:
    from volumes.guard import without_agent

    return asyncio.run(without_agent.kernel_status(wanted, state_dir))


def _time(at: float) -> str:
    return time.strftime("%F %T", time.localtime(at))


def _status_lines(s: dict[str, Any]) -> Iterator[str]:
    programs = ", ".join(f"{p['name']} (id {p['id']})" for p in s.get("programs", ()))
    yield f"kernel:   {s['mode']}" + (f", program {programs}" if programs else ", not attached")
    yield f"proof:    {s['proof']}"
    yield f"cgroup:   {s.get('cgroup', '?')}" + (" (whole node)" if s.get("whole_node") else "")
    yield f"wanted:   {s['wanted_mode']} (settings: {s['settings_mode']})"
    yield f"majors:   {', '.join(map(str, s.get('majors', ()))) or 'none'}"
    yield from _scope_lines(s.get("scope") or {})
    yield f"agent:    {s['agent']}"
    if s.get("override"):
        yield f"override: {s['override']['by']}: {s['override']['reason']}"
    for warning in dict.fromkeys((*s.get("warnings", ()), *s.get("damaged", ()))):
        yield f"warning:  {warning}"
    if s.get("unsupported"):
        yield f"problem:  {s['unsupported']}"
    for name, count in s.get("counters", {}).items():
        yield f"  {name}: {count}"
    for device in s.get("devices", ()):
        state = "may be formatted" if device["may_be_formatted"] else "; ".join(device["reasons"])
        if device["device"].rpartition("/")[2] in s.get("held", ()):
            state += " (kept attached for the next try)"
        yield f"{device['device']} {device['title']}: {state}"
    for d in s.get("denials", ())[-10:]:
        who = f"{d['command'] or d['program']} pid {d['pid']} pod {d['pod'] or '-'}"
        yield f"{_time(d['at'])} {d['device']}: {who}"


def _scope_lines(scope: dict[str, Any]) -> Iterator[str]:
    """Whose each device is. Of a scope that judges none there is nothing to tell."""
    if not scope or scope["scope"] == "ceph":
        return
    yield f"scope:    {scope['scope']} (reports only)"
    if scope["problem"]:
        yield f"problem:  {scope['problem']}"
    for whose in ("own", "guarded", "unproven"):
        for name, why in sorted(scope[whose].items()):
            yield f"  {name}: {whose}, {why}"


@terminal.command(guard, "status")
@_DIRECT
def status(ctx: CommandContext, direct: bool) -> Shown:
    """What is attached and enforced, proved by an attempt."""

    def here() -> Any:
        wanted, state_dir = _offline(ctx)
        return _status_now(wanted, state_dir)

    answer = here() if direct else _ask(ctx, ("GET", "/v1/volumes/guard", None), here, 10.0)
    return answer, _status_lines


_WOULD = {"refuse": "refuse", "look": "refuse, then look", "lease": "refuse, then lease"}


def _rehearsal_lines(found: dict[str, Any]) -> Iterator[str]:
    rows = sorted(
        found["rows"], key=lambda each: (list(_WOULD).index(each["would"]), -each["last"])
    )
    if found["scope"] == "ceph":
        yield "volumes.guard.scope is ceph: no device of another driver is judged now"
    if found["problem"]:
        yield f"this may not be all: {found['problem']}"
    since = kit.units.format_time(found["since"]) if found["since"] else "now"
    times = found["times"]
    yield (
        f"since {since}, in mode enforce: {times['refuse']} writes would be refused; "
        f"{times['look']} refused until a look at the device; {times['lease']} to blank devices "
        "refused once, then permitted by a lease"
    )
    if rows:
        head = ("WOULD", "TIMES", "LAST", "PROGRAM", "DEVICE", "HELD BEFORE", "POD", "WHOSE")
        yield from terminal.table(head, [
            (
                _WOULD[each["would"]], str(each["times"]), kit.units.format_time(each["last"]),
                each["program"], " ".join(filter(None, (each["device"], each["title"]))),
                each["held"] or "not known", each["pod"] or "-", each["whose"],
            )
            for each in rows
        ])  # fmt: skip
        yield "if one of these is the node's own, name it in volumes.guard.own"
    if found["lost"]:
        yield f"{found['lost']} more rows are not kept"


@terminal.command(guard, "rehearse")
@_DIRECT
def rehearse(ctx: CommandContext, direct: bool) -> Shown:
    """What the guard would have done with writes that volumes.guard.scope only reports."""

    def here() -> Any:
        from volumes.guard import rehearsal_rows

        wanted, state_dir = _offline(ctx)
        found = rehearsal_rows.load(str(state_dir)) or rehearsal_rows.Rows(0.0).as_json()
        return {"scope": wanted.scope, "problem": ""} | found

    answer = here() if direct else _ask(ctx, ("GET", "/v1/volumes/guard/rehearsal", None), here)
    return answer, _rehearsal_lines


@terminal.command(guard, "set-mode")
@click.argument("mode", type=click.Choice(["off", "dry-run", "enforce", "settings"]))
@_REASON
@_DIRECT
def set_mode(ctx: CommandContext, mode: str, reason: str, direct: bool) -> Shown:
    """Change the mode now, over the settings file; 'settings' returns to the file."""

    def here() -> Any:
        from volumes.guard import override

        if mode == "settings":
            _usable(ctx)
        wanted, state_dir = _offline(ctx)
        done = asyncio.run(override.set_mode(wanted, state_dir, mode, _who(), reason))
        if not done.attached and mode in ("dry-run", "enforce"):
            raise kit.errors.RefusedError(
                "format guard",
                "is not attached, so nothing was changed in the kernel",
                f"attach it: nodeagent volume guard attach; it comes in mode {mode}",
            )
        return _status_now(wanted, state_dir) | {"warnings": list(done.warnings)}

    body = {"mode": mode, "by": _who(), "reason": reason}
    request = ("PUT", "/v1/volumes/guard/mode", body)
    return here() if direct else _ask(ctx, request, here, _KILL_SECONDS), _status_lines


@terminal.command(guard, "detach")
@_REASON
@_DIRECT
def detach(ctx: CommandContext, reason: str, direct: bool) -> Shown:
    """The kill switch: detach the program from the kernel, until set-mode."""

    def here() -> Any:
        from volumes.guard import override

        wanted, state_dir = _offline(ctx)
        done = asyncio.run(override.detach(wanted, state_dir, _who(), reason))
        return _status_now(wanted, state_dir) | {"warnings": list(done.warnings)}

    request = ("POST", "/v1/volumes/guard/detach", {"by": _who(), "reason": reason})
    return here() if direct else _ask(ctx, request, here, _KILL_SECONDS), _status_lines


@terminal.command(guard, "attach")
@terminal.file_option(
    "--last-good",
    help="Keeps a copy of settings that can be used, and is used while they cannot.",
)
def attach(ctx: CommandContext, last_good: Path | None) -> Shown:
    """Attach as the settings say, without an agent: at boot, before kubelet starts.

    Settings that cannot be used change nothing in the kernel: what is attached stays as it is, and
    the exit code is 3. After a boot, when nothing is attached, the settings that were last in force
    count instead.
    """
    from volumes.guard import without_agent

    _as_root()
    section = ctx.section("volumes", last_good)
    status = asyncio.run(without_agent.attach(section))
    if section.error is not None:
        terminal.say(
            f"nodeagent: {section.error}; the settings that were last in force count", error=True
        )
    return status, _status_lines


def _probe_lines(v: dict[str, Any]) -> Iterator[str]:
    known = v.get("ledger")
    detail = f" {v['type']} {v['uuid']}".rstrip() if v.get("type") else ""
    if v["verdict"] == "unreadable":
        detail = f" ({v['where']}: {os.strerror(v['errno'])})"
    if v["verdict"] == "unknown_content":
        detail = f" (first at offset {v['offset']})"
    yield f"{v['device']}: {v['verdict'].upper()}{detail}"
    yield f"volume: {v['volume'] or '-'}"
    if known and known["type"]:
        yield f"ledger: {known['type']} {known['uuid']}, last seen on {known['node']}"


def _ledger(state_dir: Path) -> store.LedgerStore:
    found = store.LedgerStore(state_dir / "volumes" / "ledger")
    found.load()
    return found


@volume.command("probe")
@_DEVICE
@terminal.output_option
@terminal.json_option
@click.pass_obj
def probe(ctx: CommandContext, device: str, as_json: bool, output: str | None) -> None:
    """Show what DEVICE holds. Only reads; 'unreadable' and 'blank' are different answers, and the
    exit code of a device that cannot be read is 5."""

    def here() -> Any:
        from volumes.guard.status import describe_probe
        from volumes.probe import prober

        wanted, state_dir = _offline(ctx)
        found = blockdev.by_path(device)

        async def examine() -> Any:
            probing = prober.Prober(wanted.probe_timeout)
            try:
                return await probing.probe(device, found.encrypts)
            finally:
                await probing.close()

        seen = asyncio.run(examine())
        known = _ledger(state_dir).get(found.volume)
        return describe_probe(found, seen, known)

    request = ("POST", "/v1/volumes/probe", {"device": str(Path(device).absolute())})
    answer = _ask(ctx, request, here)
    terminal.show((answer, _probe_lines), as_json=as_json, output=output)
    if answer["verdict"] in ("unreadable", "timeout"):
        sys.exit(kit.errors.SourceError.exit_code)


@terminal.command(volume, "explain")
@_DEVICE
@_DIRECT
def explain(ctx: CommandContext, device: str, direct: bool) -> Shown:
    """What is known of DEVICE, what was refused and why, and the next safe step."""
    name = os.path.realpath(device)

    def here() -> Any:
        from volumes.guard import without_agent

        section, state_dir = _section(ctx)
        return asyncio.run(without_agent.explained(name, section, state_dir))

    def none() -> None:
        return None

    status = None if direct else _ask(ctx, ("GET", "/v1/volumes/guard", None), none, 10.0)
    answer = here() if status is None else _explained(ctx, name, status)
    return answer, lambda a: explain_device.page(**a)


def _explained(ctx: CommandContext, name: str, status: dict[str, Any]) -> dict[str, Any]:
    """What the agent knows of the device."""
    denied = [each for each in status["denials"] if f"/dev/{each['device']}" == name]
    known = next((each for each in status["devices"] if each["device"] == name), None)
    entry = None
    if known is None:
        known = _unwatched(ctx, name, denied)
    else:
        entries = terminal.call(ctx, "GET", "/v1/volumes/ledger")["volumes"]
        entry = next((each for each in entries if each["volume"] == known["volume"]), None)
    try:
        repairs = terminal.call(ctx, "GET", "/v1/audit")["repairs"]
    except kit.errors.AgentError:
        repairs = []  # the audit is off: nothing is repaired
    repair = next((each for each in repairs if f"/dev/{each['device']}" == name), None)
    return {
        "device": known, "ledger": entry, "denials": denied, "mode": status["mode"],
        "repair": repair, "agent": True,
    }  # fmt: skip


def _unwatched(ctx: CommandContext, name: str, denied: list[dict[str, Any]]) -> dict[str, Any]:
    """A partition, or a device that the settings leave out: guarded, but never examined."""
    if not denied:
        raise kit.errors.NotFoundError(
            name, "the guard knows no such device and refused nobody there",
            "see: nodeagent volume guard status, or look without the agent: --direct",
        )  # fmt: skip
    try:
        seen = terminal.call(ctx, "POST", "/v1/volumes/probe", {"device": name})
    except kit.errors.AgentError as error:
        return explain_device.gone(name, f"it cannot be looked at: {error.cause}", denied)
    return explain_device.unwatched(seen, denied)


def _ledger_lines(answer: dict[str, Any]) -> Iterator[str]:
    for each in answer["volumes"]:
        content = f"{each['type']} {each['uuid']}" if each["type"] else "no content seen"
        note = ", a format was permitted and its outcome is unknown" if each["permitted"] else ""
        seen = f"{_time(each['last_seen'])} {each['node']}"
        yield f"{each['volume']} ({each['title']}): {content}, {seen}{note}"
    if not answer["volumes"]:
        yield "the ledger is empty"


@terminal.command(volume, "ledger")
@click.option("--accept", metavar="VOLUME", help="Accept the content that VOLUME holds now.")
def ledger(ctx: CommandContext, accept: str | None) -> Shown:
    """What each volume was last seen to hold."""

    def here() -> Any:
        _, state_dir = _offline(ctx)
        return {"volumes": [dataclasses.asdict(each) for each in _ledger(state_dir).entries()]}

    if accept is not None:
        body = {"volume": accept, "by": _who()}
        answer = _ask(ctx, ("POST", "/v1/volumes/ledger/accept", body))
        return answer, lambda a: [f"{a['volume']}: {a['type']} {a['uuid']} accepted"]
    return _ask(ctx, ("GET", "/v1/volumes/ledger", None), here), _ledger_lines


@terminal.command(volume, "allow-format")
@_DEVICE
@click.option(
    "--volume-id", required=True, help="The volume as 'nodeagent volume probe DEVICE' shows it."
)
@click.option("--reason", required=True, help="Why it may be erased; kept in the operator log.")
def allow_format(ctx: CommandContext, device: str, volume_id: str, reason: str) -> Shown:
    """Permit to format DEVICE for a short time, whatever it holds."""
    path = str(Path(device).absolute())
    body = {"device": path, "volume": volume_id, "reason": reason, "by": _who()}
    answer = _ask(ctx, ("POST", "/v1/volumes/allow-format", body))
    return answer, lambda a: [f"{a['device']} may be formatted for {a['seconds']:g}s"]


@terminal.command(volume, "list")
def list_(ctx: CommandContext) -> Shown:
    """Guarded block devices with image, state, volume and number of findings."""
    return terminal.call(ctx, "GET", "/v1/audit/devices")["devices"], _device_table


def _device_table(devices: list[dict[str, Any]]) -> Iterable[str]:
    if not devices:
        return ["no guarded device is mapped"]
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
    return terminal.table(head, rows)


@terminal.command(volume, "show")
@_DEVICE
def show(ctx: CommandContext, device: str) -> Shown:
    """Everything known about DEVICE: mounts in every namespace, users, records, findings."""
    name = urllib.parse.quote(device.removeprefix("/dev/"), safe="")
    return terminal.call(ctx, "GET", f"/v1/audit/devices/{name}"), _device_lines


def _device_lines(found: dict[str, Any]) -> Iterator[str]:
    what = found["image"] or found["backing"] or found["driver"]
    yield f"{found['name']} ({found['number']})  {what}  {found['state']}"
    for mount in found["mounts"]:
        yield f"  mounted at {mount['target']} ({', '.join(mount['options'])})"
    for mount in found["elsewhere"]:
        owners = ", ".join(f"pid {o['pid']} ({o['comm']})" for o in mount["owners"])
        who = owners or ", ".join(mount["kept_by"]) or "no process"
        where = f"{mount['namespace']} at {mount['target']} ({mount['propagation']})"
        yield f"  also in mount namespace {where}: {who}"
    for user in found["users"]:
        owner = user["owner"]
        who = f"pid {owner['pid']} ({owner['comm']})"
        if not owner["pid"]:
            who = f"loop device {owner['comm']}"
        yield f"  used by {who}: {', '.join(user['ways'])}"
    if found["record"]:
        yield f"  staged by kubelet at {found['record']['staging']}"
    for each in found["cluster"]["watchers"] if found["cluster"] else ():
        yield f"  open for writing by {each['client']} at {each['address']}"
    yield from _finding_lines(found["found"])


def _finding_lines(findings: list[dict[str, Any]]) -> Iterator[str]:
    for found in findings:
        age = kit.units.format_duration(time.time() - found["since"])
        yield f"{found['severity'].upper()} {found['rule']} for {age}: {found['message']}"
        yield f"  what to do: {found['advice']}"
        yield f"  id: {found['id']}"


@terminal.command(volume, "findings")
@click.option("--rule", help="Only this rule.")
def findings(ctx: CommandContext, rule: str | None) -> Shown:
    """What is wrong with this node's volumes, and what to do about it."""
    every = terminal.call(ctx, "GET", "/v1/audit/findings")["findings"]
    if rule is not None and rule not in {each["rule"] for each in every}:
        _is_rule(rule)
    none = ["no findings; 'nodeagent volume audit' shows what the audit can see"]
    return (
        [each for each in every if rule in (None, each["rule"])],
        lambda found: _finding_lines(found) if found else none,
    )


def _is_rule(name: str) -> None:
    """NotFoundError unless a rule has this name."""
    from volumes.audit import evaluate  # the rules themselves; no other command needs them

    known = sorted(each.name for each in evaluate.RULES)
    if name not in known:
        raise kit.errors.NotFoundError(
            f"--rule {name}", "there is no such rule", f"use one of {', '.join(known)}"
        )


@terminal.command(volume, "audit")
@click.option("--last", is_flag=True, help="Show the last scan instead of scanning now.")
def audit(ctx: CommandContext, last: bool) -> Shown:
    """Scan everything now and show each rule's state, or why it is unknown."""
    request = ("GET", "/v1/audit") if last else ("POST", "/v1/audit/pass")
    return terminal.call(ctx, *request), _audit_lines


def _audit_lines(answer: dict[str, Any]) -> Iterator[str]:
    namespaces = f"{answer['mount_namespaces']} mount namespaces"
    names = answer["names"]
    named = "" if names == ["*"] else f" named {', '.join(names)}"
    yield f"{answer['devices']} devices of {', '.join(answer['drivers'])}{named}, {namespaces}"
    rules = [(rule["rule"], rule["state"], rule["why"]) for rule in answer["rules"]]
    yield from terminal.table(("RULE", "STATE", "WHY"), rules)
    for source, counts in answer["logs"].items():
        unread = counts["dropped"] + counts["lost"]
        counted = f"{counts['seen']} lines, {counts['matched']} matched, {unread} not read"
        yield f"log {source}: {counted}"
    for source, why in answer["log_trouble"].items():
        yield f"log {source}: {why}"
    for reason in [*answer["reasons"], *answer["gaps"]]:
        yield f"not seen: {reason}"
    yield from _finding_lines(answer["findings"])


@volume.command("act")
@click.argument("finding", **terminal.completing("/v1/audit/findings", "findings", "id"))
@click.option(
    "--yes", is_flag=True, help="Do it. Without this the agent only says what it would do."
)
@terminal.output_option
@terminal.json_option
@click.pass_obj
def act(ctx: CommandContext, finding: str, yes: bool, as_json: bool, output: str | None) -> None:
    """Carry out the agent's action for FINDING (an id), after another scan."""
    result = terminal.call(ctx, "POST", "/v1/audit/act", {"finding": finding, "dry_run": not yes})
    lines = [f"{result['outcome']}: {result['what']} ({result['detail']})"]
    terminal.show((result, lambda _: lines), as_json=as_json, output=output)
    if error := _ACT_ERRORS.get(result["outcome"]):
        sys.exit(error.exit_code)
