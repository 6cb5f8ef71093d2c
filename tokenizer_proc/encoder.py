"""Requests to token ids: templates, batches, and errors that cost only their own request."""

from __future__ import annotations

import logging
import time

import msgspec

from engine.errors import ContextLengthError, EngineError, ErrorInfo, InternalError, InvalidRequestError
from engine.ipc.messages import (
    ChatInput,
    GenerateRequest,
    TextInput,
    TokenInput,
    TokenizedRequest,
    pack_i32,
)
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.chat import encode_chat
from engine.tokenizer.chat_template import ChatTemplate

log = logging.getLogger(__name__)

_RESERVED = frozenset({"tokenizer", "template", "messages", "tools"})
"""Names that a request's template variables may not take."""


class Encoder:
    """Turns GenerateRequests into TokenizedRequests, or into errors."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, context_length: int, name: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = context_length
        self._name = name
        self._longest_token = max(len(piece) for piece in tokenizer.token_table())

    def encode(self, requests: list[GenerateRequest]) -> list[TokenizedRequest | tuple[GenerateRequest, ErrorInfo]]:
        """One result per request, in order; plain prompts go through the tokenizer as one batch."""
        plain = [r.input.text for r in requests if isinstance(r.input, TextInput) and self._may_fit(r.input.text)]
        batch = self._encode_batch(plain) if len(plain) > 1 else {}
        return [self._one(request, batch) for request in requests]

    def _may_fit(self, text: str) -> bool:
        return len(text) <= self._context_length * self._longest_token

    def _encode_batch(self, texts: list[str]) -> dict[str, list[int]]:
        try:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=True)
        except Exception:
            log.exception("event=batch_failed texts=%d; each is tried by itself", len(texts))
            return {}
        return dict(zip(texts, encoded, strict=True))

    def _one(
        self, request: GenerateRequest, batch: dict[str, list[int]]
    ) -> TokenizedRequest | tuple[GenerateRequest, ErrorInfo]:
        try:
            prompt_ids = self._prompt_ids(request, batch)
        except EngineError as error:
            return request, error.info()
        except Exception as error:
            log.exception("event=encode_failed request=%d", request.request, exc_info=error)
            return request, InternalError("The prompt could not be tokenized.").info()
        request.stamps.tokenized = time.monotonic_ns()
        return TokenizedRequest(
            request.request,
            request.attempt,
            request.front,
            request.label,
            prompt_ids,
            request.sampling,
            request.stream,
            request.output_ids,
            request.stamps,
        )

    def _prompt_ids(self, request: GenerateRequest, batch: dict[str, list[int]]) -> bytes:
        source = request.input
        if isinstance(source, TokenInput):
            return source.ids
        if isinstance(source, ChatInput):
            return pack_i32(self._chat_ids(source))
        self._check_length(source.text, "prompt")
        ids = batch.get(source.text) if source.add_special_tokens else None
        if ids is None:
            ids = self._tokenizer.encode(source.text, add_special_tokens=source.add_special_tokens)
        return pack_i32(ids)

    def _chat_ids(self, source: ChatInput) -> list[int]:
        if self._template is None:
            raise InvalidRequestError(
                f"{self._name} has no chat template: send a plain prompt to /v1/completions, or start the server with "
                "--chat-template FILE.",
                code="no_chat_template",
            )
        messages = msgspec.json.decode(source.messages_json, type=list[dict])
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                self._check_length(content, "messages")
        variables = msgspec.json.decode(source.template_kwargs_json, type=dict)
        if reserved := sorted(_RESERVED & variables.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}.", param="chat_template_kwargs"
            )
        return encode_chat(self._tokenizer, self._template, messages, **variables)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse what cannot fit before any work: a token never stands for more characters than its bytes."""
        if not self._may_fit(text):
            least = len(text) // self._longest_token
            raise ContextLengthError(
                f"A text of {len(text)} characters has more than {least} tokens; the context length is "
                f"{self._context_length} tokens. Send a shorter text.",
                param=param,
            )
