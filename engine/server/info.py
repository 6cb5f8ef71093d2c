"""GET /server_info: version, configuration, scheduler and processes, for operators."""

from __future__ import annotations

import msgspec
from aiohttp import web

import engine
from engine.errors import UnavailableError
from engine.ipc.messages import Stats
from engine.server.keys import CLIENT

SHOWN_OPTIONS = (
    "model",
    "tokenizer",
    "revision",
    "load_format",
    "dtype",
    "context_length",
    "served_model_name",
    "chat_template",
    "host",
    "port",
    "max_body_mb",
    "drain_timeout",
    "skip_server_warmup",
    "device",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_step_gap",
    "max_queued_requests",
    "mem_fraction_static",
    "schedule_policy",
    "priority_preemption_threshold",
    "schedule_conservativeness",
    "random_seed",
    "disable_radix_cache",
    "radix_eviction_policy",
    "max_pinned_share",
    "kv_events_endpoint",
    "record",
    "page_size",
    "overlap_depth",
    "tokenizer_workers",
    "cpu_threads",
    "on_crash",
    "start_timeout",
    "log_level",
)
"""A whitelist: an option added later (a key, a token) stays hidden until it is named here."""


async def server_info(request: web.Request) -> web.Response:
    """`scheduler` is null while it cannot be asked."""
    client = request.app[CLIENT]
    try:
        scheduler = _scheduler(await client.stats())
    except UnavailableError:
        scheduler = None
    options = client.config.flat()
    body = {
        "version": engine.__version__,
        "state": client.state,
        "model": client.model_name,
        "model_path": client.model.path if client.model is not None else None,
        "config": {name: options[name] for name in SHOWN_OPTIONS if name in options},
        "context_length": client.context_length,
        "scheduler": scheduler,
        "processes": client.health().processes,
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _scheduler(stats: Stats) -> dict[str, object]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "pages": {
            "total": stats.pages_total,
            "free": stats.pages_free,
            "tree": stats.pages_tree,
            "tail": stats.pages_tail,
            "in_flight": stats.pages_in_flight,
        },
        "step": stats.step,
        "audit_errors": stats.audit_errors,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "output_tokens": stats.output_tokens,
        "retractions": stats.retractions,
    }
