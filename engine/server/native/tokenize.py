"""POST /tokenize and /detokenize: text to token ids and back, as this server's requests would have it."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput, TextInput
from engine.server.body import decode_aside, decode_json, read_body
from engine.server.keys import CLIENT
from engine.server.openai.messages import template_messages
from engine.server.openai.models import check_model
from engine.server.openai.parse import RESERVED_TEMPLATE_KWARGS
from engine.server.openai.protocol import Message

MAX_TEXTS = 1024
"""Most texts, or lists of ids, of one call."""

Token: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
T = TypeVar("T")


class TokenizeBody(msgspec.Struct, frozen=True):
    """Exactly one of prompt, text (another name for it) and messages."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Of a text, default true; a chat template writes its own."""
    add_generation_prompt: bool | None = None
    """Of a chat, default true."""
    chat_template_kwargs: dict[str, object] | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Ids of one text, or lists of them."""

    tokens: list[Token | list[Token]]
    skip_special_tokens: bool | None = None
    """Default true."""
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: web.Request) -> web.Response:
    """{tokens, count, max_model_len}; for a list of prompts tokens and count are lists, too."""
    client = request.app[CLIENT]
    client.check_ready()
    data = await read_body(request, client.config.http.max_body_mb * 2**20)
    sources, model, is_list = await decode_aside(_parse_tokenize, data)
    check_model(model, client.model_name)
    tokens = [await client.tokenize(source) for source in sources]
    counts = [len(ids) for ids in tokens]
    body = {
        "tokens": tokens if is_list else tokens[0],
        "count": counts if is_list else counts[0],
        "max_model_len": client.context_length,
    }
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """{text}, a list where lists of tokens were given."""
    client = request.app[CLIENT]
    client.check_ready()
    data = await read_body(request, client.config.http.max_body_mb * 2**20)
    lists, call, is_list = await decode_aside(_parse_detokenize, data)
    check_model(call.model, client.model_name)
    vocab_size = client.model.config.vocab_size if client.model is not None else 0
    for ids in lists:
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(f"tokens holds {max(ids)}; ids run from 0 to {vocab_size - 1}.", param="tokens")
    skip = call.skip_special_tokens is not False
    texts = [await client.detokenize(ids, skip_special_tokens=skip) for ids in lists]
    return web.Response(
        body=msgspec.json.encode({"text": texts if is_list else texts[0]}), content_type="application/json"
    )


def _parse_tokenize(data: bytes) -> tuple[list[TextInput | ChatInput], str | None, bool]:
    body = decode_json(data, _tokenize_decoder)
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"Exactly one of prompt, text and messages is needed; this has {' and '.join(given) or 'none'}."
        )
    if body.messages is not None:
        return [_chat(body)], body.model, False
    text = body.prompt if body.prompt is not None else body.text
    texts = _checked(text if isinstance(text, list) else [text or ""], given[0])
    add = body.add_special_tokens is not False
    return [TextInput(item, add_special_tokens=add) for item in texts], body.model, isinstance(text, list)


def _chat(body: TokenizeBody) -> ChatInput:
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in (body.chat_template_kwargs or ()):
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name}.", param=f"chat_template_kwargs.{name}"
            )
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for texts; a chat template writes its own.", param="add_special_tokens"
        )
    kwargs = {"add_generation_prompt": body.add_generation_prompt is not False, **(body.chat_template_kwargs or {})}
    try:
        return ChatInput(msgspec.json.encode(template_messages(body.messages)), msgspec.json.encode(kwargs))
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None


def _parse_detokenize(data: bytes) -> tuple[list[list[int]], DetokenizeBody, bool]:
    body = decode_json(data, _detokenize_decoder)
    lists = [item for item in body.tokens if isinstance(item, list)]
    if not lists:
        return [[item for item in body.tokens if isinstance(item, int)]], body, False
    if len(lists) != len(body.tokens):
        raise InvalidRequestError("tokens mixes ids and lists; it must be one or the other.", param="tokens")
    return _checked(lists, "tokens"), body, True


def _checked(items: list[T], name: str) -> list[T]:
    if not 1 <= len(items) <= MAX_TEXTS:
        raise InvalidRequestError(f"{name} holds {len(items)} texts; it must hold 1 to {MAX_TEXTS}.", param=name)
    return items
