"""Whatever a body holds, the answer is a short, clear 4xx, and the next request works."""

from __future__ import annotations

import json
import logging

import pytest
from aiohttp import ClientConnectionError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.server.openai.call import Limits
from engine.server.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, MAX_REPORTED, UnknownFields
from engine.server.openai.parse import parse_chat
from engine.server.openai.prompts import parse_completion
from tests.support.fake_client import FakeClient
from tests.unit.server.support import CHAT, HELLO, Http, complete, expect_error, post

LIMITS = Limits(max_n=8, max_logprobs=5, vocab_size=1000)
MESSAGES = b'"messages": [{"role": "user", "content": "Hi"}]'


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        (b"", None, "empty"),
        (b"  \n", None, "empty"),
        (b"[]", None, "object"),
        (b"null", None, "object"),
        (b"{", None, "not valid JSON"),
        (b"\xef\xbb\xbf{}", None, "not valid JSON"),
        (b"{" + MESSAGES + b"} x", None, "trailing"),
        (b'{"temperature": NaN, ' + MESSAGES + b"}", None, "not valid JSON"),
        (b'{"temperature": -Infinity, ' + MESSAGES + b"}", None, "not valid JSON"),
        (b'{"temperature": 1e999, ' + MESSAGES + b"}", "temperature", "out of range"),
        (b'{"max_tokens": ' + b"9" * 5000 + b", " + MESSAGES + b"}", "max_tokens", ""),
        (b'{"chat_template_kwargs": {"a": ' + b"9" * 5000 + b"}, " + MESSAGES + b"}", "chat_template_kwargs[...]", ""),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', None, "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\ude00 x"}]}', None, "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None, "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}', None, "UTF-8"),
        (b'{"stop": "\\ud83d", ' + MESSAGES + b"}", None, "surrogate"),
        (b'{"\xff": 1, ' + MESSAGES + b"}", None, "UTF-8"),
        (b"[" * 100_000, None, "object"),
        (b'{"x": ' + b"[" * 100_000, None, "deeply"),
        (b'{"messages": ' + b"[" * 100_000, "messages[...]", ""),
        (b'{"chat_template_kwargs": {"a": ' + b'{"a":' * 100_000, None, "deeply"),
        (b"{}", "messages", "at least one"),
        (b'{"messages": null}', "messages", "at least one"),
        (b'{"messages": []}', "messages", "at least one"),
        (b'{"messages": {}}', "messages", ""),
        (b'{"messages": ["Hi"]}', "messages[0]", ""),
        (b'{"messages": [{"content": "Hi"}]}', "messages[0]", "role"),
        (b'{"messages": [{"role": "wizard", "content": "Hi"}]}', "messages[0].role", "assistant"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content", "missing"),
        (b'{"messages": [{"role": "assistant", "content": null}]}', "messages[0].content", "missing"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", ""),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text", ""),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}',
            "messages[0].content[0]",
            "image_url",
        ),
    ],
)
async def test_bad_bodies(http: Http, fake: FakeClient, body: bytes, param: str | None, part: str) -> None:
    response = await post(http, body)
    if param == "messages[...]":  # The path of a nested array depends on where the decoder gives up.
        assert response.status == 400
    else:
        await expect_error(response, 400, param, part)
    assert not fake.asked
    assert (await post(http, HELLO)).status == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -3),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 7),
        ("top_p", 0),
        ("min_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_completion_tokens", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 2**70),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", "yes"),
        ("stream", "true"),
        ("stream_options", []),
        ("n", 0),
        ("n", -1),
        ("n", 33),
        ("n", 100_000),
        ("n", True),
        ("n", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 2**40),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", "much"),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"1000": 1}),
        ("logit_bias", {"999999999": 5}),
        ("logit_bias", {"9" * 5000: 5}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", [[5, 1]]),
        ("speculative", []),
        ("speculative", True),
        ("speculative", {"draft_model": "x"}),
        ("no_stop_trim", 1),
        ("include_stop_str_in_output", "no"),
        ("logprobs", 1),
        ("logprobs", "yes"),
        ("top_logprobs", 1),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("priority", 10**7),
        ("cache_salt", "x" * 257),
        ("user", 5),
        ("rid", "a\nb"),
        ("rid", ""),
        ("rid", "x" * 129),
        ("model", 3),
        ("chat_template_kwargs", []),
    ],
)
async def test_bad_values_name_their_field(http: Http, fake: FakeClient, field: str, value: object) -> None:
    await expect_error(await post(http, {**HELLO, field: value}), 400, field, field)
    assert not fake.asked


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("enabled", 1, "Expected `bool"),
        ("enabled", "yes", "Expected `bool"),
        ("num_draft_tokens", True, "Expected `int"),
        ("num_draft_tokens", "4", "Expected `int"),
        ("num_draft_tokens", 1.5, "Expected `int"),
        ("num_draft_tokens", -1, "0..128"),
        ("num_draft_tokens", 129, "0..128"),
        ("num_draft_tokens", 2**40, "<= 2147483647"),
    ],
)
async def test_bad_values_of_drafting(http: Http, fake: FakeClient, name: str, value: object, part: str) -> None:
    for send, body in ((post, HELLO), (complete, {"prompt": "Hi"})):
        response = await send(http, {**body, "speculative": {"enabled": False, name: value}})
        await expect_error(response, 400, f"speculative.{name}", part)
    assert not fake.asked


@pytest.mark.parametrize("count", [-1, 21, 1_000_000])
async def test_alternatives_beyond_the_limit(http: Http, fake: FakeClient, count: int) -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": count}
    await expect_error(await post(http, body), 400, "top_logprobs", "0..20 (--max-logprobs)")
    fake.config = FakeClient(max_logprobs=1000).config
    body["top_logprobs"] = 1000
    assert (await post(http, body)).status == 200
    assert fake.asked[0].sampling.logprobs == 1000


async def test_a_bias_that_is_no_number(http: Http) -> None:
    for value in ("1", None, True, [1]):
        assert (await post(http, {**HELLO, "logit_bias": {"5": value}})).status == 400


async def test_an_error_has_the_name_that_the_client_used(http: Http) -> None:
    body = {**HELLO, "min_tokens": 5}
    response = await post(http, {**body, "max_tokens": 4})
    await expect_error(response, 400, "min_tokens", "as max_tokens is")
    response = await post(http, {**body, "max_completion_tokens": 4})
    await expect_error(response, 400, "min_tokens", "as max_completion_tokens is")


async def test_more_than_one_answer_needs_the_servers_leave(http: Http, fake: FakeClient) -> None:
    fake.config = FakeClient(max_n=2).config
    assert (await post(http, {**HELLO, "n": 2})).status == 200
    await expect_error(await post(http, {**HELLO, "n": 3}), 400, "n", "1..2 (--max-n)")


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools"])
async def test_template_variables_that_are_ours(http: Http, name: str) -> None:
    response = await post(http, {**HELLO, "chat_template_kwargs": {name: "x"}})
    await expect_error(response, 400, f"chat_template_kwargs.{name}", name)


@pytest.mark.parametrize(
    ("route", "name"),
    [("chat", name) for name in sorted(CHAT_FIELDS.refused)]
    + [("completions", name) for name in sorted(COMPLETION_FIELDS.refused)],
)
async def test_refused_fields(http: Http, fake: FakeClient, route: str, name: str) -> None:
    rules, send, body = CHAT_FIELDS, post, HELLO
    if route == "completions":
        rules, send, body = COMPLETION_FIELDS, complete, {"prompt": "Hi"}
    error = await expect_error(await send(http, {**body, name: {"x": 3}}), 400, name, "not supported by this version")
    assert error["code"] == "unsupported_parameter"
    assert not fake.asked
    for off in (*rules.refused[name], None):
        assert (await send(http, {**body, name: off})).status == 200, (name, off)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
    ],
)
async def test_refused_values(http: Http, name: str, value: object) -> None:
    await expect_error(await post(http, {**HELLO, name: value}), 400, name, "not supported by this version")


async def test_a_repeated_key_is_the_last_one(http: Http, fake: FakeClient) -> None:
    response = await post(http, b'{"temperature": 0.5, "temperature": 0.25, ' + MESSAGES + b"}")
    assert response.status == 200
    assert fake.asked[0].sampling.temperature == 0.25


async def test_unknown_fields_pass_and_are_reported_once(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    body = {**HELLO, "wild": "secret text", "line\nbreak": 1, "metadata": {}, "store": False}
    with caplog.at_level(logging.WARNING, logger="engine.server"):
        for _ in range(2):
            assert (await post(http, body)).status == 200
    records = [r.getMessage() for r in caplog.records if r.name == "engine.server"]
    assert records == ["event=unknown_fields ignored=line\\nbreak,wild"]


def test_unknown_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    for idx in range(3):
        unknown.report([f"{idx}-{number}" + "x" * 500 for number in range(MAX_REPORTED)])
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < MAX_REPORTED * 70


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x"])
async def test_other_content_types(http: Http, content_type: str) -> None:
    response = await http.post(CHAT, data=json.dumps(HELLO).encode(), headers={"Content-Type": content_type})
    await expect_error(response, 400, None, "application/json")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", None])
async def test_json_content_types(http: Http, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    skip = ["Content-Type"] if content_type is None else None
    response = await http.post(CHAT, data=json.dumps(HELLO).encode(), headers=headers, skip_auto_headers=skip)
    assert response.status == 200


async def test_a_large_body_is_decoded_aside(http: Http, fake: FakeClient) -> None:
    text = "x" * 700_000
    assert (await post(http, {"messages": [{"role": "user", "content": text}]})).status == 200
    response = await post(http, b'{"messages": [' + b"[" * 700_000)
    assert response.status == 400


async def test_a_body_beyond_the_limit(http: Http, fake: FakeClient) -> None:
    await expect_error(await post(http, b" " * (2**20 + 1)), 413, None, "1048576")
    fits = json.dumps(HELLO).encode().ljust(2**20)
    assert (await post(http, fits)).status == 200


async def test_a_chunked_body_beyond_the_limit(http: Http) -> None:
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(400):
            sent += 2**16
            yield b" " * 2**16

    try:
        response = await http.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"})
        await expect_error(response, 413, None, "1048576")
    except ClientConnectionError:
        pytest.fail("the connection was cut before the answer")


async def test_broken_compression(http: Http) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    response = await http.post(CHAT, data=b"not gzip at all", headers=headers)
    assert response.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("messages", "prompt", "stop", "max_tokens", "temperature", "seed", "stream_options", "n", "rid", "x"),
        *("logit_bias", "logprobs", "top_logprobs", "best_of", "echo", "speculative"),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_any_json_is_taken_or_refused(fields: dict[str, object]) -> None:
    for parse, base in ((parse_chat, HELLO), (parse_completion, {"prompt": "Hi"})):
        try:
            parse(json.dumps({**base, **fields}).encode(), UnknownFields(), LIMITS)
        except InvalidRequestError as error:
            assert error.message


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    for body in (data, b'{"messages": [{"role": "user", "content": "' + data + b'"}]}', b'{"prompt": "' + data + b'"}'):
        for parse in (parse_chat, parse_completion):
            try:
                parse(body, UnknownFields(), LIMITS)
            except InvalidRequestError as error:
                assert error.message
