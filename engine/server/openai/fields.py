"""Top-level body fields beyond ChatRequest: those this version refuses, ignores, or has never heard of."""

from __future__ import annotations

import logging

import msgspec

from engine.errors import InvalidRequestError
from engine.server.error_body import shorten
from engine.server.openai.protocol import ChatRequest

log = logging.getLogger("engine.server")

# name -> values that mean "off" and pass; null always does.
REFUSED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_ids": (),
    "json_schema": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "lora_path": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "no_stop_trim": (False,),
    "prediction": (),
    "presence_penalty": (0,),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "structural_tag": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}

# Nothing in the answer depends on these.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "store",
        "stream_reasoning",
    }
)

MAX_REPORTED = 200
"""Unknown names remembered, so that clients cannot grow the set or the log."""


class UnknownFields:
    """Warns of each unknown field name once in a process's life."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, names: list[str]) -> None:
        """One log line with the names not reported before; names only, escaped and cut."""
        fresh = {ascii(shorten(name, 64))[1:-1] for name in names} - self._reported
        fresh = set(sorted(fresh)[: MAX_REPORTED - len(self._reported)])
        if fresh:
            self._reported |= fresh
            log.warning("event=unknown_fields ignored=%s", ",".join(sorted(fresh)))


def check_fields(fields: dict[str, msgspec.Raw], unknown: UnknownFields) -> None:
    """Refuse what would silently change the answer; report what is not known. Raises InvalidRequestError."""
    strange: list[str] = []
    for name, raw in fields.items():
        if name in REFUSED:
            if not _is_off(bytes(raw), REFUSED[name]):
                raise InvalidRequestError(
                    f"{name} is not supported by this version.", param=name, code="unsupported_parameter"
                )
        elif name not in ChatRequest.__struct_fields__ and name not in IGNORED:
            strange.append(name)
    if strange:
        unknown.report(strange)


def _is_off(raw: bytes, off: tuple[object, ...]) -> bool:
    if raw == b"null":
        return True
    if len(raw) > 256:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        return False
    # True == 1 in Python, not in JSON.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in off)
