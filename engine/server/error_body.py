"""Errors as OpenAI's JSON object, short whatever they quote, and as HTTP responses."""

from __future__ import annotations

import msgspec
from aiohttp import web

from engine.errors import ErrorInfo

MAX_MESSAGE_LENGTH = 800
MAX_PARAM_LENGTH = 120
"""Characters; escaped as JSON the whole body stays below 4 KB for any text that is not mostly control characters."""
MAX_BODY_BYTES = 4000


def shorten(text: str, limit: int) -> str:
    """`text` as encodable UTF-8, cut to `limit` characters."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def error_body(info: ErrorInfo) -> bytes:
    """{"error": {message, type, param, code}}, at most MAX_BODY_BYTES long."""
    limit = MAX_MESSAGE_LENGTH
    param = None if info.param is None else shorten(info.param, MAX_PARAM_LENGTH)
    while True:
        message = shorten(info.message, limit)
        body = msgspec.json.encode(
            {"error": {"message": message, "type": info.type, "param": param, "code": info.code}}
        )
        if len(body) <= MAX_BODY_BYTES or limit <= 100:
            return body
        limit //= 2


def error_response(info: ErrorInfo, headers: dict[str, str] | None = None) -> web.Response:
    """The error with its status; Retry-After where the error says when to come back."""
    all_headers = dict(headers or {})
    if info.retry_after_s is not None:
        all_headers["Retry-After"] = str(info.retry_after_s)
    return web.Response(status=info.status, body=error_body(info), content_type="application/json", headers=all_headers)
