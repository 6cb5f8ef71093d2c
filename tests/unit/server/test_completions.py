"""POST /v1/completions: prompts in, texts out, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ContextLengthError, ProcessDiedError
from engine.ipc.messages import Finish, TextInput, TokenInput, TokenLogprob, unpack_i32
from engine.sampling import SamplingParams
from engine.server.openai import call
from tests.support.fake_client import FakeClient, Script
from tests.unit.server.support import HELLO, Http, complete, expect_error, joined, plain, post, read_events

HI = {"prompt": "Hi"}


def asked_ids(fake: FakeClient) -> list[list[int]]:
    found = []
    for asked in fake.asked:
        assert isinstance(asked.input, TokenInput)
        found.append(unpack_i32(asked.input.ids).tolist())
    return found


def entry(text: str, logprob: float | None = -0.5) -> TokenLogprob:
    return TokenLogprob(5, logprob, text.encode(), [] if logprob is None else [(5, logprob, text.encode())])


async def test_whole_answer(http: Http, fake: FakeClient) -> None:
    response = await complete(http, HI)
    assert response.status == 200
    body = await response.json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("text_completion", "org/tiny", None)
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
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
    (asked,) = fake.asked
    assert asked.input == TextInput("Hi")
    assert (asked.stream, asked.echo) == (False, False)
    assert fake.generations[0].closed


async def test_stream(http: Http, fake: FakeClient) -> None:
    fake.script.texts = ["Hel", "", "lo\n\n\u2028"]
    events = await read_events(await complete(http, {**HI, "stream": True}))
    assert events.pop() == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in events}) == 1
    assert all(chunk["object"] == "text_completion" and chunk["id"].startswith("cmpl-") for chunk in events)
    assert all("usage" not in chunk for chunk in events)
    choices = [chunk["choices"][0] for chunk in events]
    assert [choice["text"] for choice in choices] == ["Hel", "lo\n\n\u2028", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert choices[-1]["matched_stop"] == choices[-1]["stop_reason"] == 2
    assert fake.asked[0].stream


async def test_usage_in_a_stream(http: Http) -> None:
    options = {"include_usage": True}
    events = await read_events(await complete(http, {**HI, "stream": True, "stream_options": options}))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert (last["choices"], last["object"]) == ([], "text_completion")
    assert last["usage"] == (await (await complete(http, HI)).json())["usage"]
    assert all(event["usage"] is None for event in events)
    options = {"continuous_usage_stats": True}
    events = await read_events(await complete(http, {**HI, "stream": True, "stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 2]
    # What is only known at the end.
    assert all("completion_tokens_details" not in event["usage"] for event in events[:-1])


async def test_defaults(http: Http, fake: FakeClient) -> None:
    names = (
        *("model", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "rid", "user"),
        *("stop_token_ids", "no_stop_trim", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        *("stream", "stream_options", "cache_salt", "priority", "logprobs", "echo", "best_of", "suffix", "speculative"),
    )
    assert (await complete(http, HI)).status == 200
    response = await complete(http, {**HI, **dict.fromkeys(names)})
    assert response.status == 200, await response.text()
    assert [asked.sampling for asked in fake.asked] == [SamplingParams(max_tokens=16)] * 2


async def test_sampling_fields(http: Http, fake: FakeClient) -> None:
    body = {
        **HI,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "max_tokens": 30,
        "min_tokens": 3,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"900": 1, "5": -100},
        "stop": ["end"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 11,
        "logprobs": 3,
        "user": "u\nERROR forged",
        "speculative": {"enabled": True, "num_draft_tokens": 3},
        "best_of": 1,
        "suffix": "",
    }
    response = await complete(http, body)
    assert response.status == 200, await response.text()
    assert fake.asked[0].sampling == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        max_tokens=30,
        min_tokens=3,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((5, -100.0), (900, 1.0)),
        stop=("end",),
        stop_token_ids=(7,),
        keep_stop=True,
        ignore_eos=True,
        skip_special_tokens=False,
        seed=11,
        logprobs=3,
        max_drafts=3,
    )


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (None, None),
        ({}, None),
        ({"enabled": None, "num_draft_tokens": None}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"enabled": False, "num_draft_tokens": 4}, 0),
        ({"num_draft_tokens": 0}, 0),
        ({"enabled": True, "num_draft_tokens": 128}, 128),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_how_far_may_be_drafted(
    http: Http, fake: FakeClient, given: dict[str, Any] | None, most: int | None, stream: bool
) -> None:
    body = {"n": 2, "stream": stream, "speculative": given}
    for response in (await complete(http, {**HI, **body}), await post(http, {**HELLO, **body})):
        assert response.status == 200, await response.text()
    assert [asked.sampling.max_drafts for asked in fake.asked] == [most] * 4


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1, 2, 999], [[1, 2, 999]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[0]], [[0]]),
    ],
)
async def test_prompts_of_ids(http: Http, fake: FakeClient, prompt: list[Any], ids: list[list[int]]) -> None:
    body = await (await complete(http, {"prompt": prompt})).json()
    assert asked_ids(fake) == ids
    assert len(body["choices"]) == len(ids)


async def test_prompts_are_answered_in_their_order(http: Http, fake: FakeClient) -> None:
    texts = ["slow", "mid", "quick", "now"]
    scripts = [
        Script(
            texts=[text],
            pause_s=(3 - idx) * 0.02,
            num_prompt_tokens=10 if idx < 2 else 20,
            cached_tokens=idx,
            accepted_drafts=idx,
            rejected_drafts=5,
        )
        for idx, text in enumerate(texts)
    ]
    body = {"prompt": ["one", "two"], "n": 2}
    fake.scripts = list(scripts)
    whole = await (await complete(http, body)).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(texts))
    assert [asked.input for asked in fake.asked] == [TextInput(text) for text in ("one", "one", "two", "two")]
    # A prompt counts once, and so does what its first choice found of it.
    assert whole["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 0 + 2},
        "completion_tokens_details": {"accepted_prediction_tokens": 0 + 1 + 2 + 3, "rejected_prediction_tokens": 4 * 5},
    }
    fake.scripts = list(scripts)
    options = {"include_usage": True}
    events = await read_events(await complete(http, {**body, "stream": True, "stream_options": options}))
    assert joined(events) == plain(whole)
    assert events[-2]["usage"] == whole["usage"]
    # They come as they are ready.
    assert events[0]["choices"][0]["index"] == 3


async def test_echo_of_a_text(http: Http, fake: FakeClient) -> None:
    whole = await (await complete(http, {"prompt": "Hi, ", "echo": True})).json()
    assert whole["choices"][0]["text"] == "Hi, Hello"
    assert not fake.asked[0].echo
    assert fake.asked[0].sampling.prompt_logprobs_from == -1
    events = await read_events(await complete(http, {"prompt": "Hi, ", "echo": True, "stream": True}))
    assert events[0]["choices"][0]["text"].startswith("Hi, ")
    assert joined(events) == plain(whole)


async def test_echo_of_ids(http: Http, fake: FakeClient) -> None:
    fake.scripts = [Script(prompt_text="one"), Script(prompt_text="two"), Script(prompt_text=None)]
    whole = await (await complete(http, {"prompt": [[1], [2], [3]], "echo": True})).json()
    assert [choice["text"] for choice in whole["choices"]] == ["oneHello", "twoHello", "Hello"]
    assert all(asked.echo for asked in fake.asked)
    await complete(http, {"prompt": [[1], [2], [3]]})
    assert not fake.asked[-1].echo


async def test_echo_with_logprobs(http: Http, fake: FakeClient) -> None:
    fake.script = Script(
        texts=[" ran", ""],
        logprobs=[[entry(" ran")], [TokenLogprob(2, -0.1, b"</s>", [])]],
        prompt_logprobs=[entry("The", None), entry(" fox", -3.0)],
    )
    body = {"prompt": "The fox", "echo": True, "logprobs": 1}
    whole = await (await complete(http, body)).json()
    assert fake.asked[0].sampling.prompt_logprobs_from == 0
    assert fake.asked[0].sampling.logprobs == 1
    assert whole["choices"][0]["text"] == "The fox ran"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["The", " fox", " ran"],
        "token_logprobs": [None, -3.0, -0.5],
        "top_logprobs": [None, {" fox": -3.0}, {" ran": -0.5}],
        "text_offset": [0, 3, 7],
    }
    events = await read_events(await complete(http, {**body, "stream": True}))
    first = events[0]["choices"][0]
    assert first["text"].startswith("The fox")
    assert first["logprobs"]["token_logprobs"][:2] == [None, -3.0]
    assert joined(events) == plain(whole)


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_scoring_a_prompt(http: Http, fake: FakeClient, logprobs: int | None) -> None:
    fake.script = Script(
        texts=[],
        finish=Finish.LENGTH,
        stop_reason=None,
        prompt_logprobs=[entry("The", None), entry(" fox", -3.0)],
        num_prompt_tokens=2,
    )
    body = {"prompt": "The fox", "echo": True, "logprobs": logprobs, "max_tokens": 0, "temperature": 0}
    whole = await (await complete(http, body)).json()
    assert fake.asked[0].sampling.max_tokens == 0
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The fox", "length")
    assert whole["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -3.0]
        assert choice["logprobs"]["text_offset"] == [0, 3]
    events = await read_events(await complete(http, {**body, "stream": True}))
    assert joined(events) == plain(whole)


async def test_nothing_asked_for(http: Http, fake: FakeClient) -> None:
    fake.script = Script(texts=[], finish=Finish.LENGTH, stop_reason=None)
    body = await (await complete(http, {**HI, "max_tokens": 0})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    ("prompt", "param", "part"),
    [
        (None, "prompt", "missing"),
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ([""], "prompt[0]", "empty"),
        (["a", ""], "prompt[1]", "empty"),
        ([[]], "prompt[0]", "empty"),
        ([[1], []], "prompt[1]", "empty"),
        ([-1], "prompt", "-1"),
        ([1, 1000, 5], "prompt", "1000; ids run from 0 to 999"),
        ([[1], [1, 1000]], "prompt[1]", "1000"),
        ([2**40], "prompt[0]", ""),
        ([5279552648203111001], "prompt[0]", ""),
        ([2**70], "prompt[0]", ""),
        ([1000, "a", 2.5], "prompt[2]", "float"),
        ([1, "a"], "prompt", "mixes"),
        (["a", [1]], "prompt", "mixes"),
        ([True], "prompt[0]", ""),
        ([None], "prompt[0]", ""),
        (5, "prompt", ""),
        ({"a": 1}, "prompt", ""),
        ([[["a"]]], "prompt[0][0]", ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_prompts(http: Http, fake: FakeClient, prompt: object, param: str, part: str, stream: bool) -> None:
    await expect_error(await complete(http, {"prompt": prompt, "stream": stream}), 400, param, part)
    assert not fake.asked
    assert (await complete(http, HI)).status == 200


async def test_no_prompt_at_all(http: Http) -> None:
    await expect_error(await complete(http, {}), 400, "prompt", "missing")


@pytest.mark.parametrize(
    "body", [{"prompt": ["a"] * 200_000}, {"prompt": [[1]] * 3000, "n": 2}, {"prompt": ["a"] * 4097}]
)
async def test_too_many_prompts(http: Http, fake: FakeClient, body: dict[str, Any]) -> None:
    fake.config = FakeClient(max_body_mb=4).config
    await expect_error(await complete(http, body), 400, "prompt", "4096")
    assert not fake.asked


async def test_as_many_prompts_as_are_allowed(http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MAX_ANSWERS", 200)
    body = await (await complete(http, {"prompt": ["a"] * 100, "n": 2})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(200))
    await expect_error(await complete(http, {"prompt": ["a"] * 101, "n": 2}), 400, "prompt", "200")


async def test_a_long_list_of_ids_is_one_prompt(http: Http, fake: FakeClient) -> None:
    await complete(http, {"prompt": [300] * 20_000})
    assert asked_ids(fake) == [[300] * 20_000]


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("logprobs", -1, "0..20"),
        ("logprobs", 21, "0..20"),
        ("logprobs", 1_000_000, "0..20"),
        ("logprobs", True, ""),
        ("echo", "yes", ""),
        ("best_of", 0, "less than n"),
        ("best_of", 2, "not supported"),
        ("best_of", 1.5, ""),
        ("suffix", "end", "not supported"),
        ("n", 0, "1..32"),
        ("n", 33, "1..32"),
        ("max_tokens", -1, "0.."),
        ("max_completion_tokens", -1, "0.."),
        ("min_tokens", 17, "0..16"),
        ("top_logprobs", 1, "not supported"),
        ("response_format", {"type": "json_object"}, "not supported"),
    ],
)
async def test_bad_values(http: Http, fake: FakeClient, field: str, value: object, part: str) -> None:
    await expect_error(await complete(http, {**HI, field: value}), 400, field, part)
    assert not fake.asked


@pytest.mark.parametrize(("n", "best_of", "status"), [(2, 1, 400), (2, 2, 200), (1, 1, 200), (2, 3, 400)])
async def test_best_of(http: Http, n: int, best_of: int, status: int) -> None:
    response = await complete(http, {**HI, "n": n, "best_of": best_of})
    assert response.status == status
    if status == 200:
        assert len((await response.json())["choices"]) == n


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_is_told_in_the_clients_words(http: Http, fake: FakeClient, stream: bool) -> None:
    fake.script.refuse = ContextLengthError("The prompt has 600 tokens.", param="messages")
    await expect_error(await complete(http, {**HI, "stream": stream}), 400, "prompt", "600")
    fake.script.refuse = ContextLengthError("max_tokens is 600. Lower max_tokens.", param="max_tokens")
    body = {**HI, "stream": stream, "max_completion_tokens": 600}
    error = await expect_error(await complete(http, body), 400, "max_completion_tokens")
    assert error["message"] == "max_completion_tokens is 600. Lower max_completion_tokens."
    assert error["code"] == "context_length_exceeded"


async def test_an_error_in_a_stream_is_an_event(http: Http, fake: FakeClient) -> None:
    fake.script.fail = ProcessDiedError("The scheduler ended.")
    events = await read_events(await complete(http, {**HI, "stream": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "process_died"
    assert all(not event["choices"][0]["finish_reason"] for event in events[:-2])


async def test_unknown_model(http: Http, fake: FakeClient) -> None:
    await expect_error(await complete(http, {**HI, "model": "gpt"}), 404, "model", "org/tiny")
    assert not fake.asked


async def test_a_body_that_is_no_utf8(http: Http, fake: FakeClient) -> None:
    await expect_error(await complete(http, b'{"prompt":"a\xff","max_tokens":1}'), 400, None, "UTF-8")


async def test_openai_sdk(http: Http, fake: FakeClient) -> None:
    openai = pytest.importorskip("openai")
    fake.script.logprobs = [[entry("Hel")], [entry("lo")]]
    async with openai.AsyncOpenAI(base_url=str(http.make_url("/v1")), api_key="none", max_retries=0) as sdk:
        answer = await sdk.completions.create(model="org/tiny", prompt=["a", "b"], logprobs=1, echo=True)
        assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
        assert answer.choices[0].logprobs.tokens == ["Hel", "lo"]
        stream = await sdk.completions.create(model="org/tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
