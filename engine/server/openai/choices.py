"""Choices: the generations behind one answer, started together and let go together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, TypeVar

from engine.ipc.messages import TextInput
from engine.server.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage, usage_of
from engine.server.openai.call import Call
from engine.server.openai.logprobs import LogprobWriter
from engine.server.openai.transcript import Transcript

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.generation import Generation

T = TypeVar("T")

STARTED_AT_ONCE = 64
"""Requests started before others get a turn of the event loop."""


class Choices:
    """Prompt-major: choice j of prompt i has index i * n + j. `close` in any case."""

    def __init__(self, call: Call) -> None:
        self.num_prompt_tokens = 0
        """Of every prompt once, from `start` on."""
        self._call = call
        self._generations: list[Generation] = []

    async def start(self, client: EngineClient, label: str) -> None:
        """Send all requests off, then wait until all are accepted. Raises the EngineError of one that is not."""
        call = self._call
        samplings = [call.sampling.of_choice(index) for index in range(call.n)]
        for index in range(call.num_answers):
            source = call.inputs[index // call.n]
            generation = client.generate(
                source,
                samplings[index % call.n],
                stream=call.stream,
                label=label,
                cache_salt=call.cache_salt,
                priority=call.priority,
                echo=call.echo and not isinstance(source, TextInput),
            )
            self._generations.append(generation)
            if index % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
                await asyncio.sleep(0)
        for index, generation in enumerate(self._generations):
            num_prompt_tokens = await generation.accepted()
            if index % call.n == 0:
                self.num_prompt_tokens += num_prompt_tokens

    def transcripts(self, writer: type[LogprobWriter]) -> list[Transcript]:
        """How each choice is to be read, by index."""
        call = self._call
        found = []
        for index, generation in enumerate(self._generations):
            source = call.inputs[index // call.n]
            prompt = None
            if call.echo:
                # A text comes back as it was sent, ids as they read.
                prompt = source.text if isinstance(source, TextInput) else generation.prompt_text or ""
            found.append(Transcript(generation, prompt, writer() if call.sampling.logprobs >= 0 else None))
        return found

    def usage(self) -> Usage:
        """Counts after all have ended: every prompt, and what was cached of it for its first choice, counts once."""
        prompt_tokens = tokens = cached_tokens = accepted = rejected = 0
        for index, generation in enumerate(self._generations):
            ended = generation.ended
            if ended is None:
                continue
            tokens += ended.num_tokens
            accepted += ended.accepted_drafts
            rejected += ended.rejected_drafts
            if index % self._call.n == 0:
                prompt_tokens += ended.num_prompt_tokens
                cached_tokens += ended.cached_tokens
        return usage_of(
            prompt_tokens, tokens, PromptTokensDetails(cached_tokens), CompletionTokensDetails(accepted, rejected)
        )

    def close(self) -> None:
        """Let go of all; those that run are aborted."""
        for generation in self._generations:
            generation.close()


async def together(parts: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once; their results in order. The first error ends the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
