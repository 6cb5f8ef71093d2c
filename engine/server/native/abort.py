"""POST /abort_request: end running requests from outside, by their rid."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.errors import InvalidRequestError
from engine.server.body import decode_json, read_body
from engine.server.keys import CLIENT, FRONTS


class AbortBody(msgspec.Struct, frozen=True):
    """Exactly one of the three; an empty rid and abort_all false count as absent."""

    rid: str | None = None
    """The whole rid, or the x-request-id of a request without one."""
    rid_prefix: str | None = None
    """How the rid begins: all parts of a batch, say."""
    abort_all: bool | None = None


_decoder = msgspec.json.Decoder(AbortBody)


async def abort_request(request: web.Request) -> web.Response:
    """{"aborted": how many requests were told to end}; 0 for a rid that nobody has (any more)."""
    limit_bytes = request.app[CLIENT].config.http.max_body_mb * 2**20
    fronts = request.app[FRONTS]
    body = decode_json(await read_body(request, limit_bytes), _decoder)
    given = [name for name in ("rid", "rid_prefix", "abort_all") if getattr(body, name)]
    if len(given) != 1:
        raise InvalidRequestError(
            f"Exactly one of rid, rid_prefix and abort_all: true is needed; this has {', '.join(given) or 'none'}."
        )
    if body.rid:
        aborted = await fronts.abort(label=body.rid)
    elif body.rid_prefix:
        aborted = await fronts.abort(prefix=body.rid_prefix)
    else:
        aborted = await fronts.abort()
    return web.json_response({"aborted": aborted})
