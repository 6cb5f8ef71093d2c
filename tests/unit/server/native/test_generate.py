"""POST /generate: what goes to the engine and what comes back, single and batch, streamed and whole."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from engine.errors import ContextLengthError, OverloadedError, ProcessDiedError, RequestTimeoutError, SlowReaderError
from engine.ipc.messages import Finish, TextInput, TokenInput, TokenLogprob, unpack_i32
from engine.sampling import SamplingParams, seed_of_choice
from tests.support.fake_client import FakeClient, Script
from tests.unit.server.native.support import generate, send
from tests.unit.server.support import Http, expect_error, read_events


def prompts(fake: FakeClient) -> list[str | list[int]]:
    """What was asked, in order."""
    return [
        ask.input.text if isinstance(ask.input, TextInput) else unpack_i32(ask.input.ids).tolist()
        for ask in fake.asked
        if isinstance(ask.input, TextInput | TokenInput)
    ]


def scored(idx: int, logprob: float | None, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(idx, logprob, b"t%d" % idx, [(other, value, b"t%d" % other) for other, value in top])


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_one_answer(http: Http, fake: FakeClient, method: str) -> None:
    response = await send(http, "/generate", {"text": "Hi", "rid": "mine"}, method=method)
    assert response.status == 200
    assert response.headers["x-request-id"] == "mine"
    body = await response.json()
    latency_s = body["meta_info"].pop("e2e_latency")
    assert 0 <= latency_s < 5
    assert body == {
        "text": "Hello",
        "output_ids": [100, 101],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "cached_tokens": 3,
            "weight_version": "default",
        },
    }
    ask = fake.asked[0]
    assert (ask.input, ask.stream, ask.label) == (TextInput("Hi"), False, "mine")
    assert ask.sampling == SamplingParams(max_tokens=128, may_shorten=True)
    assert fake.generations[0].closed


async def test_ids_are_taken_as_they_are(http: Http, fake: FakeClient) -> None:
    body = await (await generate(http, input_ids=[5, 6, 7])).json()
    assert body["text"] == "Hello"
    assert prompts(fake) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("finish", "stop_reason", "reason"),
    [
        (Finish.STOP_TOKEN, 2, {"type": "stop", "matched": 2}),
        (Finish.STOP_STRING, "END", {"type": "stop", "matched": "END"}),
        (Finish.LENGTH, None, {"type": "length", "length": 2}),
        (Finish.ABORT, None, {"type": "abort", "message": "The request was aborted."}),
    ],
)
async def test_finish_reason_is_the_same_in_both_modes(
    http: Http, fake: FakeClient, finish: Finish, stop_reason: str | int | None, reason: dict[str, object]
) -> None:
    fake.script.finish, fake.script.stop_reason = finish, stop_reason
    whole = await (await generate(http)).json()
    events = await read_events(await generate(http, stream=True))
    assert whole["meta_info"]["finish_reason"] == events[-2]["meta_info"]["finish_reason"] == reason


async def test_every_sampling_parameter(http: Http, fake: FakeClient) -> None:
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
        "logit_bias": {"5": -100, "6": 1.5},
        "sampling_seed": 11,
        "speculative": {"num_draft_tokens": 5},
        "spaces_between_special_tokens": True,
        "stream_interval": 8,
        "regex": None,
        "custom_params": {},
    }
    assert (await generate(http, sampling_params=params)).status == 200
    assert fake.asked[0].sampling == SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.2,
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        skip_special_tokens=False,
        keep_stop=True,
        logit_bias=((5, -100.0), (6, 1.5)),
        seed=11,
        max_drafts=5,
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_new_tokens": 0}, SamplingParams(max_tokens=0)),
        ({"max_new_tokens": None}, SamplingParams(max_tokens=None)),
        ({"min_new_tokens": 200}, SamplingParams(max_tokens=200, min_tokens=200, may_shorten=True)),
        ({"top_k": 0}, SamplingParams(max_tokens=128, may_shorten=True)),
        ({"stop": "x"}, SamplingParams(max_tokens=128, stop=("x",), may_shorten=True)),
        ({"seed": 3}, SamplingParams(max_tokens=128, seed=3, may_shorten=True)),
        ({"seed": 3, "sampling_seed": 3}, SamplingParams(max_tokens=128, seed=3, may_shorten=True)),
        (
            dict.fromkeys(("temperature", "stop", "n", "logit_bias", "seed")),
            SamplingParams(max_tokens=128, may_shorten=True),
        ),
        (None, SamplingParams(max_tokens=128, may_shorten=True)),
    ],
)
async def test_defaults(
    http: Http, fake: FakeClient, params: dict[str, object] | None, expected: SamplingParams
) -> None:
    assert (await generate(http, sampling_params=params)).status == 200
    assert fake.asked[0].sampling == expected


async def test_a_batch_is_a_list_in_order(http: Http, fake: FakeClient) -> None:
    fake.scripts = [Script(texts=["one"], pause_s=0.02), Script(texts=["t", "wo"])]
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    body = await (await generate(http, text=["a", "b"], rid="job", sampling_params=params)).json()
    assert [part["text"] for part in body] == ["one", "two"]
    assert [part["index"] for part in body] == [0, 1]
    assert [part["meta_info"]["id"] for part in body] == ["job_0", "job_1"]
    assert prompts(fake) == ["a", "b"]
    assert [ask.label for ask in fake.asked] == ["job_0", "job_1"]
    assert [ask.sampling.max_tokens for ask in fake.asked] == [1, 2]
    assert all(generation.closed for generation in fake.generations)


async def test_a_batch_of_one_is_a_list(http: Http, fake: FakeClient) -> None:
    assert isinstance(await (await generate(http, text=["a"])).json(), list)
    assert isinstance(await (await generate(http, input_ids=[[1, 2]], rid=["x"])).json(), list)
    assert prompts(fake) == ["a", [1, 2]]
    assert fake.asked[1].label == "x"


async def test_labels_without_a_rid_are_the_requests_id(http: Http, fake: FakeClient) -> None:
    response = await send(http, "/generate", {"text": ["a", "b"]}, **{"x-request-id": "trace"})
    assert response.headers["x-request-id"] == "trace"
    assert [ask.label for ask in fake.asked] == ["trace_0", "trace_1"]


async def test_n_is_prompt_major_and_has_a_seed_each(http: Http, fake: FakeClient) -> None:
    fake.scripts = [Script(texts=[text]) for text in "abcd"]
    params = {"n": 2, "sampling_seed": 5}
    body = await (await generate(http, text=["p", "q"], rid="job", sampling_params=params)).json()
    assert [part["text"] for part in body] == ["a", "b", "c", "d"]
    assert [part["index"] for part in body] == [0, 1, 2, 3]
    assert prompts(fake) == ["p", "p", "q", "q"]
    assert [ask.sampling.seed for ask in fake.asked] == [5, seed_of_choice(5, 1)] * 2
    assert [ask.label for ask in fake.asked] == ["job_0", "job_0", "job_1", "job_1"]


async def test_n_of_a_single_prompt_is_a_list(http: Http) -> None:
    body = await (await generate(http, sampling_params={"n": 3})).json()
    assert [part["index"] for part in body] == [0, 1, 2]


async def test_a_stream_is_cumulative(http: Http, fake: FakeClient) -> None:
    fake.script.texts = ['"q"', "\n", "", "é\U0001f600"]
    events = await read_events(await generate(http, stream=True, rid="mine"))
    assert events.pop() == "[DONE]"
    assert [event["text"] for event in events] == ['"q"', '"q"\n', '"q"\n', '"q"\né\U0001f600', '"q"\né\U0001f600']
    assert [len(event["output_ids"]) for event in events] == [1, 2, 3, 4, 4]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * 4 + [False]
    assert all(event["meta_info"]["id"] == "mine" and event["meta_info"]["prompt_tokens"] == 7 for event in events)
    assert events[-1]["meta_info"]["cached_tokens"] == 3
    assert not any("index" in event for event in events)
    whole = await (await generate(http, rid="mine")).json()
    last = events[-1]
    for answer in (whole, last):
        del answer["meta_info"]["e2e_latency"]
    assert last == whole


async def test_a_streamed_batch_says_whose_output_comes(http: Http, fake: FakeClient) -> None:
    fake.scripts = [Script(texts=["a"] * 3, pause_s=0.01), Script(texts=["b"]), Script(texts=[])]
    events = await read_events(await generate(http, text=["x", "y", "z"], stream=True))
    assert events.pop() == "[DONE]"
    last: dict[int, dict[str, Any]] = {}
    for event in events:
        before = last.get(event["index"], {"text": ""})
        assert event["text"].startswith(before["text"])
        last[event["index"]] = event
    assert {index: event["text"] for index, event in last.items()} == {0: "aaa", 1: "b", 2: ""}
    assert all(event["meta_info"]["finish_reason"] for event in last.values())
    assert fake.in_flight == 0


async def test_logprobs(http: Http, fake: FakeClient) -> None:
    fake.script.logprobs = [[scored(100, -0.5, (100, -0.5), (7, -1.5))], [scored(101, -math.inf, (8, -0.25))]]
    fake.script.prompt_logprobs = [scored(1, None), scored(2, -2.0, (3, -0.125))]
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = await (await generate(http, **fields)).json()
    meta = body["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 100, None], [-9999.0, 101, None]]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["output_top_logprobs"] == [[[-0.5, 100, None], [-1.5, 7, None]], [[-0.25, 8, None]]]
    assert meta["input_token_logprobs"] == [[None, 1, None], [-2.0, 2, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.125, 3, None]]]
    sampling = fake.asked[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs_from) == (2, 0)
    with_text = await (await generate(http, **fields, return_text_in_logprobs=True)).json()
    assert with_text["meta_info"]["output_token_logprobs"] == [[-0.5, 100, "t100"], [-9999.0, 101, "t101"]]
    assert with_text["meta_info"]["input_top_logprobs"] == [None, [[-0.125, 3, "t3"]]]
    events = await read_events(await generate(http, **fields, stream=True))
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events[:-1]] == [1, 2, 2]
    streamed = events[-2]["meta_info"]
    for name in (name for name in meta if "logprobs" in name):
        assert streamed[name] == meta[name]


async def test_logprobs_of_the_output_alone(http: Http, fake: FakeClient) -> None:
    fake.script.logprobs = [[scored(100, -0.5)], [scored(101, -1.0)]]
    meta = (await (await generate(http, return_logprob=True)).json())["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 100, None], [-1.0, 101, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert (fake.asked[0].sampling.logprobs, fake.asked[0].sampling.prompt_logprobs_from) == (0, -1)


async def test_scoring_a_prompt_generates_nothing(http: Http, fake: FakeClient) -> None:
    fake.script.texts = []
    fake.script.finish = Finish.LENGTH
    fake.script.prompt_logprobs = [scored(1, None), scored(2, -2.0)]
    fields = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    body = await (await generate(http, **fields)).json()
    assert (body["text"], body["output_ids"]) == ("", [])
    assert body["meta_info"]["input_token_logprobs"] == [[None, 1, None], [-2.0, 2, None]]
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_logprobs_of_some_of_a_batch(http: Http, fake: FakeClient) -> None:
    fields = {"return_logprob": [False, True], "top_logprobs_num": [0, 3], "logprob_start_len": [-1, 2]}
    fake.scripts = [Script(), Script(logprobs=[[scored(100, -0.5)], [scored(101, -1.0)]])]
    body = await (await generate(http, text=["a", "b"], **fields)).json()
    assert "output_token_logprobs" not in body[0]["meta_info"]
    assert len(body[1]["meta_info"]["output_token_logprobs"]) == 2
    assert [ask.sampling.logprobs for ask in fake.asked] == [-1, 3]
    assert [ask.sampling.prompt_logprobs_from for ask in fake.asked] == [-1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_its_own_status_and_the_clients_words(http: Http, fake: FakeClient, stream: bool) -> None:
    text = "The prompt has 7 tokens and max_tokens is 900, together 907."
    fake.script.refuse = ContextLengthError(text, param="max_tokens")
    response = await generate(http, stream=stream, sampling_params={"max_new_tokens": 900})
    await expect_error(response, 400, "sampling_params.max_new_tokens", "and max_new_tokens is 900")
    fake.script.refuse = ContextLengthError("The prompt has 900 tokens.", param="messages")
    await expect_error(await generate(http, stream=stream), 400, "text", "900")
    await expect_error(await generate(http, stream=stream, input_ids=[1]), 400, "input_ids", "900")
    fake.script.refuse = OverloadedError("The queue is full.", retry_after_s=3)
    response = await generate(http, stream=stream)
    assert response.headers["Retry-After"] == "3"
    await expect_error(response, 429, None, "queue")
    assert fake.in_flight == 0


async def test_only_the_default_limit_may_be_shortened(http: Http, fake: FakeClient) -> None:
    for params, may in (({}, True), ({"max_new_tokens": 128}, False), ({"max_new_tokens": None}, False)):
        await generate(http, sampling_params=params)
        assert fake.asked[-1].sampling.may_shorten is may
    fake.scripts = [Script(refuse=ContextLengthError("max_tokens is 128", param="max_tokens"))]
    response = await generate(http, sampling_params={"max_new_tokens": 128})
    await expect_error(response, 400, "sampling_params.max_new_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_part_refuses_the_batch(http: Http, fake: FakeClient, stream: bool) -> None:
    fake.scripts = [Script(hang_after_texts=True), Script(refuse=ContextLengthError("too long", param="messages"))]
    await expect_error(await generate(http, text=["a", "b"], stream=stream), 400, "text", "too long")
    assert fake.in_flight == 0


@pytest.mark.parametrize("batch", [False, True])
async def test_a_failure_amid_the_output(http: Http, fake: FakeClient, batch: bool) -> None:
    text = ["a", "b"] if batch else "a"
    failing = Script(fail=ProcessDiedError("The scheduler ended."))
    fake.scripts = [failing, *([Script(hang_after_texts=True)] if batch else [])]
    await expect_error(await generate(http, text=text), 500, None, "scheduler")
    fake.scripts = [failing, *([Script(hang_after_texts=True)] if batch else [])]
    events = await read_events(await generate(http, text=text, stream=True))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "process_died"
    assert fake.in_flight == 0


async def test_an_unforeseen_failure_amid_a_stream_tells_nothing(http: Http, fake: FakeClient) -> None:
    fake.script.fail = RuntimeError("secret")
    events = await read_events(await generate(http, stream=True))
    assert events[-2]["error"]["type"] == "internal_error"
    assert "secret" not in str(events)


async def test_the_deadline(http: Http, fake: FakeClient) -> None:
    fake.script.refuse = RequestTimeoutError("The request took longer than 1 s.")
    for stream in (False, True):
        error = await expect_error(await generate(http, stream=stream), 504, None, "longer than 1 s")
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    fake.script.refuse, fake.script.fail = None, RequestTimeoutError("The request took longer than 1 s.")
    await expect_error(await generate(http), 504, None, "longer than 1 s")
    events = await read_events(await generate(http, stream=True))
    assert events[-2]["error"]["code"] == "request_timeout"
    assert events[-1] == "[DONE]"


async def test_an_answer_that_nobody_read(http: Http, fake: FakeClient) -> None:
    fake.script.fail = SlowReaderError("The answer was not read.")
    events = await read_events(await generate(http, stream=True))
    assert events[-2]["error"]["code"] == "slow_reader"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_whole_batch(http: Http, fake: FakeClient, stream: bool) -> None:
    fake.script.hang_after_texts = True

    async def ask() -> None:
        response = await generate(http, text=["a", "b", "c"], stream=stream)
        await response.read()

    client = asyncio.create_task(ask())
    async with asyncio.timeout(10):
        while len(fake.generations) < 3:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not client.done()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    for _ in range(100):
        if fake.in_flight == 0:
            break
        await asyncio.sleep(0.01)
    assert fake.in_flight == 0
    assert len(fake.generations) == 3


async def test_nothing_before_the_model_is_ready(http: Http, fake: FakeClient) -> None:
    fake.state = "starting"
    await expect_error(await generate(http), 503, None, "starting")


async def test_the_models_name_must_be_the_served_one(http: Http) -> None:
    assert (await generate(http, model="org/tiny")).status == 200
    await expect_error(await generate(http, model="other"), 404, "model")
