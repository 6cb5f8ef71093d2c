"""Requests to token ids: templates, batches, and errors that cost only their own request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from engine.errors import ContextLengthError, EngineError, ErrorInfo, InternalError, InvalidRequestError
from engine.ipc.messages import (
    ChatInput,
    DetokenizeCall,
    GenerateRequest,
    PinCall,
    PinTokens,
    Reply,
    TextInput,
    TokenInput,
    TokenizeCall,
    TokenizedRequest,
    pack_i32,
    unpack_i32,
)
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.chat import encode_chat
from engine.tokenizer.chat_template import ChatTemplate

log = logging.getLogger(__name__)

T = TypeVar("T")

_RESERVED = frozenset({"messages", "tools"})
"""Names that a request's template variables may not take."""
BATCHED_CHARS = 16_384
"""Longer prompts are encoded one by one, so that short ones do not wait for them."""


class Encoder:
    """Turns GenerateRequests into TokenizedRequests, or into errors."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, context_length: int, name: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._context_length = context_length
        self._name = name
        self._longest_token = max(len(piece) for piece in tokenizer.token_table())

    def encode(self, requests: list[GenerateRequest]) -> Iterator[TokenizedRequest | tuple[GenerateRequest, ErrorInfo]]:
        """One result per request, each as soon as it is there; short plain prompts are encoded as one batch, first."""
        texts = (r.input.text for r in requests if isinstance(r.input, TextInput))
        short = [text for text in texts if len(text) <= BATCHED_CHARS]
        batch = self._encode_batch(short) if len(short) > 1 else {}
        for request in requests:
            yield self._one(request, batch)

    def _may_fit(self, num_chars: int) -> bool:
        return num_chars <= self._context_length * self._longest_token

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
            prompt_ids = self._ids(request.input, batch)
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
            request.cache_salt,
            request.priority,
            request.echo,
        )

    @staticmethod
    def work(request: GenerateRequest) -> int:
        """How much there is to tokenize, roughly: characters or bytes."""
        source = request.input
        if isinstance(source, TextInput):
            return len(source.text)
        return len(source.messages_json) if isinstance(source, ChatInput) else 0

    def pin(self, call: PinCall) -> PinTokens | Reply:
        """The tokens of a prefix that somebody wants kept."""
        return self._answer(
            call.call,
            lambda: PinTokens(call.front, call.call, self._ids(call.input, {}), call.ttl_s, call.cache_salt),
        )

    def tokenize(self, call: TokenizeCall) -> Reply:
        """The ids of a text or chat."""
        return self._answer(call.call, lambda: Reply(call.call, {}, ids=self._ids(call.input, {})))

    def detokenize(self, call: DetokenizeCall) -> Reply:
        """The text of ids. Ids that the tokenizer has not are refused."""
        return self._answer(call.call, lambda: Reply(call.call, {}, text=self._text(call)))

    def _text(self, call: DetokenizeCall) -> str:
        skipped = self._tokenizer.special_ids if call.skip_special_tokens else frozenset()
        table = self._tokenizer.token_table()
        pieces = []
        for token in unpack_i32(call.ids).tolist():
            if not 0 <= token < len(table):
                raise InvalidRequestError(f"tokens holds {token}; ids run from 0 to {len(table) - 1}.", param="tokens")
            if token not in skipped:
                pieces.append(table[token])
        return b"".join(pieces).decode("utf-8", "replace")

    def _answer(self, call: int, work: Callable[[], T]) -> T | Reply:
        try:
            return work()
        except EngineError as error:
            return Reply(call, {}, error.info())
        except Exception as error:
            log.exception("event=call_failed call=%d", call, exc_info=error)
            return Reply(call, {}, InternalError("The tokenizer failed.").info())

    def _ids(self, source: ChatInput | TextInput | TokenInput, batch: dict[str, list[int]]) -> bytes:
        if isinstance(source, TokenInput):
            return source.ids
        if isinstance(source, ChatInput):
            return pack_i32(self._chat_ids(source))
        self._check_length(len(source.text), "prompt")
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
        texts = [text for message in messages if isinstance(text := message.get("content"), str)]
        self._check_length(sum(map(len, texts)), "messages")
        variables = msgspec.json.decode(source.template_kwargs_json, type=dict)
        if reserved := sorted(_RESERVED & variables.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}.", param="chat_template_kwargs"
            )
        return encode_chat(
            self._tokenizer,
            self._template,
            messages,
            variables=variables,
            check=lambda text: self._check_length(len(text), "messages"),
        )

    def _check_length(self, num_chars: int, param: str) -> None:
        """Refuse what cannot fit before any work: a token never stands for more characters than its bytes."""
        if not self._may_fit(num_chars):
            least = num_chars // self._longest_token
            raise ContextLengthError(
                f"A text of {num_chars} characters has more than {least} tokens; the context length is "
                f"{self._context_length} tokens. Send a shorter text.",
                param=param,
            )
