"""``nodeagent top``: the whole node on one screen, drawn again every few seconds.

It shows what ``/v1/status`` says and knows no room: a new one appears by itself. An agent that does
not answer is shown, with the last that it said; top goes on asking.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import kit.errors
import kit.findings
import kit.room
import kit.units
from kit import terminal

ANSWER_SECONDS = 10.0  # after that the agent counts as lost, until it answers again
BAR_WIDTH = 14
SPARK_WIDTH = 20
_BARS = "▁▂▃▄▅▆▇█"
PLAIN_WIDTH = 120  # where there is no terminal
FEWEST_ROWS = 2  # of each table, however small the terminal is
MOST_ROWS = 200  # the agent shows no more of a room
MOST_FINDINGS, MOST_EVENTS = 3, 3
_TONES = {"good": "green", "mid": "yellow", "bad": "red"}
_COLOURS = {"well": "green", "attention": "yellow", "critical": "red"}
_SEVERITIES = {"critical": "red", "warning": "yellow"}
_LEAVE = b"qQ\x03\x04"  # q, Ctrl-C, Ctrl-D


# --- one frame


def frame(
    answer: Mapping[str, Any] | None, lost: str = "", *, rows: int = MOST_ROWS, brief: bool = False
) -> RenderableType:
    """``answer``: the last of ``/v1/status``. ``lost``: why there is no newer one. ``rows``: most
    rows of each table. ``brief``: one line for each, one finding, no events."""
    parts: list[RenderableType] = []
    if lost:
        parts.append(Text(f"NO ANSWER  {terminal.plain(lost)}", style="bold red"))
    if answer is None:
        return Group(*parts)
    if lost:
        ago = kit.units.format_duration(max(0.0, time.time() - answer["at"]))
        parts.append(Text(f"What follows is {ago} old.", style="red"))
    parts.append(_text(answer["headline"], f"bold {_COLOURS.get(answer['verdict'], '')}".strip()))
    parts.append(_state(answer))
    parts += [_text(f"! {each}", "yellow") for each in answer["trouble"]]
    shown = [_section(each, rows, brief) for each in answer["sections"]]
    findings = _findings(answer, 1 if brief else MOST_FINDINGS)
    shown.insert(0 if answer["findings_total"] else len(shown), findings)
    shown += [] if brief else [_events(answer["events"])]
    parts += [Padding(part, (0 if brief else 1, 0, 0, 0)) for part in shown]
    return Group(*parts)


def _text(said: str, style: str = "") -> Text:
    return Text(terminal.plain(said), style=style)


def _state(answer: Mapping[str, Any]) -> Text:
    """Node, version, and the components that do not work."""
    up = kit.units.format_duration(answer["uptime_seconds"])
    said = _text(f"node {answer['node']}, nodeagent {answer['version']}, up {up}", "dim")
    for each in answer["components"]:
        if not each["ready"]:
            word = "is starting" if each["starting"] else "is not ready"
            said.append(f", {each['name']} {word}", style="yellow" if each["starting"] else "red")
    return said


def _section(section: Mapping[str, Any], rows: int, brief: bool) -> RenderableType:
    title = _text(section["title"].upper(), "bold").append(
        f"  {terminal.plain(section['summary'])}", style="not bold"
    )
    if not section["rows"]:
        return Group(title, _text(section["empty"], "dim"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, name in enumerate(section["head"]):
        right = section["rows"][0][number]["number"]
        table.add_column(name, justify="right" if right else "left", overflow="ellipsis")
    shown = section["rows"][:rows]
    for row in shown:
        table.add_row(*(_cell(cell, brief) for cell in row))
    left = len(section["rows"]) - len(shown)
    more = [_text(f"{left} more", "dim")] if left else []
    return Group(title, table, *more)


def _cell(cell: Mapping[str, Any], brief: bool) -> RenderableType:
    """Its text, a bar where there is one, and smaller what is below; paths are left out."""
    tone = _TONES.get(cell["tone"], "")
    style = f"bold {tone}".strip() if cell["style"] == "strong" else tone
    lines: list[RenderableType] = [_text(cell["text"], style)] if cell["text"] else []
    if cell["progress"] is not None:
        done, total = cell["progress"]
        line = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=max(total, 1), completed=min(done, total), width=BAR_WIDTH)
        line.add_row(bar, f"{int(100 * done / total) if total else 100}%")
        lines.insert(0, line)
    if sum(each is not None for each in cell.get("spark", ())) > 1:  # an older agent has none
        lines.append(_text(spark(cell["spark"], cell.get("spark_top", 0.0)), "cyan"))
    lines += [
        _text(below["text"], _TONES.get(below["tone"], "dim"))
        for below in cell["below"]
        if below["text"] and below["style"] != "code"
    ]
    return Group(*lines[: 1 if brief else None])


def spark(points: Sequence[float | None], top: float = 0.0) -> str:
    """The latest of them as bars of an eighth of a line each, from 0 to ``top`` or the highest.
    Where nothing is known there is no bar."""
    shown = points[-SPARK_WIDTH:]
    top = top or max(each or 0.0 for each in shown) or 1e-9
    return "".join(
        " " if each is None else _BARS[round(max(each, 0) / top * (len(_BARS) - 1))]
        for each in shown
    )


def _findings(answer: Mapping[str, Any], most: int) -> RenderableType:
    said: list[Text] = [_text(f"FINDINGS  {answer['findings_total'] or 'none'}", "bold")]
    for each in answer["findings"][:most]:
        line = _text(each["severity"], _SEVERITIES.get(each["severity"], ""))
        said.append(line.append(f"  {_said(each)}", style="default"))
        said.append(_text(f"    to do: {each['advice']}", "dim"))
    left = answer["findings_total"] - min(len(answer["findings"]), most)
    if left > 0:
        said.append(_text(f"{left} more: nodeagent status", "dim"))
    return Group(*said)


def _said(finding: Mapping[str, Any]) -> str:
    return terminal.plain(kit.findings.said(finding["subject"], finding["message"]))


def _events(events: Sequence[Mapping[str, Any]]) -> RenderableType:
    said = [_text("LAST EVENTS" if events else "", "bold")]
    for each in events[:MOST_EVENTS]:
        ago = kit.units.format_duration(max(0.0, time.time() - each["at"]))
        said.append(_text(f"{ago} ago  {each['kind']}  {each['subject']}: {each['text']}"))
    return Group(*said)


def fitting(answer: Mapping[str, Any] | None, console: Console, lost: str) -> RenderableType:
    """The frame with as many rows of each table as the terminal has room for; brief on a small one,
    so that no room is cut off."""
    options = console.options
    rows = max((len(each["rows"]) for each in (answer or {"sections": ()})["sections"]), default=0)
    rows = min(max(rows, FEWEST_ROWS), MOST_ROWS, options.size.height)
    brief = False
    while True:
        made = frame(answer, lost, rows=rows, brief=brief)
        height = len(console.render_lines(made, options.update(height=None), pad=False))
        if height < options.size.height or (brief and rows == 1):
            return made
        if rows == 1 or (rows <= FEWEST_ROWS and not brief):
            brief, rows = True, 2 * FEWEST_ROWS
        else:
            rows -= max(1, (rows - FEWEST_ROWS) // 2)


# --- the loop


def once(answer: Mapping[str, Any]) -> None:
    """One frame on standard output: all rows, no cursor movements."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    Console(width=width, highlight=False).print(frame(answer))


async def follow(client: kit.room.Api, interval: float) -> None:
    """Draw every ``interval`` seconds until q, Ctrl-C or SIGTERM. The terminal is put back."""
    console, leave = Console(highlight=False), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, leave.set)
    leaving = asyncio.create_task(leave.wait(), name="leave")
    answer: Mapping[str, Any] | None = None
    try:
        with _keys(leave), Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(_text("asking the agent …"), refresh=True)
            while not leave.is_set():
                asking = asyncio.create_task(_ask(client), name="ask")
                await _first(asking, leaving)
                if not asking.done():
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                    return
                new, lost = asking.result()
                answer = new if new is not None else answer
                live.update(fitting(answer, console, lost), refresh=True)
                await _first(asyncio.create_task(asyncio.sleep(interval)), leaving)
    finally:
        leaving.cancel()


async def _ask(client: kit.room.Api) -> tuple[Mapping[str, Any] | None, str]:
    """An answer, or why there is none."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await client.call("GET", "/v1/status"), ""
    except TimeoutError:
        return None, f"the agent has not answered for {ANSWER_SECONDS:.0f} s"
    except kit.errors.AgentError as error:
        return None, str(error)


async def _first(task: "asyncio.Task[Any]", leaving: Awaitable[Any]) -> None:
    waiting = {task, asyncio.ensure_future(leaving)}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def _keys(leave: asyncio.Event) -> Iterator[None]:
    """``leave`` is set by a key of ``_LEAVE``. Keys are neither echoed nor left to the shell."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # where there is a terminal
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        typed = os.read(descriptor, 1024)
        if not typed or any(key in _LEAVE for key in typed):  # nothing: the terminal is gone
            loop.remove_reader(descriptor)
            leave.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
