"""--api-key: which requests need the key, and whether they bring it."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.errors import AuthenticationError
from engine.server.error_body import error_response
from engine.server.health import health


def require_key(key: str) -> Middleware:
    """A middleware that lets only GET /health and requests with `Authorization: Bearer <key>` through.

    Everything else answers 401, routes that do not exist too: nobody learns from outside what there is.
    """
    expected = key.encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        # By the matched handler, not by the path: there is one way to be open.
        if request.match_info.handler is not health and not _brings(request, expected):
            text = "This server needs its API key in the header `Authorization: Bearer <key>`."
            return error_response(AuthenticationError(text).info(), {"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return authenticate


def _brings(request: web.Request, expected: bytes) -> bool:
    given = request.headers.getall("Authorization", [])
    if len(given) != 1:
        return False
    scheme, _, key = given[0].strip().partition(" ")
    # Bytes that are no UTF-8 arrive as surrogates.
    right = hmac.compare_digest(key.lstrip().encode("utf-8", "surrogateescape"), expected)
    return scheme.lower() == "bearer" and right
