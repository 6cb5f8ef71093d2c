"""Whatever is sent: an answer or a clear 4xx, in time, and nobody else notices."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server import Server

TIMEOUT_S = 30.0

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.integers(-5, 500), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(-5, 5), max_size=3),
)
TOKENS = st.lists(st.integers(0, 250), min_size=1, max_size=40)
TEXTS = st.text(max_size=40)
STOPS = st.one_of(st.text(max_size=4), st.lists(st.text(max_size=4), max_size=4))
BIAS = st.dictionaries(st.one_of(st.integers(-2, 400).map(str), st.text(max_size=3)), st.floats(-120, 120), max_size=4)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "robot"])
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": TEXTS}), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.one_of(TEXTS, PARTS, st.none())}), min_size=0, max_size=3
)

SAMPLING = {
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.2, 1.2),
    "top_k": st.integers(-3, 60),
    "min_p": st.floats(-0.2, 1.2),
    "repetition_penalty": st.floats(-0.2, 2.2),
    "presence_penalty": st.floats(-2.2, 2.2),
    "frequency_penalty": st.floats(-2.2, 2.2),
    "logit_bias": BIAS,
    "stop": STOPS,
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.integers(-1, 4),
    "speculative": st.fixed_dictionaries(
        {}, optional={"enabled": st.booleans(), "num_draft_tokens": st.integers(-1, 130), "odd": ODD}
    ),
}
OPENAI = {
    **SAMPLING,
    "seed": st.integers(-2, 2**64),
    "min_tokens": st.integers(-1, 9),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "user": st.text(max_size=5),
    "cache_salt": st.text(max_size=5),
    "priority": st.integers(-3, 3),
    "rid": st.text(max_size=6),
    "unheard_of": ODD,
}
LIMIT = st.sampled_from([1, 2, 3, 8])
CHAT = st.tuples(
    st.just("/v1/chat/completions"),
    st.fixed_dictionaries(
        {"messages": MESSAGES, "max_tokens": LIMIT},
        optional={**OPENAI, "logprobs": st.booleans(), "top_logprobs": st.integers(-1, 25)},
    ),
)
COMPLETIONS = st.tuples(
    st.just("/v1/completions"),
    st.fixed_dictionaries(
        {
            "prompt": st.one_of(TEXTS, st.lists(TEXTS, max_size=3), TOKENS, st.lists(TOKENS, max_size=3)),
            "max_tokens": st.one_of(LIMIT, st.just(0)),
        },
        optional={
            **OPENAI, "logprobs": st.integers(-1, 25), "echo": st.booleans(), "best_of": st.integers(0, 3),
            "suffix": st.text(max_size=3),
        },
    ),
)  # fmt: skip
NATIVE_SAMPLING = st.fixed_dictionaries({"max_new_tokens": st.one_of(LIMIT, st.just(0))}, optional=SAMPLING)
GENERATE = st.tuples(
    st.just("/generate"),
    st.fixed_dictionaries(
        {"sampling_params": st.one_of(NATIVE_SAMPLING, st.lists(NATIVE_SAMPLING, max_size=2))},
        optional={
            "text": st.one_of(TEXTS, st.lists(TEXTS, max_size=3)),
            "input_ids": st.one_of(TOKENS, st.lists(TOKENS, max_size=3)),
            "stream": st.booleans(), "rid": st.one_of(TEXTS, st.lists(TEXTS, max_size=2)),
            "return_logprob": st.booleans(), "logprob_start_len": st.integers(-2, 50),
            "top_logprobs_num": st.integers(-1, 25),
        },
    ),
)  # fmt: skip
OTHERS = st.tuples(
    st.sampled_from(["/tokenize", "/detokenize", "/abort_request", "/pin_prefix", "/unpin_prefix", "/flush_cache"]),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.one_of(TEXTS, ODD), "tokens": st.one_of(TOKENS, ODD), "rid": st.one_of(TEXTS, ODD),
            "rid_prefix": TEXTS, "abort_all": st.booleans(), "text": TEXTS, "pin_id": st.integers(-1, 3),
            "messages": MESSAGES, "ttl_s": st.floats(-1, 2),
        },
    ),
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body: mostly plausible, sometimes with a field of another type, sometimes broken bytes."""
    route, body = draw(st.one_of(CHAT, COMPLETIONS, GENERATE, OTHERS))
    for name in draw(st.lists(st.sampled_from(sorted(body) or ["model"]), max_size=1)):
        if draw(st.integers(0, 3)) == 0:
            body = {**body, name: draw(ODD)}
    data = json.dumps(body).encode()
    damage = draw(st.integers(0, 30))
    if damage == 0 and len(data) > 2:
        where = draw(st.integers(0, len(data) - 1))
        data = data[:where] + bytes([draw(st.integers(0, 255))]) + data[where + 1 :]
    elif damage == 1:
        data = data[: draw(st.integers(0, len(data)))]
    elif damage == 2:
        data = draw(st.binary(max_size=60))
    return route, data


def send(server: Server, route: str, data: bytes) -> None:
    """Raises AssertionError (a 5xx, a broken answer) or TimeoutError."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", route, data, {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        assert response.status < 500, (route, data, response.status, body[:500])
        if response.getheader("content-type", "").startswith("text/event-stream"):
            check_events(body)
        else:
            answer = json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} in {body!r}"))
            if response.status >= 400:
                assert answer["error"]["message"], (route, data, body)
                assert answer["error"]["type"], (route, data, body)
    finally:
        connection.close()


def check_events(body: bytes) -> None:
    """A stream holds JSON events and ends with its marker; errors inside it are not ours."""
    events = [part for part in body.decode().split("\n\n") if part and not part.startswith(":")]
    assert events[-1] == "data: [DONE]", body[-300:]
    for item in events[:-1]:
        event = json.loads(item.removeprefix("data: "))
        assert "error" not in event or event["error"]["type"] != "internal_error", item


def fuzz(server: Server, num: int) -> None:
    @settings(
        max_examples=num, deadline=None, database=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(requests())
    def run(request: tuple[str, bytes]) -> None:
        send(server, *request)

    run()
    # Nothing was lost for others, and nothing is left.
    status, answer = server.chat("Hello", max_tokens=5, ignore_eos=True)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5
    server.wait_idle()
    assert "Traceback" not in server.log


@pytest.fixture
def fuzzed(tiny_server: Server) -> Iterator[Server]:
    yield tiny_server


def test_two_hundred_odd_requests(fuzzed: Server) -> None:
    fuzz(fuzzed, 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_odd_requests(fuzzed: Server) -> None:
    fuzz(fuzzed, 2000)
