"""Streams: step outputs in, deltas, ends, stops and resends out."""

from __future__ import annotations

import numpy as np

from detokenizer_proc.streams import KEPT_DELTAS, UNSTREAMED_EVERY, Streams
from engine.errors import ErrorInfo
from engine.ipc.messages import (
    Drafted,
    Failed,
    Finish,
    FrontOutput,
    Logprobs,
    Opened,
    PromptLogprobs,
    Resend,
    Stamps,
    Started,
    StepOutput,
    Stop,
    TokenBatch,
    TokenLogprob,
    pack_i32,
    unpack_i32,
)

TABLE = [bytes([value]) for value in range(256)]


def opened(
    request: int, *, stop: tuple[str, ...] = (), stream: bool = True, output: str = "", attempt: int = 0
) -> Opened:
    return Opened(request, attempt, 0, stream, 7, stop, True, pack_i32(list(output.encode())), Stamps())


def step(
    *rows: tuple[int, int, str, Finish], opens: tuple[Opened, ...] = (), held: int = 0, attempt: int = 0
) -> StepOutput:
    """Rows of (request, first token, text of one-byte tokens, finish)."""
    tokens = [list(text.encode()) for _, _, text, _ in rows]
    batch = TokenBatch(
        np.array([row[0] for row in rows], "<u8").tobytes(),
        pack_i32([attempt] * len(rows)),
        pack_i32([row[1] for row in rows]),
        pack_i32([len(ids) for ids in tokens]),
        pack_i32([token for ids in tokens for token in ids]),
        bytes(row[3] for row in rows),
        bytes([held] * len(rows)),
    )
    return StepOutput(1, list(opens), [], batch, [], 0)


def one(streams: Streams) -> tuple[FrontOutput, list]:
    outputs, to_scheduler = streams.take()
    assert len(outputs) <= 1
    return (outputs[0][1] if outputs else FrontOutput(0, [], [], [], [])), to_scheduler


def make() -> Streams:
    return Streams(TABLE, frozenset({0}), 1)


def test_a_stream_is_accepted_flows_and_ends() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1),)))
    output, _ = one(streams)
    assert output.accepted[0].num_prompt_tokens == 7
    begun = step((1, 0, "a", Finish.NONE))
    begun.started = [Started(1, 0, 5, Stamps(first_token=9))]
    streams.absorb(begun)
    streams.absorb(step((1, 1, "bc", Finish.LENGTH)))
    output, to_scheduler = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "abc"
    (ended,) = output.ended
    assert (ended.finish, ended.num_tokens, ended.cached_tokens, ended.stamps.first_token) == (Finish.LENGTH, 3, 5, 9)
    assert to_scheduler == []
    assert len(streams) == 0


def test_a_stop_string_ends_the_text_and_tells_the_scheduler() -> None:
    streams = make()
    streams.absorb(step((1, 0, "xyEN", Finish.NONE), opens=(opened(1, stop=("END",)),)))
    streams.absorb(step((1, 4, "Dmore", Finish.NONE)))
    streams.absorb(step((1, 9, "late", Finish.NONE)))
    output, to_scheduler = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "xy"
    (ended,) = output.ended
    assert (ended.finish, ended.stop_reason, ended.num_tokens) == (Finish.STOP_STRING, "END", 5)
    assert to_scheduler == [Stop(1, 0, 5)]
    assert sum(len(unpack_i32(delta.token_ids)) for delta in output.deltas) == 5


def test_a_held_end_is_confirmed_and_held_text_comes_out() -> None:
    streams = make()
    streams.absorb(step((1, 0, "abEN", Finish.LENGTH), opens=(opened(1, stop=("END",)),), held=1))
    output, to_scheduler = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "abEN"
    assert output.ended[0].finish is Finish.LENGTH
    assert to_scheduler == [Stop(1, 0, 4)]


def test_the_earliest_end_wins_over_a_later_length() -> None:
    streams = make()
    streams.absorb(step((1, 0, "aENDb", Finish.LENGTH), opens=(opened(1, stop=("END",)),), held=1))
    output, to_scheduler = one(streams)
    assert output.ended[0].finish is Finish.STOP_STRING
    assert output.ended[0].num_tokens == 4
    assert to_scheduler == [Stop(1, 0, 4)]


def test_the_stop_token_is_counted_but_not_shown() -> None:
    streams = make()
    streams.absorb(step((1, 0, "ab!", Finish.STOP_TOKEN), opens=(opened(1),)))
    output, _ = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "ab"
    assert (output.ended[0].num_tokens, output.ended[0].stop_reason) == (3, ord("!"))


def test_doubled_tokens_are_dropped_and_a_gap_is_asked_for() -> None:
    streams = make()
    streams.absorb(step((1, 0, "abc", Finish.NONE), opens=(opened(1),)))
    streams.absorb(step((1, 1, "bcd", Finish.NONE)))
    streams.absorb(step((1, 6, "g", Finish.NONE)))
    output, to_scheduler = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "abcd"
    assert to_scheduler == [Resend(1, 0, 4)]
    streams.absorb(step((1, 4, "efg", Finish.LENGTH)))
    output, _ = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "efg"


def test_a_front_can_ask_again() -> None:
    streams = make()
    streams.absorb(step((1, 0, "ab", Finish.NONE), opens=(opened(1),)))
    streams.absorb(step((1, 2, "cd", Finish.NONE)))
    one(streams)
    streams.resend(Resend(1, 0, 2))
    output, _ = one(streams)
    assert [(delta.first_token, delta.text) for delta in output.deltas] == [(2, "cd")]


def test_what_is_no_longer_kept_cannot_be_sent_again_and_says_so() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1),)))
    for first in range(KEPT_DELTAS + 5):
        streams.absorb(step((1, first, "a", Finish.NONE)))
    one(streams)
    streams.resend(Resend(1, 0, 5))
    output, _ = one(streams)
    assert len(output.deltas) == KEPT_DELTAS
    streams.resend(Resend(1, 0, 4))
    output, _ = one(streams)
    assert [failed.request for failed in output.failed] == [1]
    assert len(streams) == 0


def test_a_resumed_request_goes_on_where_its_text_was() -> None:
    euro = "€".encode()
    streams = make()
    resumed = opened(1, stop=("END",), attempt=1)
    resumed.output_ids = pack_i32(list(b"xEN" + euro[:2]))
    streams.absorb(step((1, 5, "", Finish.NONE), opens=(resumed,), attempt=1))
    batch = step((1, 5, "?", Finish.NONE), attempt=1)
    batch.tokens.tokens = pack_i32([euro[2]])
    streams.absorb(batch)
    output, _ = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "EN€"
    assert output.deltas[0].first_token == 5


def test_output_of_an_earlier_attempt_is_ignored() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1, attempt=2),)))
    streams.absorb(step((1, 0, "old", Finish.NONE), attempt=1))
    output, _ = one(streams)
    assert output.deltas == []


def test_an_unstreamed_request_costs_few_messages() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1, stream=False),)))
    one(streams)
    deltas = 0
    for index in range(UNSTREAMED_EVERY * 2):
        streams.absorb(step((1, index, "a", Finish.NONE)))
        deltas += len(one(streams)[0].deltas)
    assert deltas == 2


def test_errors_reach_the_front_that_opened_the_request() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1),)))
    failing = step()
    failing.failed = [Failed(1, 0, -1, ErrorInfo(500, "internal_error", "x"))]
    streams.absorb(failing)
    output, _ = one(streams)
    assert output.failed[0].front == 0
    assert len(streams) == 0


def drafts_of_an_end(streams: Streams, *messages: StepOutput) -> tuple[int, int]:
    for message in messages:
        streams.absorb(message)
    (ended,) = one(streams)[0].ended
    return ended.accepted_drafts, ended.rejected_drafts


def drafting(message: StepOutput, *drafted: Drafted) -> StepOutput:
    message.drafted = list(drafted)
    return message


def test_an_end_tells_how_many_drafts_it_had() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1), opened(2))))
    last = drafting(step((1, 2, "cd", Finish.LENGTH)), Drafted(1, 0, 3, 2))
    assert drafts_of_an_end(streams, step((1, 0, "ab", Finish.NONE)), last) == (3, 2)
    assert drafts_of_an_end(streams, step((2, 0, "x", Finish.LENGTH))) == (0, 0)
    whole = drafting(step((3, 0, "abc", Finish.LENGTH), opens=(opened(3),)), Drafted(3, 0, 2, 1))
    assert drafts_of_an_end(streams, whole) == (2, 1)


def test_drafts_behind_a_stop_string_are_no_accepted_ones() -> None:
    streams = make()
    message = step((1, 0, "aENDbcd", Finish.LENGTH), opens=(opened(1, stop=("END",)),), held=1)
    assert drafts_of_an_end(streams, drafting(message, Drafted(1, 0, 6, 2))) == (4, 4)


def test_drafts_told_twice_early_late_or_of_another_attempt_do_no_harm() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1, attempt=1),)))
    # The end comes behind a gap, and once more when that is mended.
    late = drafting(step((1, 2, "cd", Finish.LENGTH), attempt=1), Drafted(1, 1, 3, 1))
    streams.absorb(late)
    assert one(streams)[1] == [Resend(1, 1, 0)]
    again = drafting(step((1, 0, "abcd", Finish.LENGTH), attempt=1), Drafted(1, 1, 3, 1), Drafted(1, 0, 9, 9))
    assert drafts_of_an_end(streams, again) == (3, 1)
    streams.absorb(late)
    streams.absorb(drafting(step(), Drafted(7, 0, 1, 1)))
    assert streams.take() == ([], [])


def test_a_character_cut_by_the_end_becomes_one_mark() -> None:
    streams = make()
    batch = step((1, 0, "abc", Finish.LENGTH), opens=(opened(1),))
    batch.tokens.tokens = pack_i32([97, *"€".encode()[:2]])
    streams.absorb(batch)
    output, _ = one(streams)
    assert "".join(delta.text for delta in output.deltas) == "a�"


def test_rows_meant_by_a_name_flow_on_and_a_lost_name_is_asked_for() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1), opened(2))))
    named = step((1, 0, "a", Finish.NONE), (2, 0, "x", Finish.NONE))
    named.tokens.rows = 4
    streams.absorb(named)
    streams.absorb(StepOutput(2, [], [], TokenBatch(tokens=pack_i32([ord("b"), ord("y")]), rows=4, ahead=1), [], 0))
    output, to_scheduler = one(streams)
    assert [(delta.request, delta.text) for delta in output.deltas] == [(1, "a"), (2, "x"), (1, "b"), (2, "y")]
    assert to_scheduler == []
    streams.absorb(StepOutput(3, [], [], TokenBatch(tokens=pack_i32([1, 1]), rows=5, ahead=0), [], 0))
    assert one(streams)[1] == [Resend(1, 0, 2), Resend(2, 0, 2)]


def logprobs(*chosen: float, width: int = 0) -> Logprobs:
    num = len(chosen)
    ids = np.tile(np.arange(97, 97 + width), num)
    tops = np.tile(-np.arange(1, width + 1), num)
    return Logprobs(width, np.array(chosen, "<f4").tobytes(), ids.astype("<i4").tobytes(), tops.astype("<f4").tobytes())


def test_logprobs_stay_with_their_tokens() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1), opened(2), opened(3, stream=False))))
    message = step((1, 0, "ab", Finish.NONE), (2, 0, "x", Finish.NONE), (3, 0, "q", Finish.NONE))
    message.tokens.logprobs = [(0, logprobs(-0.5, -0.25, width=2)), (2, logprobs(-4.0))]
    streams.absorb(message)
    message = step((3, 1, "r", Finish.LENGTH))
    message.tokens.logprobs = [(0, logprobs(-8.0))]
    streams.absorb(message)
    output, _ = one(streams)
    first, second, third = output.deltas
    assert first.logprobs == [
        TokenLogprob(ord("a"), -0.5, b"a", [(97, -1.0, b"a"), (98, -2.0, b"b")]),
        TokenLogprob(ord("b"), -0.25, b"b", [(97, -1.0, b"a"), (98, -2.0, b"b")]),
    ]
    assert second.logprobs is None
    assert third.logprobs == [TokenLogprob(ord("q"), -4.0, b"q", []), TokenLogprob(ord("r"), -8.0, b"r", [])]


def test_what_comes_twice_has_its_logprobs_once_and_a_stop_string_ends_them() -> None:
    streams = make()
    streams.absorb(step(opens=(opened(1, stop=("cd",)),)))
    for first, text in ((0, "ab"), (1, "bcde")):
        message = step((1, first, text, Finish.NONE))
        message.tokens.logprobs = [(0, logprobs(*(-float(first + i) - 1 for i in range(len(text)))))]
        streams.absorb(message)
    output, _ = one(streams)
    scored = [token for delta in output.deltas for token in delta.logprobs or ()]
    assert [(chr(token.id), token.logprob) for token in scored] == [("a", -1), ("b", -2), ("c", -3), ("d", -4)]
    assert output.ended[0].num_tokens == 4


def test_a_prompt_is_scored_and_echoed_before_its_answer() -> None:
    streams = make()
    asked = opened(1)
    asked.echo = pack_i32(list("häh".encode()))
    message = step((1, 0, "a", Finish.LENGTH), opens=(asked,))
    message.prompts = [
        PromptLogprobs(1, 0, 0, pack_i32([ord("h")]), logprobs(float("nan"))),
        PromptLogprobs(1, 0, 1, pack_i32([195, 164, ord("h")]), logprobs(-1.0, -2.0, -3.0)),
        PromptLogprobs(7, 0, 1, pack_i32([1]), logprobs(-1.0)),
    ]
    streams.absorb(message)
    output, _ = one(streams)
    assert output.accepted[0].prompt_text == "häh"
    scored = [token for prompt in output.prompts for token in prompt.logprobs]
    assert [(token.bytes, token.logprob) for token in scored] == [
        (b"h", None),
        (b"\xc3", -1),
        (b"\xa4", -2),
        (b"h", -3),
    ]
