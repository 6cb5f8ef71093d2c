"""Reading a JSON request body within the limit, and saying what is wrong with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from engine.errors import InvalidRequestError, PayloadTooLargeError, SlowBodyError
from engine.server.error_body import shorten

THREAD_BYTES = 256 * 1024
"""Bodies above this are decoded in a thread: the event loop serves everybody else meanwhile."""

BODY_PAUSE_S = 30.0
"""A client that sends nothing of its body for so long has lost its request."""

T = TypeVar("T")

_AT = re.compile(r"^(?P<text>.*?) - at `(?:\$|key in \$)\.?(?P<path>.*)`$", re.DOTALL)
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body; 413 as soon as it is known to exceed the limit, 400 if it is not declared as JSON."""
    content_type = request.headers.get("Content-Type")
    if content_type is not None and content_type.split(";", 1)[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"The content type is {shorten(content_type, 80)}; it must be application/json.",
            code="invalid_content_type",
        )
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        while part := await asyncio.wait_for(request.content.readany(), BODY_PAUSE_S):
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(part)
    except TimeoutError:
        raise SlowBodyError(f"Nothing of the request body came for {BODY_PAUSE_S:g} s.") from None
    except (web.RequestPayloadError, UnicodeError) as error:
        raise InvalidRequestError("The request body could not be read: its framing or encoding is broken.") from error
    return b"".join(parts)


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body exceeds the limit of {limit_bytes} bytes (--max-body-mb).")


async def decode_aside(decode: Callable[[bytes], T], body: bytes) -> T:
    """decode(body), in a thread when the body is large."""
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(decode, body)
    return decode(body)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Strict JSON (a repeated key: the last one counts). Raises InvalidRequestError that names the field."""
    if not body.strip():
        raise InvalidRequestError("The request body is empty; it must be a JSON object.", code="invalid_json")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        if _HALF_PAIR.search(body):
            reason += "; a \\u escape may be half of a surrogate pair"
        raise InvalidRequestError(
            f"The request body is not valid JSON: {shorten(reason, 200)}.", code="invalid_json"
        ) from None


def _wrong_field(text: str) -> InvalidRequestError:
    match = _AT.match(text)
    path = match["path"] if match else ""
    reason = shorten(match["text"] if match else text, 200)
    if path:
        return InvalidRequestError(f"{shorten(path, 120)}: {reason}.", param=path)
    return InvalidRequestError(f"The request body is wrong: {reason}.")
