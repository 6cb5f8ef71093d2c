"""POST /v1/chat/completions: what goes to the engine and what comes back, streamed and whole."""

from __future__ import annotations

import json

import pytest

from engine.errors import ContextLengthError, ProcessDiedError
from engine.ipc.messages import ChatInput, Finish
from engine.sampling import SamplingParams
from tests.support.fake_client import FakeClient
from tests.unit.server.support import HELLO, Http, expect_error, post, read_events


def asked_messages(fake: FakeClient) -> list[dict[str, object]]:
    asked = fake.asked[-1].input
    assert isinstance(asked, ChatInput)
    return json.loads(asked.messages_json)


async def test_whole_answer(http: Http, fake: FakeClient) -> None:
    response = await post(http, HELLO)
    assert response.status == 200
    body = await response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "org/tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": 2,
            "stop_reason": 2,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert not fake.asked[0].stream
    assert fake.generations[0].closed


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish.STOP_TOKEN, "stop"),
        (Finish.STOP_STRING, "stop"),
        (Finish.LENGTH, "length"),
        (Finish.ABORT, "abort"),
    ],
)
async def test_finish_reason_is_the_same_in_both_modes(
    http: Http, fake: FakeClient, finish: Finish, reason: str
) -> None:
    fake.script.finish = finish
    whole = await (await post(http, HELLO)).json()
    events = await read_events(await post(http, {**HELLO, "stream": True}))
    assert whole["choices"][0]["finish_reason"] == reason
    assert events[-2]["choices"][0]["finish_reason"] == reason


async def test_stream(http: Http, fake: FakeClient) -> None:
    fake.script.texts = ["Hel", "", "lo\n\n\u2028"]
    events = await read_events(await post(http, {**HELLO, "stream": True}))
    assert events.pop() == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in events}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == "org/tiny" for chunk in events)
    assert all("usage" not in chunk for chunk in events)
    choices = [chunk["choices"][0] for chunk in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo\n\n\u2028"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert choices[-1]["matched_stop"] == choices[-1]["stop_reason"] == 2
    assert fake.asked[0].stream
    assert fake.generations[0].closed


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
async def test_no_usage_unless_asked(http: Http, options: dict[str, bool] | None) -> None:
    events = await read_events(await post(http, {**HELLO, "stream": True, "stream_options": options}))
    assert all(event == "[DONE]" or "usage" not in event for event in events)


async def test_usage_comes_once_and_last(http: Http) -> None:
    events = await read_events(await post(http, {**HELLO, "stream": True, "stream_options": {"include_usage": True}}))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    whole = await (await post(http, HELLO)).json()
    assert last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)


async def test_continuous_usage(http: Http) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await read_events(await post(http, {**HELLO, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 2, 2]
    assert all(e["usage"]["total_tokens"] == 7 + e["usage"]["completion_tokens"] for e in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_has_its_status_in_both_modes(http: Http, fake: FakeClient, stream: bool) -> None:
    fake.script.refuse = ContextLengthError("The prompt has 600 tokens; the context holds 512.", param="messages")
    error = await expect_error(await post(http, {**HELLO, "stream": stream}), 400, "messages", "600")
    assert error["code"] == "context_length_exceeded"
    assert fake.generations[0].closed


async def test_an_error_in_a_stream_is_an_event(http: Http, fake: FakeClient) -> None:
    fake.script.fail = ProcessDiedError("The scheduler ended.")
    events = await read_events(await post(http, {**HELLO, "stream": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "process_died"
    assert all("choices" not in event or not event["choices"][0]["finish_reason"] for event in events[:-1])


async def test_an_unforeseen_error_tells_the_client_nothing(
    http: Http, fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script.fail = ValueError("/secret/path")
    whole = await expect_error(await post(http, HELLO), 500)
    events = await read_events(await post(http, {**HELLO, "stream": True}))
    assert events[-1] == "[DONE]"
    assert "secret" not in json.dumps([whole, events])
    assert caplog.text.count("Traceback") == 2
    assert '"Hi"' not in caplog.text


async def test_sampling_defaults(http: Http, fake: FakeClient) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed", "user")
    more = ("stop_token_ids", "ignore_eos", "skip_special_tokens", "stream", "stream_options", "n", "tools", "rid")
    others = ("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs")
    last = ("top_logprobs", "no_stop_trim", "include_stop_str_in_output", "cache_salt", "priority", "best_of", "echo")
    new = ("speculative",)
    await post(http, HELLO)
    response = await post(http, {**HELLO, **dict.fromkeys(names + more + others + last + new)})
    assert response.status == 200, await response.text()
    assert [asked.sampling for asked in fake.asked] == [SamplingParams(), SamplingParams()]


async def test_sampling_fields(http: Http, fake: FakeClient) -> None:
    body = {
        **HELLO,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "max_tokens": 3,
        "max_completion_tokens": 5,
        "stop": "end",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 11,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"900": 1, "5": -100, "0": 0.5},
        "no_stop_trim": True,
        "logprobs": True,
        "top_logprobs": 4,
        "speculative": {"enabled": False},
    }
    assert (await post(http, body)).status == 200
    assert fake.asked[0].sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        max_tokens=5,
        stop=("end",),
        stop_token_ids=(7,),
        ignore_eos=True,
        skip_special_tokens=False,
        seed=11,
        min_tokens=2,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((0, 0.5), (5, -100.0), (900, 1.0)),
        keep_stop=True,
        logprobs=4,
        max_drafts=0,
    )
    await post(http, {**HELLO, "stop": ["a", "b"]})
    assert fake.asked[1].sampling.stop == ("a", "b")


async def test_messages_reach_the_template_whole(http: Http, fake: FakeClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{x"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    response = await post(http, {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    assert response.status == 200, await response.text()
    assert asked_messages(fake) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}, broken],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    asked = fake.asked[0].input
    assert isinstance(asked, ChatInput)
    assert json.loads(asked.template_kwargs_json) == {"enable_thinking": False}


async def test_parts_equal_the_string(http: Http, fake: FakeClient) -> None:
    await post(http, HELLO)
    await post(http, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})
    assert fake.asked[0].input == fake.asked[1].input


@pytest.mark.parametrize("name", [None, "", "default", "org/tiny"])
async def test_names_of_the_served_model(http: Http, name: str | None) -> None:
    assert (await post(http, {**HELLO, "model": name})).status == 200


async def test_unknown_model(http: Http, fake: FakeClient) -> None:
    error = await expect_error(await post(http, {**HELLO, "model": "gpt" * 9999}), 404, "model", "org/tiny")
    assert error["code"] == "model_not_found"
    assert not fake.asked


async def test_unavailable(http: Http, fake: FakeClient) -> None:
    fake.state = "draining"
    response = await post(http, HELLO)
    await expect_error(response, 503, None, "draining")
    assert response.headers["Retry-After"] == "5"


async def test_openai_sdk(http: Http, fake: FakeClient) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=str(http.make_url("/v1")), api_key="none", max_retries=0) as sdk:
        answer = await sdk.chat.completions.create(model="org/tiny", messages=HELLO["messages"])
        assert answer.choices[0].message.content == "Hello"
        stream = await sdk.chat.completions.create(
            model="org/tiny", messages=HELLO["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage.total_tokens == 9
        assert [model.id async for model in sdk.models.list()] == ["org/tiny"]
        assert (await sdk.models.retrieve("org/tiny")).id == "org/tiny"
        fake.script.fail = ProcessDiedError("The scheduler ended.")
        with pytest.raises(openai.APIError, match="scheduler ended"):
            async for _ in await sdk.chat.completions.create(model="", messages=HELLO["messages"], stream=True):
                pass
