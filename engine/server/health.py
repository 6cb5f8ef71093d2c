"""GET /health: what the heartbeats say, nobody is asked. GET /health_generate: one real token, for deep checks."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from engine.errors import EngineError, UnavailableError
from engine.ipc.messages import TokenInput, pack_i32
from engine.sampling import SamplingParams
from engine.server.keys import CLIENT

if TYPE_CHECKING:
    from engine.client import EngineClient

GENERATE_TIMEOUT_S = 20.0
"""A server that has no token for a probe by then is not well, or has more to do than it can."""


async def health(request: web.Request) -> web.Response:
    """200 only while requests are served; else 503 with the state and the reason."""
    report = request.app[CLIENT].health()
    body = {
        "status": "ok" if report.ok else "unavailable",
        "state": report.state,
        "reason": report.reason,
        "processes": report.processes,
    }
    return web.Response(
        status=200 if report.ok else 503,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


async def health_generate(request: web.Request) -> web.Response:
    """200 once a token was generated for this probe; else 503. It waits its turn like any request."""
    try:
        async with asyncio.timeout(GENERATE_TIMEOUT_S):
            await _one_token(request.app[CLIENT])
    except TimeoutError:
        text = f"No token came within {GENERATE_TIMEOUT_S:g} s."
        raise UnavailableError(text, code="unhealthy", retry_after_s=5) from None
    except UnavailableError:
        raise
    except EngineError as error:
        raise UnavailableError(f"No token came: {error.message}", code="unhealthy", retry_after_s=5) from None
    return web.json_response({"status": "ok"}, headers={"Cache-Control": "no-store"})


async def _one_token(client: EngineClient) -> None:
    client.check_ready()
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    label = f"HEALTH_CHECK_{secrets.token_hex(8)}"
    generation = client.generate(TokenInput(pack_i32([0])), sampling, stream=True, label=label)
    try:
        await generation.accepted()
        async for _ in generation:
            pass
    finally:
        generation.close()
