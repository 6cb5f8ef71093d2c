"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from engine.server.openai.answering import Route, Told, answer
from engine.server.openai.answers import AnswerMessage, ChatChoice, ChatCompletion, Usage
from engine.server.openai.chunks import CHAT_CHUNK
from engine.server.openai.logprobs import ChatLogprobs, ChatLogprobWriter
from engine.server.openai.parse import parse_chat


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """n answers to a conversation."""
    return await answer(request, _ROUTE)


def _whole(answer_id: str, created: int, model: str, told: list[Told], usage: Usage) -> ChatCompletion:
    return ChatCompletion(answer_id, created, model, [_choice(one) for one in told], usage)


def _choice(told: Told) -> ChatChoice:
    logprobs = told.logprobs if isinstance(told.logprobs, ChatLogprobs) else None
    message = AnswerMessage(told.text)
    return ChatChoice(told.index, message, logprobs, told.finish_reason, told.stop_reason, told.stop_reason)


_ROUTE = Route(parse_chat, "messages", "chatcmpl-", CHAT_CHUNK, ChatLogprobWriter, _whole)
