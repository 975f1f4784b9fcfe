"""A real headless Chromium, driven by its DevTools protocol over a websocket.

The browser of Debian follows Chromium's releases; a client library is made for one of them. The
few calls that are needed here are of the stable part of the protocol, so there is no library
between. Everything a page asks for and complains of is kept (``Page.asked``, ``Page.complaints``).
"""

import asyncio
import base64
import contextlib
import importlib.resources
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.testbed import leftovers, waiting

PROGRAM = "chromium-headless-shell"
START_SECONDS = 30.0
ANSWER_SECONDS = 30.0  # of one call; for waiting.limit, as the others
_FLAGS = (
    "--no-sandbox",  # a sandbox of Chromium's does not start as root
    "--disable-dev-shm-usage",  # containers have a small /dev/shm
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class BrowserError(Exception):
    """The browser refused a call, or a script of ours failed in the page."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.asked: list[str] = []  # every address
        self.complaints: list[str] = []  # what the console shows as error or warning

    async def listen(self) -> None:
        """Runs until the browser ends."""
        async for message in self._socket:
            self._heard(message.json())
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(BrowserError("the browser has ended"))

    def _heard(self, said: dict[str, Any]) -> None:
        if "id" in said:
            waiter = self._answers.pop(said["id"], None)
            if waiter is not None and not waiter.done():
                waiter.set_result(said)
            return
        method, given = said["method"], said["params"]
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.asked.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.complaints.append(str(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(given["entry"]))

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        number = next(self._numbers)
        waiter = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        async with asyncio.timeout(waiting.limit(ANSWER_SECONDS)):
            answer = await waiter
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def go(self, url: str) -> None:
        """Until the page and what belongs to it are loaded."""
        self._loaded.clear()
        said = await self.call("Page.navigate", url=url)
        if "errorText" in said:
            raise BrowserError(f"{url}: {said['errorText']}")
        async with asyncio.timeout(waiting.limit(ANSWER_SECONDS)):
            await self._loaded.wait()

    async def follow(self, script: str) -> None:
        """Until the page that the script goes to is loaded."""
        self._loaded.clear()
        with contextlib.suppress(BrowserError):  # there may be no page left to answer
            await self.run(script)
        async with asyncio.timeout(waiting.limit(ANSWER_SECONDS)):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited. It need not be allowed by the page's policy."""
        said = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in said:
            raise BrowserError(str(said["exceptionDetails"]))
        return said["result"].get("value")

    async def look(self, width: int, height: int, scheme: str) -> None:
        """``scheme``: light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str) -> None:
        """A key with a name, such as Tab or Enter."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            given = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            await self.call("Input.dispatchKeyEvent", **given, **text)

    async def picture(self, *, whole: bool = True) -> bytes:
        """A PNG; ``whole``: also what is below the window."""
        said = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(said["data"])

    async def violations(self) -> list[str]:
        """What axe-core finds hard to use, a line for each element."""
        if not await self.run("'axe' in window"):
            await self.run(_axe())
        script = "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)"
        return [
            f"{rule['id']}: {node['target']}: {node['failureSummary']}"
            for rule in await self.run(script)
            for node in rule["nodes"]
        ]


def _axe() -> str:
    """axe-core, as a package of the test environment carries it."""
    file = importlib.resources.files("axe_playwright_python") / "axe.min.js"
    return file.read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Page]:
    """A browser with one tab; it ends with the block, with all of its processes.

    Its profile is below ``folder``; its short-lived sockets are in a folder of /tmp, since a
    socket's path is short.
    """
    profile = folder / "chromium"
    profile.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="nodeagent-") as short,
        (profile / "log").open("ab") as log,
    ):
        home = {"HOME": str(profile), "TMPDIR": short, leftovers.MARK: str(folder)}
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | home,
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession() as session:
                url = await _tab(session, profile, process)
                async with session.ws_connect(url, max_msg_size=0, heartbeat=None) as socket:
                    yielded = Page(socket)
                    listening = asyncio.create_task(yielded.listen(), name="browser")
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await yielded.call(f"{domain}.enable")
                    try:
                        yield yielded
                    finally:
                        listening.cancel()
                        await asyncio.gather(listening, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _tab(
    session: aiohttp.ClientSession, profile: Path, process: asyncio.subprocess.Process
) -> str:
    """The address of the first tab's socket, once there is one."""
    port = profile / "DevToolsActivePort"

    def said() -> str:
        return (profile / "log").read_text(errors="replace")[-2000:]

    async def there() -> str:
        if process.returncode is not None:
            raise BrowserError(f"the browser ended: {said()}")
        if not port.exists() or "\n" not in (text := port.read_text()):
            return ""
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"http://127.0.0.1:{text.split()[0]}/json/list") as answer:
                tabs = [each for each in await answer.json() if each["type"] == "page"]
                return str(tabs[0]["webSocketDebuggerUrl"]) if tabs else ""
        return ""

    found: str = await waiting.until_async(there, START_SECONDS, "the browser", detail=said)
    return found
