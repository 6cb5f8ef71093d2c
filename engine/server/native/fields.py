"""Names in a /generate body: what is refused because the answer would differ, what is let pass, what nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from engine.errors import InvalidRequestError
from engine.server.error_body import shorten

# name -> values that mean "off" and pass; null always does.
REFUSED: dict[str, tuple[object, ...]] = {
    "audio_data": ([],),
    "custom_logit_processor": (),
    "extra_key": (),
    "image_data": ([],),
    "input_embeds": (),
    "lora_id": (),
    "lora_path": (),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "session_id": (),
    "session_params": ({},),
    "token_ids_logprob": ([],),
    "video_data": ([],),
}
REFUSED_SAMPLING: dict[str, tuple[object, ...]] = {
    "custom_params": ({},),
    "ebnf": (),
    "json_schema": (),
    "regex": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "structural_tag": (),
}

# Nothing in the answer depends on these.
IGNORED = frozenset(
    {
        "background",
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "conversation_id",
        "custom_labels",
        "external_trace_header",
        "log_metrics",
        "modalities",
        "no_logs",
        "routed_dp_rank",
        "routing_key",
    }
)
IGNORED_SAMPLING = frozenset({"stream_interval"})


def unknown_name(name: str, known: Collection[str]) -> InvalidRequestError:
    """The error for a name that must be one of `known`, with the nearest of them."""
    name = shorten(name, 60)
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return InvalidRequestError(f"{name} is not known{hint}", param=name)
