"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput, TextInput
from tests.support.fake_client import FakeClient
from tests.unit.server.native.support import send
from tests.unit.server.support import Http, expect_error


@pytest.fixture
def sources(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[ChatInput | TextInput]:
    """What the tokenizer was asked for."""
    asked: list[ChatInput | TextInput] = []
    ask = fake.tokenize

    async def record(source: ChatInput | TextInput) -> list[int]:
        asked.append(source)
        return await ask(source)

    monkeypatch.setattr(fake, "tokenize", record)
    return asked


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("name", ["prompt", "text"])
async def test_a_text(http: Http, sources: list[ChatInput | TextInput], path: str, name: str) -> None:
    response = await send(http, path, {name: "ab", "model": "org/tiny"})
    assert await response.json() == {"tokens": [97, 98], "count": 2, "max_model_len": 512}
    assert sources == [TextInput("ab", add_special_tokens=True)]


async def test_several_texts(http: Http, sources: list[ChatInput | TextInput]) -> None:
    response = await send(http, "/tokenize", {"prompt": ["ab", ""], "add_special_tokens": False})
    assert await response.json() == {"tokens": [[97, 98], []], "count": [2, 0], "max_model_len": 512}
    assert sources == [TextInput("ab", add_special_tokens=False), TextInput("", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"add_generation_prompt": True, "enable_thinking": True}),
    ],
)
async def test_a_chat(
    http: Http, sources: list[ChatInput | TextInput], fields: dict[str, Any], kwargs: dict[str, object]
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    response = await send(http, "/tokenize", {"messages": messages, **fields})
    assert await response.json() == {"tokens": [1, 2, 3], "count": 3, "max_model_len": 512}
    (source,) = sources
    assert isinstance(source, ChatInput)
    assert json.loads(source.messages_json) == messages
    assert json.loads(source.template_kwargs_json) == kwargs


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, None, "none"),
        ({"prompt": "a", "text": "b"}, None, "prompt and text"),
        ({"prompt": "a", "messages": []}, None, "prompt and messages"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role", "x"),
        ({"prompt": 5}, "prompt", ""),
        ({"prompt": []}, "prompt", "1 to 1024"),
        ({"text": ["a"] * 1025}, "text", "1 to 1024"),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
            "template",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
            "must not",
        ),
    ],
)
async def test_what_cannot_be_tokenized(http: Http, body: dict[str, Any], param: str | None, part: str) -> None:
    await expect_error(await send(http, "/tokenize", body), 400, param, part)


async def test_what_the_tokenizer_refuses(http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(source: ChatInput | TextInput) -> list[int]:
        raise InvalidRequestError("The template failed.", param="messages")

    monkeypatch.setattr(fake, "tokenize", refuse)
    await expect_error(await send(http, "/tokenize", {"text": "a"}), 400, "messages", "template")


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenize(http: Http, path: str) -> None:
    assert await (await send(http, path, {"tokens": [97, 98]})).json() == {"text": "ab"}
    assert await (await send(http, path, {"tokens": []})).json() == {"text": ""}
    assert await (await send(http, path, {"tokens": [[97], [], [98]]})).json() == {"text": ["a", "", "b"]}


@pytest.mark.parametrize(("given", "skips"), [(None, True), (True, True), (False, False)])
async def test_special_tokens_are_skipped_unless_asked(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch, given: bool | None, skips: bool
) -> None:
    seen: list[bool] = []

    async def detokenize(ids: list[int], *, skip_special_tokens: bool) -> str:
        seen.append(skip_special_tokens)
        return ""

    monkeypatch.setattr(fake, "detokenize", detokenize)
    assert (await send(http, "/detokenize", {"tokens": [1], "skip_special_tokens": given})).status == 200
    assert seen == [skips]


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, None, "tokens"),
        ({"tokens": "ab"}, "tokens", ""),
        ({"tokens": [1000]}, "tokens", "0 to 999"),
        ({"tokens": [[1], [2, 1000]]}, "tokens", "0 to 999"),
        ({"tokens": [-1]}, "tokens[0]", ""),
        ({"tokens": [2**31]}, "tokens[0]", ""),
        ({"tokens": [1.5]}, "tokens[0]", ""),
        ({"tokens": [1, [2]]}, "tokens", "mixes"),
        ({"tokens": [[1]] * 1025}, "tokens", "1 to 1024"),
    ],
)
async def test_what_cannot_be_detokenized(http: Http, body: dict[str, Any], param: str | None, part: str) -> None:
    await expect_error(await send(http, "/detokenize", body), 400, param, part)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"text": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_the_models_name_and_state(http: Http, fake: FakeClient, path: str, body: dict[str, Any]) -> None:
    await expect_error(await send(http, path, {**body, "model": "other"}), 404, "model")
    fake.state = "starting"
    await expect_error(await send(http, path, body), 503, None, "starting")
