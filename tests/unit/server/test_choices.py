"""Several answers to one request: their order, their seeds, and that they end together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientResponse

from engine.errors import EngineError, OverloadedError, ProcessDiedError, UnavailableError
from engine.ipc.messages import Finish
from engine.sampling import SamplingParams, seed_of_choice
from engine.server.openai.choices import together
from tests.support.fake_client import FakeClient, FakeGeneration, Script
from tests.unit.server.support import CHAT, HELLO, Http, complete, expect_error, joined, plain, post, read_events


def scripts() -> list[Script]:
    """The later, the faster; each ends in its own way."""
    return [
        Script(
            ["a", "b", "c"], Finish.LENGTH, None, pause_s=0.02, cached_tokens=3, accepted_drafts=2, rejected_drafts=5
        ),
        Script(["d", "", "e"], Finish.STOP_STRING, "END", pause_s=0.01, cached_tokens=6),
        Script(["f"], Finish.STOP_TOKEN, 2, cached_tokens=6, accepted_drafts=1, rejected_drafts=1),
    ]


async def test_n_answers(http: Http, fake: FakeClient) -> None:
    fake.scripts = scripts()
    body = await (await post(http, {**HELLO, "n": 3})).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "abc", "length"),
        (1, "de", "stop"),
        (2, "f", "stop"),
    ]
    assert [choice["stop_reason"] for choice in body["choices"]] == [None, "END", 2]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 7,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6},
    }
    assert fake.in_flight == 0


async def test_the_stream_equals_the_plain_answer(http: Http, fake: FakeClient) -> None:
    fake.scripts = scripts()
    whole = await (await post(http, {**HELLO, "n": 3})).json()
    fake.scripts = scripts()
    options = {"include_usage": True}
    events = await read_events(await post(http, {**HELLO, "n": 3, "stream": True, "stream_options": options}))
    assert joined(events) == plain(whole)
    assert events.count("[DONE]") == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-2])
    chunks = [event["choices"][0] for event in events[:-2]]
    roles = [(chunk["index"], chunk["delta"]) for chunk in chunks if "role" in chunk["delta"]]
    assert sorted(roles, key=lambda role: role[0]) == [(idx, {"role": "assistant", "content": ""}) for idx in range(3)]
    for idx in range(3):
        own = [chunk for chunk in chunks if chunk["index"] == idx]
        assert own[0]["delta"].get("role") == "assistant"
        assert [chunk["finish_reason"] is not None for chunk in own].count(True) == 1
    # A fast answer does not wait for a slow one.
    assert [chunk["index"] for chunk in chunks if chunk["finish_reason"]] == [2, 1, 0]


async def test_counts_in_every_chunk_are_of_all_answers(http: Http, fake: FakeClient) -> None:
    fake.scripts = scripts()
    options = {"continuous_usage_stats": True}
    events = await read_events(await post(http, {**HELLO, "n": 3, "stream": True, "stream_options": options}))
    usages = [event["usage"] for event in events[:-1]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 7)
    assert all(usage["prompt_tokens"] == 7 for usage in usages)


async def test_each_answer_has_its_seed(http: Http, fake: FakeClient) -> None:
    await post(http, {**HELLO, "n": 4, "seed": 42})
    seeds = [asked.sampling.seed for asked in fake.asked]
    assert seeds == [seed_of_choice(42, idx) for idx in range(4)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 4


async def test_without_a_seed_each_draws_its_own(http: Http, fake: FakeClient) -> None:
    await post(http, {**HELLO, "n": 3})
    assert [asked.sampling.seed for asked in fake.asked] == [None] * 3


async def test_every_answer_has_all_settings(http: Http, fake: FakeClient) -> None:
    body = {
        "prompt": ["a", "b"],
        "n": 2,
        "temperature": 0.5,
        "max_tokens": 3,
        "stop": "x",
        "logprobs": 1,
        "logit_bias": {"5": 1},
    }
    await complete(http, body)
    expected = SamplingParams(temperature=0.5, max_tokens=3, stop=("x",), logprobs=1, logit_bias=((5, 1.0),))
    assert [asked.sampling for asked in fake.asked] == [expected] * 4


async def test_labels(http: Http, fake: FakeClient) -> None:
    response = await post(http, {**HELLO, "rid": "mine", "n": 1})
    assert response.headers["x-request-id"] == "mine"
    response = await post(http, {**HELLO, "rid": "mine", "n": 3})
    assert response.headers["x-request-id"] == "mine"
    response = await complete(http, {"prompt": ["a", "b"], "n": 2}, **{"x-request-id": "trace"})
    assert [asked.label for asked in fake.asked] == [
        "mine",
        *["mine"] * 3,
        *["trace"] * 4,
    ]


async def test_all_are_started_before_any_is_awaited(http: Http, fake: FakeClient) -> None:
    fake.script.hang_before_accept = True
    task = asyncio.create_task(post(http, {**HELLO, "n": 32}))
    await asyncio.wait_for(fake.started.wait(), 2)
    await asyncio.sleep(0.02)
    assert len(fake.asked) == 32
    task.cancel()
    await asyncio.wait_for(fake.closed.wait(), 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refusal_refuses_all(http: Http, fake: FakeClient, stream: bool) -> None:
    hanging = Script(hang_after_texts=True)
    fake.scripts = [hanging, Script(refuse=OverloadedError("The queue is full.", retry_after_s=3)), hanging]
    response = await complete(http, {"prompt": ["a", "b", "c"], "stream": stream})
    await expect_error(response, 429, None, "full")
    assert response.headers["Retry-After"] == "3"
    assert len(fake.generations) == 3
    assert fake.in_flight == 0


async def test_a_start_that_breaks_off_ends_what_was_started(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = fake.generate

    def generate(*args: Any, **more: Any) -> FakeGeneration:
        if len(fake.asked) == 2:
            raise UnavailableError("The server is draining.")
        return begin(*args, **more)

    monkeypatch.setattr(fake, "generate", generate)
    await expect_error(await post(http, {**HELLO, "n": 3}), 503, None, "draining")
    assert len(fake.generations) == 2
    assert fake.in_flight == 0


async def test_one_failure_fails_the_plain_answer(http: Http, fake: FakeClient) -> None:
    fake.scripts = [Script(hang_after_texts=True), Script(fail=ProcessDiedError("The scheduler ended."))]
    response = await asyncio.wait_for(post(http, {**HELLO, "n": 2}), 2)
    error = await expect_error(response, 500, None, "scheduler ended")
    assert error["code"] == "process_died"
    assert fake.in_flight == 0


@pytest.mark.parametrize("error", [ProcessDiedError("The scheduler ended."), ValueError("secret")])
async def test_one_failure_ends_the_stream(http: Http, fake: FakeClient, error: Exception) -> None:
    fake.scripts = [Script(hang_after_texts=True), Script(fail=error), Script(["x"])]
    response = await complete(http, {"prompt": ["a", "b", "c"], "stream": True})
    events = await asyncio.wait_for(read_events(response), 2)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["type"] == "internal_error"
    assert "secret" not in json.dumps(events)
    assert fake.in_flight == 0
    finished = [e["choices"][0]["index"] for e in events[:-2] if e["choices"][0]["finish_reason"]]
    assert finished in ([], [2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["before_accept", "after_texts"])
async def test_a_client_that_leaves_ends_all(http: Http, fake: FakeClient, stream: bool, stage: str) -> None:
    fake.script.hang_before_accept = stage == "before_accept"
    fake.script.hang_after_texts = True
    _, writer = await asyncio.open_connection("127.0.0.1", http.port)
    data = json.dumps({**HELLO, "stream": stream, "n": 5}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await asyncio.wait_for(fake.started.wait(), 2)
    await asyncio.sleep(0.02)
    assert fake.in_flight == 5
    writer.transport.abort()
    await asyncio.wait_for(fake.closed.wait(), 2)
    await asyncio.sleep(0.02)
    assert fake.in_flight == 0


async def test_many_answers_at_once_keep_their_order(http: Http, fake: FakeClient) -> None:
    fake.config = FakeClient(max_n=100).config
    fake.script.texts = [f"{idx} " for idx in range(10)]

    async def one(route: Any, body: dict[str, Any]) -> list[str]:
        response: ClientResponse = await route(http, {**body, "stream": True})
        return [choice["text"] for choice in joined(await read_events(response))]

    found = await asyncio.gather(one(post, {**HELLO, "n": 100}), one(complete, {"prompt": ["x"] * 150}))
    assert found == [["".join(fake.script.texts)] * count for count in (100, 150)]


async def test_together() -> None:
    async def give(value: int) -> int:
        await asyncio.sleep(0.001 * (3 - value))
        return value

    stopped = []

    async def fail() -> int:
        raise ProcessDiedError("gone")

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return 0

    assert await together([give(0), give(1), give(2)]) == [0, 1, 2]
    assert await together([give(1)]) == [1]
    with pytest.raises(EngineError, match="gone"):
        await together([wait(), fail(), wait()])
    assert stopped == [True, True]


async def test_a_body_that_is_too_large_n_times_over_is_refused(http: Http, fake: FakeClient) -> None:
    text = "x" * 60_000
    response = await complete(http, {"prompt": text, "n": 20, "max_tokens": 1})
    await expect_error(response, 413, "n")
    assert (await complete(http, {"prompt": text, "n": 2, "max_tokens": 1})).status == 200
    assert len(fake.asked) == 2
