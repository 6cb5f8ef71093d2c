"""The openai package against a real server: what a user's own code does."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.server import Server


@pytest.fixture
def client(tiny_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_chat_streams_and_equals_the_whole_answer(client: OpenAI, model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0}
    whole = client.chat.completions.create(**ask, max_tokens=30)
    stream = client.chat.completions.create(**ask, max_tokens=30, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert finishes == [whole.choices[0].finish_reason]


def test_a_server_that_does_not_draft_takes_wishes_about_drafts(client: OpenAI, model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0}
    plain, *others = [
        client.chat.completions.create(**ask, max_tokens=20, extra_body=wish)
        for wish in ({}, {"speculative": {"enabled": False}}, {"speculative": {"num_draft_tokens": 4}})
    ]
    assert [other.choices[0].message.content for other in others] == [plain.choices[0].message.content] * 2
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_a_seed_repeats_and_another_differs(client: OpenAI, model: str) -> None:
    def answer(seed: int) -> str | None:
        messages = [{"role": "user", "content": "Once"}]
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, temperature=1.2, seed=seed
        )
        return reply.choices[0].message.content

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_a_stop_string_across_tokens_cuts_before_it(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "abc"}]
    ask = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    assert whole is not None
    assert len(whole) > 20
    stop = whole[9:15]
    cut = client.chat.completions.create(**ask, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**ask, stop=[stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole[: whole.index(stop)]


def test_errors_are_the_clients_own_types(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=messages, temperature=-1)
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="2048"):
            long = [{"role": "user", "content": "word " * 5000}]
            client.chat.completions.create(model=model, messages=long, stream=stream)
        with pytest.raises(BadRequestError, match="5000"):
            client.chat.completions.create(model=model, messages=messages, max_tokens=5000, stream=stream)
