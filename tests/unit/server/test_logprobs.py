"""Logprobs on the wire: one entry a token, in both modes, on both routes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.ipc.messages import Finish, TokenLogprob
from engine.server.openai.logprobs import ChatLogprobWriter, TextLogprobWriter
from tests.support.fake_client import FakeClient, Script
from tests.unit.server.support import HELLO, Http, complete, joined, plain, post, read_events


def token(
    data: str | bytes, *tops: tuple[int, float, bytes], id: int = 5, logprob: float | None = -0.5
) -> TokenLogprob:
    return TokenLogprob(id, logprob, data if isinstance(data, bytes) else data.encode(), list(tops))


END = token("<|end|>", (2, -0.1, b"<|end|>"), id=2)
TWO = ((7, -0.25, b"Hel"), (8, -1.5, b"\xe2\x82"))


def offsets(pieces: list[bytes], prompt: str = "", num_prompt_tokens: int = 0) -> list[int]:
    writer = TextLogprobWriter()
    if prompt:
        writer.begin(prompt, num_prompt_tokens)
    # Token by token, as a stream may have it.
    return [offset for piece in pieces for offset in writer.render([token(piece)]).text_offset]


def script(**changes: Any) -> Script:
    """ "Hel", nothing yet, "lo€" and the end token."""
    values = {
        "texts": ["Hel", "", "lo€", ""],
        "logprobs": [[token("Hel", *TWO, id=7)], [token(b"lo\xe2", *TWO)], [token(b"\x82\xac", *TWO)], [END]],
        "finish": Finish.STOP_TOKEN,
        "stop_reason": 2,
    }
    return Script(**{**values, **changes})


async def test_chat_entries(http: Http, fake: FakeClient) -> None:
    fake.script = script()
    body = await (await post(http, {**HELLO, "logprobs": True, "top_logprobs": 2})).json()
    assert fake.asked[0].sampling.logprobs == 2
    assert fake.asked[0].sampling.prompt_logprobs_from == -1
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"content", "refusal"}
    tops = [
        {"token": "Hel", "bytes": [72, 101, 108], "logprob": -0.25},
        {"token": "\ufffd", "bytes": [0xE2, 0x82], "logprob": -1.5},
    ]
    assert logprobs["content"][0] == {"token": "Hel", "bytes": [72, 101, 108], "logprob": -0.5, "top_logprobs": tops}
    assert [entry["token"] for entry in logprobs["content"]] == ["Hel", "lo\ufffd", "\ufffd\ufffd"]
    joined_bytes = bytes(byte for entry in logprobs["content"] for byte in entry["bytes"])
    assert joined_bytes.decode() == choice["message"]["content"] == "Hello€"
    # The end token counts, and has no entry: its text is not shown either.
    assert body["usage"]["completion_tokens"] == len(logprobs["content"]) + 1


async def test_without_alternatives(http: Http, fake: FakeClient) -> None:
    fake.script = Script(texts=["a"], logprobs=[[token("a")]], finish=Finish.LENGTH, stop_reason=None)
    body = await (await post(http, {**HELLO, "logprobs": True})).json()
    assert fake.asked[0].sampling.logprobs == 0
    assert [entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"]] == [[]]
    body = await (await complete(http, {"prompt": "x", "logprobs": 0})).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize("value", [None, False])
async def test_chat_without_logprobs(http: Http, fake: FakeClient, value: bool | None) -> None:
    body = await (await post(http, {**HELLO, "logprobs": value, "top_logprobs": None})).json()
    assert fake.asked[0].sampling.logprobs == -1
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("route", [post, complete])
async def test_the_stream_equals_the_plain_answer(http: Http, fake: FakeClient, route: Any) -> None:
    more = {"logprobs": True, "top_logprobs": 2, **HELLO} if route is post else {"logprobs": 2, "prompt": "x"}
    for one in (
        script(),
        script(finish=Finish.LENGTH, stop_reason=None),
        script(texts=["a"], logprobs=[[token("a"), token("b"), END]]),
        script(texts=["a\n", "b"], logprobs=[[token("a")], [token("\nb"), token(" END")]], stop_reason=" END"),
    ):
        fake.script = one
        whole = await (await route(http, more)).json()
        events = await read_events(await route(http, {**more, "stream": True}))
        assert joined(events) == plain(whole)


@pytest.mark.parametrize("route", [post, complete])
async def test_nothing_but_the_end_token(http: Http, fake: FakeClient, route: Any) -> None:
    more = {"logprobs": True, **HELLO} if route is post else {"logprobs": 0, "prompt": "x"}
    fake.script = Script(texts=[""], logprobs=[[END]])
    (choice,) = (await (await route(http, more)).json())["choices"]
    lists = [value for value in choice["logprobs"].values() if value is not None]
    assert lists == [[]] * len(lists)
    (choice,) = joined(await read_events(await route(http, {**more, "stream": True})))
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


async def test_an_end_token_that_ended_nothing_has_its_entry(http: Http, fake: FakeClient) -> None:
    fake.script = script(finish=Finish.LENGTH, stop_reason=None)
    body = await (await post(http, {**HELLO, "logprobs": True, "ignore_eos": True})).json()
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]][-1] == "<|end|>"
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]


async def test_tokens_without_text_have_their_chunk(http: Http, fake: FakeClient) -> None:
    fake.script = script()
    events = await read_events(await post(http, {**HELLO, "logprobs": True, "stream": True}))
    choices = [event["choices"][0] for event in events[1:-2]]
    assert [choice["delta"] for choice in choices] == [{"content": "Hel"}, {"content": ""}, {"content": "lo€"}]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [1, 1, 1]
    # Without logprobs there is nothing to say while there is no text.
    fake.script.logprobs = []
    events = await read_events(await post(http, {**HELLO, "stream": True}))
    assert [event["choices"][0]["delta"] for event in events[1:-2]] == [{"content": "Hel"}, {"content": "lo€"}]


def test_minus_infinity_is_a_number() -> None:
    low = token("a", (5, -math.inf, b"a"), (6, -1e30, b"b"), logprob=-math.inf)
    (entry,) = ChatLogprobWriter().render([low]).content
    assert [entry.logprob, *(top.logprob for top in entry.top_logprobs)] == [-9999.0] * 3
    shown = TextLogprobWriter().render([low])
    assert (shown.token_logprobs, shown.top_logprobs) == ([-9999.0], [{"a": -9999.0, "b": -9999.0}])


async def test_strict_json(http: Http, fake: FakeClient) -> None:
    low = token("a", (5, -math.inf, b"a"), logprob=-math.inf)
    fake.script = Script(texts=["a"], logprobs=[[low]])
    for response in (
        await post(http, {**HELLO, "logprobs": True, "top_logprobs": 1}),
        await complete(http, {"prompt": "x", "logprobs": 1}),
    ):
        json.loads(await response.text(), parse_constant=pytest.fail)


def test_alternatives_that_read_the_same() -> None:
    entry = token(b"\xe2", (1, -0.1, b"\x82"), (2, -0.2, b"\xe2"), (3, -0.3, b"x"), id=2, logprob=-0.2)
    (found,) = TextLogprobWriter().render([entry]).top_logprobs
    assert found == {"\ufffd": -0.1, "x": -0.3}
    (chat,) = ChatLogprobWriter().render([entry]).content
    assert [top.bytes for top in chat.top_logprobs] == [[0x82], [0xE2], [ord("x")]]


def test_the_token_itself_is_among_the_alternatives() -> None:
    (found,) = TextLogprobWriter().render([token("z", (1, -0.1, b"a"), id=9, logprob=-4.0)]).top_logprobs
    assert found == {"a": -0.1, "z": -4.0}


def test_offsets_are_characters() -> None:
    assert offsets([b"Hel", "lö".encode(), b" w", "€".encode(), b"x"]) == [0, 3, 5, 7, 8]


def test_offsets_of_characters_in_pieces() -> None:
    euro, face = "€".encode(), "😀".encode()
    # Each piece of a character stands where the character begins.
    assert offsets([b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"c"]) == [0, 1, 1, 1, 3]
    assert offsets([face[:2], face[2:], b"x"]) == [0, 0, 1]
    # A piece that is never completed becomes one mark, and the next token stands after it.
    assert offsets([b"a", euro[:2], b"b", b"c"]) == [0, 1, 2, 3]
    assert offsets([euro[:2], euro[:1], euro[1:]]) == [0, 1, 1]
    assert offsets([b"\x82", b"\x82", b"a"]) == [0, 1, 2]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"a", b"\xe2\x82", b"\xac\xf0", b"\x9f", b"b", b"\x80\x80", b"", b"c\xc3", b"\xa9", b"\xe2", b"\xe2\x82\xacz"],
        ["😀é".encode()[i : i + 1] for i in range(6)] + [b"!"],
    ],
)
def test_whole_tokens_stand_at_their_offsets(pieces: list[bytes]) -> None:
    text = b"".join(pieces).decode("utf-8", "replace")
    for piece, offset in zip(pieces, offsets(pieces), strict=True):
        shown = piece.decode("utf-8", "replace")
        assert "\ufffd" in shown or text.startswith(shown, offset)


def test_offsets_with_a_prompt() -> None:
    assert offsets([b"The", b" fox", b" ran"], "The fox", 2) == [0, 3, 7]
    # A start token is not in the text.
    assert offsets([b"<s>", b"The", b" fox", b" ran"], "The fox", 3) == [0, 0, 3, 7]
    # Some tokenizers begin with a blank of their own.
    assert offsets([b" The", b" fox", b" ran"], "The fox", 2) == [0, 3, 7]
    # The tokens say less than the text (a normalized prompt): what follows is right again.
    assert offsets([b"a", b" b", b"c", b"!"], "a  b  c", 3) == [0, 2, 6, 7]
    # Half a character at the prompt's end has nothing to do with the answer.
    assert offsets([b"a", b"\xe2", b"\x82"], "a\ufffd", 2) == [0, 1, 2]


def test_a_prompt_without_logprobs_of_its_own() -> None:
    assert offsets([b"b"], "Hello", 0) == [5]


def test_offsets_of_a_broken_prompt_never_go_back() -> None:
    data = [b"\x81", b"\xa5", b"\xfb", b"\xa1", b"\xfc", b"ok"]
    writer = TextLogprobWriter()
    writer.begin(b"".join(data).decode(errors="replace"), len(data))
    shown = writer.render([TokenLogprob(idx, -1.0, piece, []) for idx, piece in enumerate(data)])
    assert shown.text_offset == sorted(shown.text_offset)
    assert shown.text_offset[-1] == 5
