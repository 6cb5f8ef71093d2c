"""Typed places in the application and the request where the handlers find what they share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.server.fronts import Fronts
    from engine.server.metrics import Metrics
    from engine.server.openai.fields import UnknownFields

CLIENT: web.AppKey[EngineClient] = web.AppKey("client")
KEEP_ALIVE_S: web.AppKey[float] = web.AppKey("keep_alive_s", float)
"""Seconds of silence on a stream after which a comment line is written."""
FRONTS: web.AppKey[Fronts] = web.AppKey("fronts")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics")
UNKNOWN_FIELDS: web.AppKey[UnknownFields] = web.AppKey("unknown_fields")

CLIENT_GONE = 499
"""The status, in metrics alone, of an answer whose client went away."""

SANE_ID = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
"""Printable ASCII, 1 to 128 characters, no space at the ends: safe in a header and in a log line."""
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""In the request: what x-request-id of the answer will be."""
CLIENT_REQUEST_ID: web.RequestKey[str] = web.RequestKey("client_request_id", str)
"""In the request: the client's own x-request-id, if it sent a sane one."""
