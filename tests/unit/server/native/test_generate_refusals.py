"""Whatever a /generate body holds, the answer is a short, clear 4xx that names the field."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.server.native.fields import REFUSED, REFUSED_SAMPLING
from engine.server.native.parse import parse_generate
from engine.server.openai.call import MAX_ANSWERS, Limits
from engine.server.openai.fields import UnknownFields
from tests.support.fake_client import FakeClient
from tests.unit.server.native.support import generate, send
from tests.unit.server.support import Http, expect_error

LIMITS = Limits(max_n=32, max_logprobs=20, vocab_size=1000)


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        (b"", None, "empty"),
        (b"[]", None, "object"),
        (b"{", None, "not valid JSON"),
        (b'{"text": "\\ud83d"}', None, "surrogate"),
        (b"{}", None, "text and input_ids"),
        (b'{"text": "a", "input_ids": [1]}', None, "text and input_ids"),
        (b'{"text": 5}', "text", ""),
        (b'{"text": []}', "text", "1 to 4096"),
        (b'{"text": ["a", 5]}', "text[1]", ""),
        (b'{"input_ids": [1, [2]]}', "input_ids", "mixes"),
        (b'{"input_ids": [[1], 2]}', "input_ids", "mixes"),
        (b'{"input_ids": [-1]}', "input_ids[0]", ""),
        (b'{"input_ids": [2147483648]}', "input_ids[0]", ""),
        (b'{"input_ids": [true]}', "input_ids[0]", ""),
        (b'{"text": "a", "sampling_params": 5}', "sampling_params", ""),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', None, "not valid JSON"),
        (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "sampling_params.temperature", "out of range"),
        (b'{"text": "a", "sampling_params": {"x": ' + b"[" * 100_000, None, "deeply"),
    ],
)
async def test_bad_bodies(http: Http, fake: FakeClient, body: bytes, param: str | None, part: str) -> None:
    await expect_error(await send(http, "/generate", body), 400, param, part)
    assert not fake.asked


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("temperature", -1, "temperature is -1"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "(0, 1]"),
        ("top_k", -2, "top_k is -2"),
        ("min_p", 2, "min_p is 2"),
        ("max_new_tokens", -1, "max_new_tokens is -1"),
        ("min_new_tokens", -1, "min_new_tokens is -1"),
        ("frequency_penalty", 3, "[-2, 2]"),
        ("presence_penalty", -3, "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 2]"),
        ("stop", "", "stop"),
        ("stop", 5, "stop"),
        ("stop_token_ids", [1000], "0 to 999"),
        ("n", 0, "1..32"),
        ("n", 33, "--max-n"),
        ("n", True, "n"),
        ("logit_bias", {"1000": 1}, "0 to 999"),
        ("logit_bias", {"1": 101}, "[-100, 100]"),
        ("logit_bias", {"-1": 1}, "token ids"),
        ("logit_bias", {"01": 1}, "token ids"),
        ("logit_bias", {"a": 1}, "token ids"),
        ("logit_bias", {"9" * 5000: 1}, "token ids"),
        ("logit_bias", {str(idx): 0 for idx in range(1025)}, "1024"),
        ("sampling_seed", -1, "sampling_seed is -1"),
        ("speculative", 5, "speculative"),
        ("speculative", {"num_drafts": 5}, "num_drafts"),
        ("max_tokens", 5, "did you mean max_new_tokens?"),
        ("temprature", 1, "did you mean temperature?"),
        ("x" * 500, 1, "is not known"),
    ],
)
async def test_bad_sampling_values(http: Http, fake: FakeClient, name: str, value: object, part: str) -> None:
    response = await generate(http, sampling_params={name: value})
    shown = name if len(name) <= 60 else name[:57] + "..."
    error = await expect_error(response, 400, f"sampling_params.{shown}", part)
    assert len(error["message"]) < 300
    assert not fake.asked


async def test_more_drafts_than_any_server_makes(http: Http) -> None:
    response = await generate(http, text=["a", "b"], sampling_params=[{}, {"speculative": {"num_draft_tokens": 129}}])
    name = "sampling_params[1].speculative.num_draft_tokens"
    await expect_error(response, 400, name, f"{name} is 129; it must lie in 0..128")


async def test_two_seeds_must_agree(http: Http) -> None:
    response = await generate(http, sampling_params={"seed": 1, "sampling_seed": 2})
    await expect_error(response, 400, "sampling_params.seed", "differ")


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"sampling_params": [{}]}, "sampling_params", "one prompt"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "1 entries"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 5, "x": 1}]}, "sampling_params[1].x", "not known"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "twice"),
        ({"text": ["a", "b"], "rid": ["x", "y\n"]}, "rid", "ASCII"),
        ({"rid": ["x"]}, "rid", "one prompt"),
        ({"rid": ""}, "rid", "ASCII"),
        ({"rid": "x" * 129}, "rid", "128"),
        ({"rid": 5}, "rid", ""),
        ({"stream": "yes"}, "stream", ""),
        ({"return_logprob": [True]}, "return_logprob", "one prompt"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num", "1 entries"),
        ({"top_logprobs_num": 21}, "top_logprobs_num", "0..20"),
        ({"top_logprobs_num": -1}, "top_logprobs_num", "0..20"),
        ({"logprob_start_len": -2}, "logprob_start_len", "-1"),
        ({"return_logprob": True, "logprob_start_len": 8}, "logprob_start_len", "7 tokens"),
        ({"cache_salt": "x" * 257}, "cache_salt", ""),
        ({"priority": 2_000_000}, "priority", ""),
        ({"text": ["a"] * (MAX_ANSWERS + 1)}, "text", "1 to 4096"),
        ({"text": ["a"] * 200_000}, "text", "1 to 4096"),
        ({"text": ["a"] * 256, "sampling_params": {"n": 17}}, "sampling_params.n", "4352"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields(
    http: Http, fake: FakeClient, fields: dict[str, Any], param: str, part: str, stream: bool
) -> None:
    await expect_error(await generate(http, **{"stream": stream, **fields}), 400, param, part)
    assert fake.in_flight == 0


async def test_copies_of_a_prompt_count_as_its_size(http: Http, fake: FakeClient) -> None:
    text = "x" * 40_000
    response = await generate(http, text=text, sampling_params={"n": 32})
    await expect_error(response, 413, "text", "1048576")
    assert not fake.asked
    assert (await generate(http, text=text, sampling_params={"n": 8})).status == 200


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_refused_fields(http: Http, fake: FakeClient, name: str) -> None:
    error = await expect_error(await generate(http, **{name: {"x": 3}}), 400, name, "not supported")
    assert error["code"] == "unsupported_parameter"
    for off in (*REFUSED[name], None):
        assert (await generate(http, **{name: off})).status == 200, (name, off)


@pytest.mark.parametrize("name", sorted(REFUSED_SAMPLING))
async def test_refused_sampling_fields(http: Http, name: str) -> None:
    response = await generate(http, sampling_params={name: {"x": 3}})
    await expect_error(response, 400, f"sampling_params.{name}", "not supported")
    for off in (*REFUSED_SAMPLING[name], None):
        assert (await generate(http, sampling_params={name: off})).status == 200, (name, off)


async def test_unknown_fields_pass_with_a_warning(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="engine.server"):
        assert (await generate(http, wild=1, log_metrics=False)).status == 200
    assert "ignored=wild" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["text", "input_ids", "sampling_params", "rid", "return_logprob", "top_logprobs_num", "x"])
PARAMS = st.sampled_from(["n", "stop", "logit_bias", "seed", "max_new_tokens", "temperature", "y"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(FIELDS, JSON, max_size=4), st.dictionaries(PARAMS, JSON, max_size=3))
def test_any_json_is_taken_or_refused(fields: dict[str, object], params: dict[str, object]) -> None:
    body = {"text": "a", "sampling_params": params, **fields}
    try:
        call = parse_generate(
            json.dumps(body).encode(), UnknownFields(), LIMITS, max_prompt_bytes=2**20, request_id="id"
        )
    except EngineError as error:
        assert 400 <= error.status < 500
        assert error.message
    else:
        for part in call.parts:
            try:
                part.sampling.checked(1000)
            except EngineError as error:
                assert error.status == 400
