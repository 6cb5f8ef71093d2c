"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from engine.server.openai.answering import Route, Told, answer
from engine.server.openai.answers import TextChoice, TextCompletion, Usage
from engine.server.openai.chunks import TEXT_CHUNK
from engine.server.openai.logprobs import TextLogprobs, TextLogprobWriter
from engine.server.openai.prompts import parse_completion


async def completions(request: web.Request) -> web.StreamResponse:
    """n continuations of each prompt."""
    return await answer(request, _ROUTE)


def _whole(answer_id: str, created: int, model: str, told: list[Told], usage: Usage) -> TextCompletion:
    return TextCompletion(answer_id, created, model, [_choice(one) for one in told], usage)


def _choice(told: Told) -> TextChoice:
    logprobs = told.logprobs if isinstance(told.logprobs, TextLogprobs) else None
    return TextChoice(told.index, told.text, logprobs, told.finish_reason, told.stop_reason, told.stop_reason)


_ROUTE = Route(parse_completion, "prompt", "cmpl-", TEXT_CHUNK, TextLogprobWriter, _whole)
