"""The status page in a real Chromium, beside an agent that is in the middle of its work.

With PICTURES=FOLDER in the environment the pictures of the page stay there (docs/status-page.png).
"""

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

import kit.findings
import kit.room
import kit.settings
import kit.units
from nodeagent import app
from nodeagent.api import server
from nodeagent.state import RunningRoom, State
from tests.nodeagent.test_page import Component
from tests.testbed import browser, busy_node, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(600 if os.environ.get("PICTURES") else 120)]

WINDOWS = {"phone": (390, 844), "desktop": (1280, 800), "wall": (2560, 1440)}
SCHEMES = ("light", "dark")

# What each row of the page says: its first cell, and of the column with a bar what the bar means.
_ROWS = """
[...document.querySelectorAll('tbody tr:not(.note)')].map(row => {
  const bar = row.querySelector('progress'), next = row.nextElementSibling;
  return {
    name: row.cells[0].firstElementChild.textContent,
    text: row.innerText + (next && next.matches('.note') ? next.innerText : ''),
    done: bar && bar.value, total: bar && bar.max,
    spark: row.querySelectorAll('svg.spark').length,
  };
})
"""
_FINDINGS = """
[...document.querySelectorAll('#findings li')].map(each => ({
  severity: each.querySelector('.badge').textContent,
  subject: each.querySelector('.what').textContent,
  text: each.innerText,
  links: [...each.querySelectorAll('a')].map(link => link.getAttribute('href')),
}))
"""
# What reaches over the right edge of its card, and versions that are broken inside.
_OUTSIDE = """
[...document.querySelectorAll('section *')].filter(each => {
  const box = each.getBoundingClientRect(), card = each.closest('section').getBoundingClientRect();
  return box.width && box.right > card.right + 1;
}).map(each => each.outerHTML.slice(0, 200))
"""
_BROKEN = """
[...document.querySelectorAll('td code.short')].filter(
  each => innerWidth >= 1280 && each.getClientRects().length > 1
).map(each => each.textContent)
"""
_WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest_asyncio.fixture
async def page(area: Path, busy: busy_node.BusyNode) -> AsyncIterator[browser.Page]:
    """The page as it is first shown. Whatever it complains of fails the test."""
    async with browser.opened(area) as made:
        await made.go(address(busy))
        yield made
        assert made.complaints == []
        others = [url for url in made.asked if not url.startswith((address(busy), "data:"))]
        assert others == []


def said_of_hits(dataset: dict[str, Any]) -> str:
    known = dataset["hits"]
    return kit.units.format_share(known["ratio"]) if known else "not known"


def address(busy: busy_node.BusyNode) -> str:
    return f"http://127.0.0.1:{busy.agent.port}/"


async def row(page: browser.Page, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in await page.run(_ROWS) if each["name"] == name)
    return found


async def get(busy: busy_node.BusyNode, path: str) -> Any:
    return await asyncio.to_thread(busy.agent.get, path)


async def test_numbers_are_those_of_the_api(page: browser.Page, busy: busy_node.BusyNode) -> None:
    """Each at one moment: what moves is read until page and API have the same."""
    size = kit.units.format_size

    async def same_dataset(name: str) -> bool:
        api, shown = await get(busy, f"/v1/datasets/{name}"), await row(page, name)
        files, data = api["files"], api["bytes"]
        texts = (
            api["state"], api["used_by"].partition(": ")[0] or "nobody", said_of_hits(api),
            api["view"], api["generation"],
            size(api["store_bytes"]),
            f"{size(data['done'])} of {size(data['total'])}",
            f"{files['done']:,} of {files['total']:,} files",
        )  # fmt: skip
        return (shown["done"], shown["total"]) == (data["done"], data["total"]) and all(
            text in shown["text"] for text in texts
        )

    async def same_image(ref: str) -> bool:
        api = await asyncio.to_thread(busy.image, ref)
        shown = await row(page, ref)
        pinned = "pinned" if api["pinned"] else "not pinned"
        texts = (
            api["state"], pinned, api["digest"][:19], api["reason"],
            f"{size(api['bytes_done'])} of {size(api['bytes_total'])}",
        )  # fmt: skip
        return (shown["done"], shown["total"]) == (api["bytes_done"], api["bytes_total"]) and all(
            text in shown["text"] for text in texts
        )

    async def same_verdict() -> bool:
        api = await get(busy, "/v1/status")
        shown = await page.run("document.getElementById('headline').textContent")
        parts = await page.run("document.querySelector('.parts').innerText")
        return shown == api["headline"] and all(
            f"{part['name']} ready" in parts and part["brief"] in parts
            for part in api["components"]
        )

    for name in (busy_node.COMPLETE, busy_node.WARMING):
        await waiting.until_async(functools.partial(same_dataset, name), 30, f"{name} on the page")
    for ref in (busy_node.PINNED, busy_node.PULLING, busy_node.LARGE):
        await waiting.until_async(functools.partial(same_image, ref), 30, f"{ref} on the page")
    await waiting.until_async(same_verdict, 30, "the headline")
    guarded = busy.agent.guarded(busy.device)
    volume = await row(page, guarded["title"])
    assert busy.device in volume["text"]
    assert size(guarded["size"]) in volume["text"]
    # That something is under way, else the comparison shows little.
    assert (await get(busy, f"/v1/datasets/{busy_node.WARMING}"))["rate"]["history"]
    warming = await row(page, busy_node.WARMING)
    assert warming["spark"] == 1 + ("PICTURES" in os.environ)
    assert warming["done"] < warming["total"]
    assert (await asyncio.to_thread(busy.image, busy_node.PULLING))["state"] == "pulling"


async def test_a_finding_leads_to_what_to_do(page: browser.Page, busy: busy_node.BusyNode) -> None:
    (found,) = await asyncio.to_thread(busy.agent.findings)
    (shown,) = await page.run(_FINDINGS)
    assert (shown["severity"], shown["subject"]) == (found["severity"], found["subject"])
    assert found["message"] in shown["text"]
    assert found["advice"] in shown["text"]
    assert shown["links"] == [f"/runbook#{found['rule']}"]
    await page.follow("document.querySelector('#findings a').click()")
    assert await page.run("document.querySelector('dt:target').textContent") == found["rule"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("window", WINDOWS)
async def test_everybody_can_use_it(page: browser.Page, window: str, scheme: str) -> None:
    """axe-core finds nothing, nothing is cut off to the right, and the keyboard reaches it."""
    await page.look(*WINDOWS[window], scheme)
    keep(f"status-{window}-{scheme}.png", await page.picture())
    assert await page.violations() == []
    assert await page.run(_WIDER) <= 0
    assert await page.run(_OUTSIDE) == []
    assert await page.run(_BROKEN) == []
    await page.press("Tab")
    assert await page.run("document.activeElement.getAttribute('href')") == "#content"
    await page.press("Enter")
    await page.press("Tab")
    assert await page.run("document.activeElement.getAttribute('href')") == "#findings"
    await page.follow("document.querySelector('footer a').click()")
    assert await page.run("document.title") == "nodeagent runbook"
    assert await page.violations() == []
    assert await page.run(_WIDER) <= 0


async def test_it_is_whole_without_script(page: browser.Page, busy: busy_node.BusyNode) -> None:
    await page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.asked.clear()
    await page.go(address(busy))
    assert page.asked == [address(busy)]  # nothing live
    names = {each["name"] for each in await page.run(_ROWS)}
    assert {busy_node.COMPLETE, busy_node.WARMING, busy_node.PULLING} <= names
    dead = "[...document.querySelectorAll('.copy, .filter')].filter(e => e.getClientRects().length)"
    assert await page.run(f"{dead}.length") == 0, "no button that does nothing"


_DID = """
(() => {
  document.getElementById('findings-info').open = true;
  const filter = document.querySelector('.filter input');
  filter.focus();
  filter.value = 'row-1';
  filter.dispatchEvent(new Event('input', {bubbles: true}));
  const button = document.querySelector('#findings .copy');
  navigator.clipboard.writeText = undefined;  // as without HTTPS
  button.click();
  return button.getAttribute('aria-label');
})()
"""
_STAYS = """
[
  document.getElementById('findings-info').open,
  document.getElementById('findings-warning').open,
  document.activeElement.value,
  document.querySelector('.filter output').textContent,
  document.querySelectorAll('tbody tr[hidden]').length,
  getSelection().toString(),
]
"""


async def test_what_a_reader_did_stays_when_the_page_goes_on(area: Path, agent: app.Agent) -> None:
    rows = [[kit.room.Cell(f"row-{number:02}"), kit.room.Cell("b")] for number in range(30)]
    component: Any = Component()
    parts = [kit.room.PageSection("Datasets", "30", ("Dataset", "State"), rows)]
    room = kit.room.Room("cache", "", kit.settings.Section, component, page=lambda _: parts)
    state = State(agent.state.settings, running=[RunningRoom(room, component, started=True)])
    found = [
        kit.findings.Finding(str(each), "rule", each, "a", "b", "see 'nodeagent status'")
        for each in kit.findings.Severity
    ]
    state.findings.report("x", found)
    made = server.metrics_application(state, None, with_page=True)
    async with TestServer(made) as served, browser.opened(area) as page:
        await page.go(f"http://127.0.0.1:{served.port}/")
        assert await page.run(_DID) == "Copy: nodeagent status"
        more = kit.findings.Finding("n", "rule", kit.findings.Severity.INFO, "newest", "b", "c")
        state.findings.report("x", [*found, more])

        async def new() -> bool:
            return bool(
                await page.run("document.getElementById('findings').innerText.match('new')")
            )

        await waiting.until_async(new, 30, "the new finding")
        stays = [True, True, "row-1", "10 of 30", 20, "nodeagent status"]
        assert await page.run(_STAYS) == stays
        assert page.complaints == []


async def test_it_goes_on_by_itself(page: browser.Page, busy: busy_node.BusyNode) -> None:
    """The last test of this node: what was held is let go, and the page that is open follows."""
    assert "filling" in (await row(page, busy_node.WARMING))["text"]
    begun = len(page.asked)
    await asyncio.to_thread(busy.let_go)

    async def done() -> bool:
        shown = {each["name"]: each["text"] for each in await page.run(_ROWS)}
        return (
            "complete" in shown[busy_node.WARMING]
            and "jobs read the SSD" in shown[busy_node.WARMING]
            and "ready" in shown[busy_node.PULLING]
        )

    await waiting.until_async(done, 60, "the page to show the end of both")
    assert len(page.asked) == begun  # without loading anything
    assert await page.run("document.getElementById('live').textContent") == "Live"


def keep(name: str, picture: bytes) -> None:
    if folder := os.environ.get("PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_bytes(picture)
