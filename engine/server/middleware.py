"""What surrounds every handler: the request's id, CORS for browsers, counting, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.errors import (
    EngineError,
    ErrorInfo,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
)
from engine.server.error_body import error_response, shorten
from engine.server.keys import CLIENT_GONE, CLIENT_REQUEST_ID, METRICS, REQUEST_ID, SANE_ID

log = logging.getLogger("engine.server")

CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "x-request-id, retry-after",
}
PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, OPTIONS",
    # The wildcard does not cover Authorization, so it is named.
    "Access-Control-Allow-Headers": "Authorization, *",
    "Access-Control-Max-Age": "600",
}


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's x-request-id or make one; it is the label of what the request starts."""
    given = request.headers.get("x-request-id", "")
    if SANE_ID.fullmatch(given):
        request[CLIENT_REQUEST_ID] = given
        request[REQUEST_ID] = given
    else:
        request[REQUEST_ID] = secrets.token_hex(16)
    return await handler(request)


async def sign_response(request: web.Request, response: web.StreamResponse) -> None:
    """Headers that every response carries, streams and errors too."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
    response.headers["Server"] = "engine-serve"
    response.headers.update(CORS_HEADERS)


@web.middleware
async def count_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the metrics of every answer, and of those that nobody waited for."""
    metrics = request.app[METRICS]
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        metrics.on_response(_route(request), CLIENT_GONE)
        raise
    metrics.on_response(_route(request), response.status)
    return response


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser's OPTIONS before a call across origins."""
    if request.method == "OPTIONS":
        return web.Response(status=204, headers=PREFLIGHT_HEADERS)
    return await handler(request)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON with its status; what nobody foresaw goes to the log and out as a bare 500."""
    try:
        return await handler(request)
    except EngineError as error:
        return error_response(error.info())
    except web.HTTPMethodNotAllowed as error:
        return error_response(_from_http(request, error), {"Allow": error.headers.get("Allow", "")})
    except web.HTTPException as error:
        return error_response(_from_http(request, error))
    except Exception:
        if request.transport is None or request.transport.is_closing():
            # The client is gone: there is nobody to answer, and what failed was the talk with it.
            return web.Response(status=CLIENT_GONE)
        request_id = request[REQUEST_ID]
        log.exception("event=unexpected_error route=%s request=%s", _route(request), request_id)
        text = f"Internal error; the server's log has it under request id {request_id}."
        return error_response(InternalError(text).info())


def _from_http(request: web.Request, error: web.HTTPException) -> ErrorInfo:
    path = shorten(request.path, 200)
    if isinstance(error, web.HTTPNotFound):
        return NotFoundError(f"There is no route {path}.").info()
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(f"{path} does not take {shorten(error.method, 20)}.").info()
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return PayloadTooLargeError("The request body is too large.").info()
    kind = InvalidRequestError if error.status < 500 else InternalError
    return ErrorInfo(error.status, kind.type, shorten(error.reason, 200))


def _route(request: web.Request) -> str:
    """The matched pattern, never the path the client sent."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "none"
