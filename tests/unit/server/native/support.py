"""What the tests of the native routes share."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse

from tests.unit.server.support import Http

HELLO = {"text": "Hi"}


async def send(
    http: Http, path: str, body: dict[str, Any] | bytes, *, method: str = "POST", **headers: str
) -> ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.request(method, path, data=data, headers={"Content-Type": "application/json", **headers})


async def generate(http: Http, **fields: Any) -> ClientResponse:
    """POST /generate with `text` "Hi" unless the fields bring a prompt."""
    prompt = {} if fields.keys() & {"text", "input_ids"} else HELLO
    return await send(http, "/generate", {**prompt, **fields})
