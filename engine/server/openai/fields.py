"""Top-level body fields beyond the requests': those this version refuses, ignores, or has never heard of."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from engine.errors import InvalidRequestError
from engine.server.error_body import shorten
from engine.server.openai.protocol import ChatRequest, CompletionRequest

log = logging.getLogger("engine.server")


class FieldRules(NamedTuple):
    """One route's fields."""

    known: frozenset[str]
    refused: dict[str, tuple[object, ...]]
    """name -> values that mean "off" and pass; null always does."""


_REFUSED: dict[str, tuple[object, ...]] = {
    "custom_logit_processor": (),
    "custom_params": ({},),
    "ebnf": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "structural_tag": (),
}

CHAT_FIELDS = FieldRules(
    frozenset(ChatRequest.__struct_fields__),
    {
        **_REFUSED,
        "add_generation_prompt": (True,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "return_meta_info": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    },
)
COMPLETION_FIELDS = FieldRules(
    frozenset(CompletionRequest.__struct_fields__),
    {
        **_REFUSED,
        "functions": ([],),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    },
)

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


def check_fields(fields: dict[str, msgspec.Raw], rules: FieldRules, unknown: UnknownFields) -> None:
    """Refuse what would silently change the answer; report what is not known. Raises InvalidRequestError."""
    strange: list[str] = []
    for name, raw in fields.items():
        if name in rules.refused:
            if not _is_off(bytes(raw), rules.refused[name]):
                raise InvalidRequestError(
                    f"{name} is not supported by this version.", param=name, code="unsupported_parameter"
                )
        elif name not in rules.known and name not in IGNORED:
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
