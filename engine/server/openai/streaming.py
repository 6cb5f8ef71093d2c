"""StreamedAnswer: the chunks of all choices of one answer, sent as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.server.openai.answers import Usage, finish_reason, usage_of
from engine.server.openai.call import Call
from engine.server.openai.choices import Choices, together
from engine.server.openai.chunks import ChunkEncoder
from engine.server.openai.transcript import Transcript
from engine.server.sse import DONE, EventStream


class StreamedAnswer:
    """Each choice's chunks keep their order; those of different choices come in between one another."""

    def __init__(self, stream: EventStream, call: Call, choices: Choices, chunks: ChunkEncoder) -> None:
        self._stream = stream
        self._call = call
        self._choices = choices
        self._chunks = chunks
        self._turn = asyncio.Lock()
        """EventStream takes one writer at a time."""
        self._num_tokens = 0
        """Of all choices so far."""

    async def run(self, transcripts: list[Transcript]) -> bytes:
        """Send all but the last events, which are returned. Raises the EngineError of the first choice that fails."""
        if len(transcripts) == 1:
            last = await self._follow(0, transcripts[0], self._stream.send)
        else:
            last = b""
            await together([self._follow_to_the_end(*item) for item in enumerate(transcripts)])
        if self._call.include_usage:
            last += self._chunks.usage(self._choices.usage())
        return last + DONE

    async def _follow_to_the_end(self, index: int, transcript: Transcript) -> None:
        await self._send_in_turn(await self._follow(index, transcript, self._send_in_turn))

    async def _send_in_turn(self, events: bytes) -> None:
        async with self._turn:
            await self._stream.send(events)

    async def _follow(self, index: int, transcript: Transcript, send: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Send one choice as it comes; the chunk that finishes it is returned."""
        chunks = self._chunks.choice(index)
        with_counts = self._call.continuous_usage
        if first := chunks.first(self._counts() if with_counts else None):
            await send(first)
        async for delta in transcript.generation:
            self._num_tokens += len(delta.token_ids)
            text, entries = transcript.take(delta)
            if text or entries:
                logprobs = transcript.render(entries) if entries else None
                await send(chunks.text(text, logprobs, self._counts() if with_counts else None))
        text, entries = transcript.rest()
        if text or entries:
            logprobs = transcript.render(entries) if entries else None
            await send(chunks.text(text, logprobs, self._counts() if with_counts else None))
        ended = transcript.ended
        return chunks.finish(finish_reason(ended), ended.stop_reason, self._counts() if with_counts else None)

    def _counts(self) -> Usage:
        """The counts so far, which every chunk carries if that is asked for."""
        return usage_of(self._choices.num_prompt_tokens, self._num_tokens)
