"""Answers are read right however they are cut, framed and worded."""

from __future__ import annotations

import json

import pytest

from engine.bench.events import AnswerReader, Counts
from engine.bench.job import Endpoint

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def _event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _text(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "logprobs": None}], **more}


def _delta(**delta: object) -> dict[str, object]:
    return {"choices": [{"delta": delta}], "usage": None}


STREAM = b"".join(
    [
        b": keep-alive\n\n",
        _event(_text("", usage=None)),
        _event(_text('a "text": "b"\n\n \\', usage=None)),
        _event(_text('"error": {"usage": {', usage=None)),
        _event({"choices": [], "usage": USAGE}),
        b"data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_every_cut_reads_the_same(size: int, newline: bytes) -> None:
    data, reader = STREAM.replace(b"\n", newline), AnswerReader("completions")
    brought = [reader.feed(data[start : start + size]) for start in range(0, len(data), size)]
    assert reader.num_chunks == 2 and sum(brought) == min(2, len(brought))
    assert reader.done and reader.error is None
    assert reader.counts() == Counts(5, 2, 4)


@pytest.mark.parametrize(
    ("payload", "brings"),
    [
        (_delta(role="assistant", content=""), False),
        (_delta(content="x"), True),
        (_delta(content=" "), True),
        (_delta(content=None), False),
        (_delta(), False),
        (_delta(reasoning_content="hm"), True),
        (_delta(tool_calls=[{"function": {"name": "f", "arguments": '{"a'}}]), True),
        ({"choices": [{"delta": {"content": ""}, "logprobs": {"content": [{"token": "x"}]}}]}, False),
        (_text("content"), True),
    ],
)
def test_what_counts_as_text(payload: object, brings: bool) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        event = b"data:" + json.dumps(payload, separators=separators).encode() + b"\n\n"
        assert AnswerReader("chat").feed(event) is brings


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_event({"error": {"message": "out of memory", "code": 500}}), "out of memory"),
        (_event({"error": "plain"}), "plain"),
        (b"event: error\ndata: gone\n\n", "gone"),
        (b'event: error\r\ndata: {"message": "gone"}\r\n\r\n', "gone"),
        (_event({"error": {"code": 7}}), '{"code": 7}'),
    ],
)
def test_errors_inside_a_stream(data: bytes, message: str) -> None:
    reader = AnswerReader("completions")
    assert not reader.feed(data)
    assert reader.error == message


def test_fields_and_lines_of_one_event_are_put_together() -> None:
    reader = AnswerReader("completions")
    assert reader.feed(b'id: 3\nevent: message\ndata: {"choices":\ndata: [{"text": "x"}]}\n\n')
    assert not reader.feed(_event({"error": None, "choices": []})) and reader.error is None


def _whole(text: str, count: int, finish: object = None) -> dict[str, object]:
    return {"text": text, "meta_info": {"prompt_tokens": 9, "completion_tokens": count, "finish_reason": finish}}


def test_generate_tells_all_so_far() -> None:
    reader = AnswerReader("generate")
    told = [_whole("", 1), _whole('a"', 2), _whole('a"', 3), _whole('a" "abort"', 4), _whole('a" "abort"', 4)]
    assert [reader.feed(_event(payload)) for payload in told] == [False, True, False, True, False]
    assert reader.counts() == Counts(9, 4, 0) and reader.error is None
    reader.feed(_event(_whole("a", 4, {"type": "abort", "message": "by its rid"})))
    assert reader.error == "by its rid"


@pytest.mark.parametrize("endpoint", ["completions", "generate"])
def test_missing_and_broken_counts(endpoint: Endpoint) -> None:
    reader = AnswerReader(endpoint)
    reader.feed(_event(_text("x", usage=None)))
    assert reader.counts() is None
    for told in ({"prompt_tokens": 3}, {"prompt_tokens": 3, "completion_tokens": None}):
        reader.feed(_event({"usage": told, "meta_info": told}))
        with pytest.raises(ValueError, match="tokens"):
            reader.counts()
