"""Commands about the whole node: how it is, what happened, everything for whoever helps."""

import asyncio
import contextlib
import datetime
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click import shell_completion

import kit.errors
import kit.findings
import kit.room
import kit.units
from kit import terminal

# Codes that no error of ours has (docs/cli.md).
EXIT_CODES = {"well": 0, "attention": 12, "critical": 13}
_COLOURS = {"well": "green", "attention": "yellow", "critical": "red"}
_WORDS = {"well": "WELL", "attention": "NEEDS A LOOK", "critical": "NEEDS A PERSON NOW"}
_TONES = {"good": "green", "mid": "yellow", "bad": "red"}
_SEVERITIES = {"critical": "red", "warning": "yellow"}
MOST_EVENTS = 5  # of the status
_SECONDS = click.IntRange(1, 60)
_SECONDS.name = "number from 1 to 60"  # click: 'abc' is not a valid NAME
ANSWER_SECONDS = 10.0  # after that --watch takes the agent for lost, until it answers again


@click.command()
@click.option("--watch", is_flag=True, help="Print it again and again, until Ctrl-C; ends with 0.")
@click.option(
    "--interval",
    type=_SECONDS,
    default=2,
    metavar="SECONDS",
    show_default=True,
    help="Time between two looks of --watch.",
)
@terminal.output_option
@terminal.json_option
@click.pass_obj
def status(
    ctx: kit.room.CommandContext, watch: bool, interval: int, as_json: bool, output: str | None
) -> None:
    """Say whether this node is well, what it holds, and what is wrong. Ends with 0 when all is
    well, 12 when somebody should look, 13 when somebody must look now."""
    if watch:
        if as_json or output in ("json", "yaml"):
            raise click.UsageError("--watch prints text: leave out --json, -o json and -o yaml")
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(ctx.client(), interval, _wide if output == "wide" else _lines))
        return
    answer = terminal.call(ctx, "GET", "/v1/status")
    plain = {name: said for name, said in answer.items() if name != "sections"}
    shown = answer if not as_json and output in (None, "table", "wide") else plain
    terminal.show((shown, _lines, _wide), as_json=as_json, output=output)
    sys.exit(EXIT_CODES.get(answer["verdict"], EXIT_CODES["critical"]))


async def _watch(client: kit.room.Api, interval: float, lines: terminal.Lines) -> None:
    """Show the status again and again. When the agent does not answer: that, and its last one."""
    answer: Mapping[str, Any] | None = None
    while True:
        lost: list[terminal.Line] = []
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await client.call("GET", "/v1/status")
        except TimeoutError:
            lost = [f"NO ANSWER  the agent has not answered for {ANSWER_SECONDS:.0f} s"]
        except kit.errors.AgentError as error:
            lost = [f"NO ANSWER  {error}"]
        if lost and answer is not None:
            ago = kit.units.format_duration(max(0.0, time.time() - answer["at"]))
            lost.append(f"What follows is {ago} old.")
        _draw([*lost, *(lines(answer) if answer is not None else ())])
        await asyncio.sleep(interval)


def _draw(lines: Sequence[terminal.Line]) -> None:
    """On a terminal in place of what is there, as much as it has room for; else below a line that
    tells the time."""
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        lines = fitting([p for line in lines for p in terminal.folded(line, size.columns)], size)
        click.clear()
    else:
        terminal.say(f"--- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC")
    for line in lines:
        terminal.say(line)


def fitting(lines: Sequence[terminal.Line], size: os.terminal_size) -> list[terminal.Line]:
    """The first lines, as many as fit; one that is longer than the terminal is wide takes several
    of its rows."""
    shown: list[terminal.Line] = []
    left = size.lines - 2  # one row for what is cut off, one for the cursor
    for line in lines:
        left -= max(1, math.ceil(terminal.width(line) / size.columns))
        if left < 0:
            return [*shown, f"… {len(lines) - len(shown)} more lines: nodeagent status"]
        shown.append(line)
    return shown


def _wide(answer: Mapping[str, Any]) -> Iterable[terminal.Line]:
    return _lines(answer, wide=True)


def _lines(answer: Mapping[str, Any], *, wide: bool = False) -> Iterable[terminal.Line]:
    """The screen of ``nodeagent status``; ``wide``: also what is smaller on the page."""
    verdict = answer["verdict"]
    up = kit.units.format_duration(answer["uptime_seconds"])
    word = terminal.Coloured(_WORDS.get(verdict, verdict), _COLOURS.get(verdict))
    yield word, f"  {answer['headline']}"
    yield f"node {answer['node']}, nodeagent {answer['version']}, up {up}"
    yield ""
    rows = [
        (c["name"], _ready(c), c["brief"] or "-", "; ".join(c["reasons"]))
        for c in answer["components"]
    ]
    yield from terminal.table(("COMPONENT", "STATE", "HOLDS", "WHY"), rows)
    yield from (f"! {each}" for each in answer["trouble"])
    for section in answer["sections"]:
        yield ""
        yield f"{section['title'].upper()}  {section['summary']}"
        if section["rows"]:
            head = [name.upper() for name in section["head"]]
            cells = [[_cell(c, row[0]["text"], wide) for c in row] for row in section["rows"]]
            yield from terminal.table(head, cells)
        elif section["empty"]:
            yield str(section["empty"])
    yield ""
    yield f"FINDINGS  {answer['findings_total'] or 'none'}"
    for each in answer["findings"]:
        severity = terminal.Coloured(each["severity"], _SEVERITIES.get(each["severity"]))
        yield severity, f"  {kit.findings.said(each['subject'], each['message'])}"
        yield f"    {each['rule']}, since {kit.units.format_time(each['since'])}"
        yield f"    to do: {each['advice']}"
    if answer["events"]:
        yield ""
        yield "LAST EVENTS"
        yield from map(_event, reversed(answer["events"][: None if wide else MOST_EVENTS]))


def _ready(component: Mapping[str, Any]) -> str:
    return "ready" if component["ready"] else "starting" if component["starting"] else "NOT READY"


def _cell(cell: Mapping[str, Any], name: str, wide: bool) -> str:
    """One line of a page's cell: its text, else the first line below; all of them when wide.
    Without the ``name`` of what the row is about, which stands at its beginning."""
    texts = [text for text in (cell["text"], *(below["text"] for below in cell["below"])) if text]
    said = "; ".join(texts) if wide else (texts or [""])[0]
    if cell["progress"] is not None:
        done, total = cell["progress"]
        said = f"{int(100 * done / total) if total else 100:3d}% {said}"
    return terminal.plain(said).removeprefix(f"dataset {name}: ")


# --- events


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until interrupted.")
@terminal.json_option
@click.pass_obj
def events(ctx: kit.room.CommandContext, follow: bool, as_json: bool) -> None:
    """List what happened lately: findings that came and cleared, states that changed."""
    show = terminal.print_line if as_json else (lambda event: terminal.say(_event(event)))
    if follow:
        asyncio.run(_follow(ctx, show))
        return
    for event in terminal.call(ctx, "GET", "/v1/events")["events"]:
        show(event)


async def _follow(ctx: kit.room.CommandContext, show: Any) -> None:
    async for event in ctx.client().lines("/v1/events/follow"):
        if event["kind"] != "alive":
            show(event)


def _event(event: Mapping[str, Any]) -> terminal.Line:
    when = datetime.datetime.fromtimestamp(event["at"], datetime.UTC).strftime("%m-%d %H:%M:%S")
    tone = _SEVERITIES.get(event["severity"]) if event["kind"] == "raised" else None
    kind = terminal.Coloured(f"{event['kind']:8}", tone)
    return f"{when}  ", kind, f" {kit.findings.said(event['subject'], event['text'])}"


# --- completion, support bundle


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and options. For bash: add
    'source <(nodeagent completion bash)' to ~/.bashrc."""
    made = shell_completion.get_completion_class(shell)
    assert made is not None
    root = context.find_root().command
    script = made(root, {}, "nodeagent", "_NODEAGENT_COMPLETE").source()
    click.echo(script)  # noqa: TID251  a program, nobody's text


@click.command()
@click.pass_context
def man(context: click.Context) -> None:
    """Print the manual page: nodeagent man > nodeagent.8."""
    for line in _manual(context.find_root().command):
        click.echo(line)  # noqa: TID251  a program, nobody's text


def _manual(root: click.Command) -> Iterator[str]:
    """The commands as man reads them."""
    import importlib.metadata  # takes long

    yield f'.TH NODEAGENT 8 "" "nodeagent {importlib.metadata.version("nodeagent")}"'
    yield ".SH NAME\nnodeagent \\- node agent for GPU clusters"
    yield ".SH DESCRIPTION"
    top = click.Context(root, info_name="nodeagent", **root.context_settings)  # it has -h
    for context in _contexts(top):
        usage = context.command.collect_usage_pieces(context)
        yield f'.SS "{_roff(" ".join((context.command_path, *usage)))}"'
        yield _roff(" ".join((context.command.help or "").split()))
        for param in context.command.get_params(context):
            if record := param.get_help_record(context):
                yield ".TP"
                yield from map(_roff, record)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Of a command and all below it."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            below = context.command.get_command(context, name)
            assert below is not None
            yield from _contexts(click.Context(below, parent=context, info_name=name))


def _roff(text: str) -> str:
    quoted = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "''")
    return f"\\&{quoted}" if quoted.startswith((".", "'")) else quoted


@click.command("support-bundle")
@terminal.file_option(
    "--file",
    "target",
    help="Where to write it, - for standard output; default nodeagent-support-HOST-TIME.tar.gz in "
    "this directory.",
)
@terminal.file_option(
    "--log",
    "logs",
    multiple=True,
    help="A log file to take along; by default the journal of nodeagent.service.",
)
@terminal.json_option
@click.pass_obj
def support_bundle(ctx: Any, target: Path | None, logs: tuple[Path, ...], as_json: bool) -> None:
    """Put everything that helps to find a fault into one archive, secrets taken out.

    Works without an agent too; what could not be had is named in the index."""
    from nodeagent.commands import bundle

    now = datetime.datetime.now(datetime.UTC)
    stem = f"nodeagent-support-{platform.node()}-{now:%Y%m%dT%H%M%SZ}"
    target = target or Path(f"{stem}.tar.gz")
    piped = target == bundle.STANDARD_OUTPUT
    if piped and (as_json or sys.stdout.isatty()):
        raise click.UsageError("--file - writes an archive: send it to a file, without --json")
    index = asyncio.run(bundle.make(target, stem, ctx.config, ctx.client, logs))
    if as_json:
        terminal.print_json({"file": str(target), **index})
        return
    lacking = [f"{each['name']}: {each['error']}" for each in index["files"] if each["error"]]
    size = "" if piped else f", {kit.units.format_size(target.stat().st_size)}"
    terminal.say(f"{target}: {len(index['files'])} files{size}", error=piped)
    for each in lacking:
        terminal.say(f"not there: {each}", error=True)


COMMANDS = (status, events, support_bundle, completion, man)
