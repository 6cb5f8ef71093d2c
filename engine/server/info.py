"""GET /server_info for operators, /model_info for clients: what runs here."""

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
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "served_model_name",
    "chat_template",
    "host",
    "port",
    "max_body_mb",
    "max_n",
    "max_logprobs",
    "request_timeout",
    "http_workers",
    "drain_timeout",
    "skip_server_warmup",
    "device",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "mixed_chunk_size",
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
    "logprobs_mode",
    "page_size",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "deterministic",
    "overlap_depth",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_adaptive",
    "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_external_corpus_path",
    "tokenizer_workers",
    "tp_size",
    "cpu_threads",
    "on_crash",
    "start_timeout",
    "log_level",
)
"""A whitelist: an option added later (a key, a token) stays hidden until it is named here."""

WEIGHT_VERSION = "default"
"""Weights do not change while a server runs."""


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


async def model_info(request: web.Request) -> web.Response:
    """Facts of the served model; those of its files are null until it was found."""
    client = request.app[CLIENT]
    model = client.model
    body = {
        "model": client.model_name,
        "model_path": model.path if model is not None else None,
        "tokenizer_path": (model.tokenizer_path or model.path) if model is not None else None,
        "is_generation": True,
        "architectures": [model.config.architecture] if model is not None else None,
        "vocab_size": model.config.vocab_size if model is not None else None,
        "context_length": client.context_length,
        "weight_version": WEIGHT_VERSION,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
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
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "verified_rows": stats.verified_rows,
        "settled": stats.settled,
    }
