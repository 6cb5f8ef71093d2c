"""From a message to a Request: everything that can be wrong with one is found here, before it costs anything."""

from __future__ import annotations

import time

import numpy as np

from engine.errors import ContextLengthError, InvalidRequestError
from engine.ipc.messages import TokenizedRequest, unpack_i32
from scheduler_proc.cache.namespace import namespace
from scheduler_proc.request import Request


class Intake:
    """Knows the limits of this scheduler; counts arrivals."""

    def __init__(
        self, vocab_size: int, context_length: int, pool_tokens: int, page_size: int, weights_version: str
    ) -> None:
        self.context_length = context_length
        self.max_len = min(context_length, pool_tokens)
        """Most tokens of one request."""
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._weights_version = weights_version
        self._num_arrived = 0

    def request(self, message: TokenizedRequest) -> Request:
        """A checked Request. Raises InvalidRequestError, with both numbers where it can never fit."""
        prompt, output = unpack_i32(message.prompt_ids), unpack_i32(message.output_ids)
        if len(prompt) == 0:
            raise InvalidRequestError("The prompt is empty; at least one token is needed.", param="prompt")
        for name, ids in (("prompt", prompt), ("output_ids", output)) if len(output) else (("prompt", prompt),):
            if not (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
                raise InvalidRequestError(f"{name} holds a token id outside 0..{self._vocab_size - 1}.", param=name)
        message.sampling.checked(self._vocab_size)
        room = self.max_len - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; {self._limit()}. Send a shorter prompt.", param="messages"
            )
        wanted = message.sampling.max_tokens
        if wanted is not None and message.sampling.may_shorten and message.sampling.min_tokens <= room:
            wanted = min(wanted, room)
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {wanted}, together {len(prompt) + wanted}; "
                f"{self._limit()}. Lower max_tokens to {room} at most.",
                param="max_tokens",
            )
        self._num_arrived += 1
        keys = (np.concatenate([prompt, output]) if len(output) else prompt).astype(np.int64)
        root = self.namespace(message.cache_salt)
        message.stamps.queued = time.monotonic_ns()
        return Request(
            request=message.request,
            attempt=message.attempt,
            front=message.front,
            label=message.label,
            prompt_ids=prompt,
            output_ids=output,
            sampling=message.sampling,
            stream=message.stream,
            max_output=room if wanted is None else wanted,
            stamps=message.stamps,
            namespace=root,
            priority=message.priority,
            arrival=self._num_arrived,
            keys=keys,
            echo=message.echo,
            score_from=message.sampling.prompt_logprobs_from,
            num_known_at_first=len(output),
            first_page=root + keys[: self._page_size].tobytes(),
        )

    def _limit(self) -> str:
        """What bounds a request, for people."""
        if self.max_len < self.context_length:
            return (
                f"prompt and answer together may have {self.max_len} tokens, the size of this server's KV pool "
                f"(--max-total-tokens), though the model's context length is {self.context_length}"
            )
        return f"prompt and answer together may have {self.max_len} tokens, the context length"

    def namespace(self, salt: str | None) -> bytes:
        """The root of the prefix cache for requests with this salt."""
        return namespace(self._weights_version, None, 0, salt)
