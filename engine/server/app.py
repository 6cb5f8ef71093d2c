"""The aiohttp application: routes and the middlewares around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from engine.server.cache_routes import flush_cache, pin_prefix, unpin_prefix
from engine.server.health import health
from engine.server.info import server_info
from engine.server.keys import CLIENT, KEEP_ALIVE_S, UNKNOWN_FIELDS
from engine.server.middleware import answer_errors, answer_preflight, identify, sign_response
from engine.server.openai.chat import chat_completions
from engine.server.openai.fields import UnknownFields
from engine.server.openai.models import list_models, show_model

if TYPE_CHECKING:
    from engine.client import EngineClient


def create_app(client: EngineClient, *, keep_alive_s: float = 10.0) -> web.Application:
    """Application over `client`; serve it with handler_cancellation=True so that a disconnect ends its request."""
    app = web.Application(
        middlewares=[identify, answer_errors, answer_preflight],
        client_max_size=client.config.http.max_body_mb * 2**20,
    )
    app[CLIENT] = client
    app[KEEP_ALIVE_S] = keep_alive_s
    app[UNKNOWN_FIELDS] = UnknownFields()
    app.on_response_prepare.append(sign_response)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{name:.+}", show_model)
    app.router.add_get("/health", health)
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/get_server_info", server_info)
    app.router.add_post("/flush_cache", flush_cache)
    app.router.add_post("/pin_prefix", pin_prefix)
    app.router.add_post("/unpin_prefix", unpin_prefix)
    return app
