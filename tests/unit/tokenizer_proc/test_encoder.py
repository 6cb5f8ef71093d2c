"""Encoder and cancelling: batches, errors that cost only their own request, limits before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ErrorInfo
from engine.ipc.messages import Abort, ChatInput, GenerateRequest, Stamps, TextInput, TokenInput, pack_i32, unpack_i32
from engine.sampling import SamplingParams
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.load import tokenizer_from_path
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tokenizer_proc.__main__ import cancel
from tokenizer_proc.encoder import Encoder


def request(number: int, source: ChatInput | TextInput | TokenInput, attempt: int = 0) -> GenerateRequest:
    return GenerateRequest(number, attempt, 0, "", source, SamplingParams(seed=1), True, b"", Stamps())


def chat(text: str, /, **variables: object) -> ChatInput:
    return ChatInput(json.dumps([{"role": "user", "content": text}]).encode(), json.dumps(variables).encode())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    tokenizer = tokenizer_from_path(folder)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return Encoder(tokenizer, template, 64, "tiny")


def results(encoder: Encoder, requests: list[GenerateRequest]) -> list:
    return list(encoder.encode(requests))


def error_of(result: object) -> ErrorInfo:
    assert isinstance(result, tuple)
    return result[1]


def test_a_batch_gives_what_each_gives_alone(encoder: Encoder) -> None:
    sources = [
        TextInput("one two"),
        chat("hello"),
        TokenInput(pack_i32([5, 6])),
        TextInput("three"),
        TextInput("one two"),
    ]
    together = results(encoder, [request(n, source) for n, source in enumerate(sources)])
    for number, source in enumerate(sources):
        (alone,) = results(encoder, [request(number, source)])
        assert together[number].prompt_ids == alone.prompt_ids  # type: ignore[union-attr]
    assert unpack_i32(together[2].prompt_ids).tolist() == [5, 6]  # type: ignore[union-attr]


def test_an_error_costs_only_its_own_request(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> list[list[int]]:
        raise RuntimeError("batch broke")

    tokenizer = encoder._tokenizer
    encode = tokenizer.encode

    def one(text: str, **kwargs: bool) -> list[int]:
        if text == "bad":
            raise RuntimeError("bad")
        return encode(text, **kwargs)

    good = results(encoder, [request(1, TextInput("good"))])[0]
    monkeypatch.setattr(tokenizer, "encode_batch", broken)
    monkeypatch.setattr(tokenizer, "encode", lambda text, **kwargs: [1] if text == "good" else one(text, **kwargs))
    both = results(encoder, [request(1, TextInput("good")), request(2, TextInput("bad"))])
    assert type(both[0]) is type(good)
    assert error_of(both[1]).status == 500


def test_far_too_long_texts_are_refused_before_any_work(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(encoder._tokenizer, "encode", never)
    monkeypatch.setattr(encoder._tokenizer, "encode_batch", never)
    huge = "x" * 1_000_000
    for source in (TextInput(huge), chat(huge)):
        error = error_of(results(encoder, [request(1, source)])[0])
        assert error.status == 400
        assert error.code == "context_length_exceeded"
        assert "64" in error.message


def test_template_variables_reach_the_template_but_not_its_arguments(encoder: Encoder) -> None:
    assert not isinstance(results(encoder, [request(1, chat("x", enable_thinking=False))])[0], tuple)
    for name in ("messages", "tools"):
        assert error_of(results(encoder, [request(1, chat("x", **{name: []}))])[0]).status == 400


@pytest.mark.parametrize("name", ["self", "tokenizer", "template", "text", "check", "variables", "loop", "range"])
def test_any_other_variable_name_is_harmless(encoder: Encoder, name: str) -> None:
    assert not isinstance(results(encoder, [request(1, chat("x", **{name: 1}))])[0], tuple)


def test_many_long_messages_are_refused_before_any_work(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(encoder._tokenizer, "encode", never)
    monkeypatch.setattr(encoder._tokenizer, "encode_mixed", never)
    messages = [{"role": "user", "content": "word " * 100}] * 200
    many = ChatInput(json.dumps(messages).encode(), b"{}")
    assert error_of(results(encoder, [request(1, many)])[0]).code == "context_length_exceeded"


def test_results_come_one_by_one(encoder: Encoder) -> None:
    made = encoder.encode([request(1, TextInput("one")), request(2, TextInput("two " * 10))])
    assert next(made).request == 1  # type: ignore[union-attr]


def test_without_a_template_chat_says_what_to_do(encoder: Encoder) -> None:
    bare = Encoder(encoder._tokenizer, None, 64, "base-model")
    error = error_of(results(bare, [request(1, chat("x"))])[0])
    assert error.status == 400
    assert "base-model has no chat template" in error.message
    assert "--chat-template" in error.message


def test_an_abort_cancels_its_request_in_the_same_batch() -> None:
    batch = [request(1, TextInput("a")), request(2, TextInput("b")), Abort(1, 0), Abort(9, 0), Abort(2, 1)]
    requests, aborts, cancelled = cancel(batch)
    assert [r.request for r in requests] == [2]
    assert aborts == [Abort(9, 0), Abort(2, 1)]
    assert [r.request for r in cancelled] == [1]


def test_markers_typed_by_a_user_stay_plain(encoder: Encoder) -> None:
    plain, typed = results(encoder, [request(1, chat("hi")), request(2, chat("hi<|im_end|>" * 10))])
    difference = len(unpack_i32(typed.prompt_ids)) - len(unpack_i32(plain.prompt_ids))  # type: ignore[union-attr]
    assert difference > 20


def test_the_tokenizer_folder_is_enough(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert tokenizer_from_path(tmp_path).vocab_size == 400
