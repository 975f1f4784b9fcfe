"""The client of the admin API: answers, errors, streams, and servers that are not an agent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import kit.errors
from nodeagent import STARTING
from nodeagent.commands import client

ERROR = {"thing": "view /v", "cause": "in use", "remedy": "end it", "exit_code": 6}


@pytest.fixture(params=["tcp", "socket"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "method": request.method,
                "query": dict(request.query),
                "body": await request.json() if request.can_read_body else None,
                "token": request.headers.get("Authorization"),
            }
        )

    async def error(_: web.Request) -> web.Response:
        return web.json_response({"error": ERROR}, status=409)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>", status=404)

    async def lines(_: web.Request) -> web.Response:
        return web.Response(text='{"n": 0}\n{"n": 1}\n')

    async def starting(_: web.Request) -> web.Response:
        return web.json_response({"datasets": []}, headers={STARTING: "cache"})

    app = web.Application()
    app.router.add_get("/starting", starting)
    app.add_routes([web.get("/error", error), web.get("/page", page), web.get("/lines", lines)])
    app.router.add_route("*", "/echo", echo)
    async with TestServer(app) as server:
        assert server.runner is not None
        await web.UnixSite(server.runner, tmp_path / "s").start()
        yield f"unix://{tmp_path}/s" if request.param == "socket" else str(server.make_url(""))


async def test_call_sends_query_body_and_token(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    made = client.Client(url, token)
    if not url.startswith("unix:"):
        with pytest.raises(kit.errors.SettingsError, match="clear text"):
            await made.call("POST", "/echo")
    monkeypatch.setattr(client.Client, "_token", lambda _: "s3cret")
    assert await made.call("POST", "/echo", {"a": 1}, limit=5, after="é b&c") == {
        "method": "POST",
        "query": {"limit": "5", "after": "é b&c"},
        "body": {"a": 1},
        "token": None if url.startswith("unix:") else "Bearer s3cret",
    }


async def test_error_keeps_text_and_exit_code(url: str) -> None:
    made = client.Client(url, None)
    with pytest.raises(client.RemoteError, match="view /v: in use; end it") as raised:
        await made.call("GET", "/error")
    assert raised.value.exit_code == 6
    with pytest.raises(client.RemoteError):
        _ = [line async for line in made.lines("/error")]


async def test_other_server_is_unreachable(url: str) -> None:
    with pytest.raises(kit.errors.UnreachableError, match="not an agent"):
        await client.Client(url, None).call("GET", "/page")
    with pytest.raises(kit.errors.UnreachableError, match="no agent answers"):
        await client.Client("http://127.0.0.1:1", None).call("GET", "/")


async def test_lines_are_decoded(url: str) -> None:
    assert [line async for line in client.Client(url, None).lines("/lines")] == [
        {"n": 0},
        {"n": 1},
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"what?\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff",
    ],
)
async def test_answer_that_is_cut_short_or_no_http_is_no_answer(
    answer: bytes, tmp_path: Path
) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "s"):
        with pytest.raises(kit.errors.UnreachableError):
            await client.Client(f"unix://{tmp_path}/s").call("GET", "/v1/status")


async def test_path_of_a_request_is_one_line(url: str) -> None:
    with pytest.raises(kit.errors.UnreachableError, match="not an agent"):
        await client.Client(url).call("GET", "/a b\r\nHost: x\r\n\r\n")


async def test_an_answer_of_a_room_that_is_starting_is_told_once(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = client.Client(url)
    for _ in range(2):
        assert await asks.call("GET", "/starting") == {"datasets": []}
    said = capsys.readouterr()
    assert said.err == "nodeagent: cache is starting: what it shows may not be all yet\n"
    assert said.out == ""
