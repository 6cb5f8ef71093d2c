"""GET /health: what the supervisor and the heartbeats say; asks no process, generates no token."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.server.keys import CLIENT


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
