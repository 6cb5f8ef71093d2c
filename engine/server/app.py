"""The aiohttp application: routes and the middlewares around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from engine.server.auth import require_key
from engine.server.cache_routes import flush_cache, pin_prefix, unpin_prefix
from engine.server.fronts import MainFront
from engine.server.health import health, health_generate
from engine.server.info import model_info, server_info
from engine.server.keys import CLIENT, FRONTS, KEEP_ALIVE_S, METRICS, UNKNOWN_FIELDS
from engine.server.metrics import Metrics, metrics
from engine.server.middleware import answer_errors, answer_preflight, count_responses, identify, sign_response
from engine.server.native.abort import abort_request
from engine.server.native.generate import generate
from engine.server.native.tokenize import detokenize, tokenize
from engine.server.openai.chat import chat_completions
from engine.server.openai.completions import completions
from engine.server.openai.fields import UnknownFields
from engine.server.openai.models import list_models, show_model

if TYPE_CHECKING:
    from engine.client import EngineClient


def create_app(client: EngineClient, *, keep_alive_s: float = 10.0) -> web.Application:
    """Application over `client`; serve it with handler_cancellation=True so that a disconnect ends its request.

    Where there are several HTTP processes, put what knows them all in FRONTS.
    """
    http = client.config.http
    # From the outermost: a preflight carries no key, and whoever brings none learns nothing else.
    middlewares = [identify, count_responses, answer_errors, answer_preflight]
    if http.api_key is not None:
        middlewares.append(require_key(http.api_key))
    app = web.Application(middlewares=middlewares, client_max_size=http.max_body_mb * 2**20)
    app[CLIENT] = client
    app[KEEP_ALIVE_S] = keep_alive_s
    app[UNKNOWN_FIELDS] = UnknownFields()
    app[METRICS] = Metrics()
    app[FRONTS] = MainFront(client, app[METRICS])
    client.observers.append(app[METRICS])
    app.on_response_prepare.append(sign_response)
    _add_routes(app.router)
    return app


def _add_routes(router: web.UrlDispatcher) -> None:
    router.add_post("/v1/chat/completions", chat_completions)
    router.add_post("/v1/completions", completions)
    router.add_get("/v1/models", list_models)
    router.add_get("/v1/models/{name:.+}", show_model)
    for prefix in ("", "/v1"):
        router.add_post(f"{prefix}/tokenize", tokenize)
        router.add_post(f"{prefix}/detokenize", detokenize)
    router.add_post("/generate", generate)
    router.add_put("/generate", generate)
    router.add_post("/abort_request", abort_request)
    router.add_get("/health", health)
    router.add_get("/health_generate", health_generate)
    router.add_get("/metrics", metrics)
    for name in ("server_info", "get_server_info"):
        router.add_get(f"/{name}", server_info)
    for name in ("model_info", "get_model_info"):
        router.add_get(f"/{name}", model_info)
    router.add_get("/flush_cache", flush_cache)
    router.add_post("/flush_cache", flush_cache)
    router.add_post("/pin_prefix", pin_prefix)
    router.add_post("/unpin_prefix", unpin_prefix)
