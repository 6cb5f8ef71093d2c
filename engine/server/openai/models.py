"""GET /v1/models and /v1/models/{id}; and whether a request's `model` names what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from engine.errors import UnknownModelError
from engine.server.error_body import shorten
from engine.server.keys import CLIENT

if TYPE_CHECKING:
    from engine.client import EngineClient


async def list_models(request: web.Request) -> web.Response:
    """The one model this server has."""
    return _json({"object": "list", "data": [_card(request.app[CLIENT])]})


async def show_model(request: web.Request) -> web.Response:
    """The card of one model; 404 for a name that is not served."""
    client = request.app[CLIENT]
    name = request.match_info["name"]
    if name != client.model_name:
        raise _unknown(name, client.model_name)
    return _json(_card(client))


def check_model(name: str | None, served: str) -> None:
    """Absent, empty and "default" mean the served model; any other name must be it."""
    if name and name not in ("default", served):
        raise _unknown(name, served)


def _unknown(name: str, served: str) -> UnknownModelError:
    return UnknownModelError(f"The model {shorten(name, 100)!r} is not served here; {served!r} is.", param="model")


def _card(client: EngineClient) -> dict[str, object]:
    return {
        "id": client.model_name,
        "object": "model",
        "created": client.created,
        "owned_by": "engine-serve",
        "root": client.model.name if client.model is not None else client.model_name,
        "parent": None,
        "max_model_len": client.context_length,
    }


def _json(body: dict[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
