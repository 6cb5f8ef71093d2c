"""--api-key: every route but /health needs it, and nothing shows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engine.server.app import create_app
from tests.support.fake_client import FakeClient
from tests.unit.server.support import CHAT, HELLO, Http, expect_error

KEY = "sk-very-secret"
GOOD = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
async def guarded() -> FakeClient:
    return FakeClient(api_key=KEY)


@pytest.fixture
async def locked(guarded: FakeClient) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    async with TestClient(TestServer(create_app(guarded))) as client:  # ty: ignore[invalid-argument-type]
        yield client


def routes() -> list[tuple[str, str]]:
    """(method, path) of everything that is registered."""
    loop = asyncio.new_event_loop()
    try:
        app = create_app(FakeClient())  # ty: ignore[invalid-argument-type]
    finally:
        loop.close()
    found = []
    for route in app.router.routes():
        assert route.resource is not None
        found.append((route.method, route.resource.canonical.replace("{name}", "org/tiny")))
    return sorted(found)


OPEN = {("GET", "/health"), ("HEAD", "/health")}


@pytest.mark.parametrize(("method", "path"), sorted(set(routes()) - OPEN))
async def test_every_route_needs_the_key(locked: Http, guarded: FakeClient, method: str, path: str) -> None:
    response = await locked.request(method, path, json=HELLO if method in ("POST", "PUT") else None)
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert not guarded.asked
    assert not guarded.aborted
    allowed = await locked.request(method, path, headers=GOOD, json=HELLO if method in ("POST", "PUT") else None)
    assert allowed.status != 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/nowhere"),
        ("POST", "/V1/completions"),
        ("POST", "/invocations"),
        ("GET", "/health/"),
        ("GET", "/health/../server_info"),
        ("POST", "/health"),
        ("DELETE", "/server_info"),
    ],
)
async def test_what_is_no_route_answers_401_first(locked: Http, method: str, path: str) -> None:
    error = await expect_error(await locked.request(method, path), 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("target", [b"//health", b"//v1/models", b"http://x/v1/models", b"*", b"/health?a=/../v1"])
async def test_targets_of_other_forms(locked: Http, target: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
    status = int((await reader.readline()).split()[1])
    assert status == (200 if target.startswith(b"/health?") else 401) or (target == b"*" and status == 400)
    writer.close()


async def test_health_is_open(locked: Http) -> None:
    assert (await locked.get("/health")).status == 200
    assert (await locked.head("/health")).status == 200


async def test_a_preflight_is_open(locked: Http) -> None:
    response = await locked.options(CHAT, headers={"Origin": "http://x", "Access-Control-Request-Method": "PUT"})
    assert response.status == 204
    assert "PUT" in response.headers["Access-Control-Allow-Methods"]


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY}"])
async def test_the_right_key(locked: Http, value: str) -> None:
    response = await locked.post(CHAT, json=HELLO, headers={"Authorization": value})
    assert response.status == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer{KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        f"Bearer {KEY.upper()}",
        f"Bearer {KEY} {KEY}",
        "Bearer caf\u00e9",
    ],
)
async def test_wrong_keys(locked: Http, value: str) -> None:
    await expect_error(await locked.get("/v1/models", headers={"Authorization": value}), 401)


async def test_two_keys_are_none(locked: Http) -> None:
    headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
    await expect_error(await locked.get("/v1/models", headers=headers), 401)


async def test_bytes_that_are_no_text(locked: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_a_body_too_large_is_not_read_without_the_key(locked: Http) -> None:
    await expect_error(await locked.post(CHAT, data=b"x" * (2**20 + 1)), 401)


async def test_nothing_shows_the_key(locked: Http, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        seen = ""
        for path in ("/server_info", "/metrics", "/model_info", "/v1/models", "/health", "/nowhere"):
            for headers in (GOOD, {"Authorization": f"Bearer {KEY}x"}):
                response = await locked.get(path, headers=headers)
                seen += await response.text() + str(response.headers)
    assert KEY not in seen
    assert KEY not in caplog.text


async def test_without_a_key_nothing_is_asked_for(http: Http) -> None:
    assert (await http.get("/v1/models")).status == 200
    assert (await http.get("/v1/models", headers={"Authorization": "Bearer any"})).status == 200
