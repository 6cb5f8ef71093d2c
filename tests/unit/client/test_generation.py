"""One request seen from a face: merged pieces, prompt logprobs, readers that do not read."""

from __future__ import annotations

import asyncio

from engine.generation import MOST_UNREAD_BYTES, MOST_UNREAD_S, Delta, Generation
from engine.ipc.messages import Ended, Finish, Stamps, TextDelta, TokenLogprob, pack_i32


def make() -> Generation:
    return Generation(1, 0, "label", lambda _: None)


def delta(first: int, text: str, *, scored: bool = False) -> TextDelta:
    ids = list(text.encode())
    logprobs = [TokenLogprob(token, -1.0, bytes([token]), []) for token in ids] if scored else None
    return TextDelta(1, 0, first, pack_i32(ids), text, logprobs)


def ended(num_tokens: int) -> Ended:
    return Ended(1, 0, Finish.LENGTH, None, 3, num_tokens, 0, Stamps())


async def collect(generation: Generation) -> list[Delta]:
    return [piece async for piece in generation]


def test_pieces_that_nobody_took_are_merged_with_their_logprobs() -> None:
    async def run() -> list[Delta]:
        generation = make()
        generation.on_accepted(3, "the prompt")
        generation.on_delta(delta(0, "ab", scored=True))
        generation.on_delta(delta(2, "c", scored=True))
        generation.on_delta(delta(2, "c", scored=True))  # came twice
        generation.on_ended(ended(3))
        assert await generation.accepted() == 3
        assert generation.prompt_text == "the prompt"
        return await collect(generation)

    (piece,) = asyncio.run(run())
    assert (piece.text, piece.token_ids) == ("abc", [97, 98, 99])
    assert [token.id for token in piece.logprobs] == [97, 98, 99]


def test_prompt_logprobs_that_come_twice_stand_there_once() -> None:
    generation = make()
    tokens = [TokenLogprob(token, None, b"", []) for token in range(6)]
    generation.on_prompt(2, tokens[2:4])
    generation.on_prompt(4, tokens[4:5])
    generation.on_prompt(3, tokens[3:6])
    assert [token.id for token in generation.prompt_logprobs] == [2, 3, 4, 5]


def test_too_much_unread_is_noticed_and_reading_resets_it() -> None:
    generation = make()
    half = delta(0, "x" * (MOST_UNREAD_BYTES // 10))

    async def read() -> None:
        async for _ in generation:
            break

    generation.on_delta(half)
    for _ in range(9):
        assert not generation.unread_too_much(half, 0.0)  # nobody has begun to read
    asyncio.run(read())
    num = 0
    while not generation.unread_too_much(half, 1.0):
        num += 1
    # Ids count four bytes each beside the text.
    assert num == 2


def test_output_that_waits_too_long_is_noticed() -> None:
    generation = make()
    generation.on_delta(delta(0, "z"))

    async def read() -> None:
        async for _ in generation:
            break

    asyncio.run(read())
    assert not generation.unread_too_much(delta(0, "a"), 100.0)
    assert not generation.unread_too_much(delta(1, "b"), 100.0 + MOST_UNREAD_S)
    assert generation.unread_too_much(delta(2, "c"), 101.0 + MOST_UNREAD_S)


def test_the_end_stops_the_clock() -> None:
    async def run() -> bool:
        generation = make()
        generation.deadline = asyncio.get_running_loop().call_later(60, lambda: None)
        timer = generation.deadline
        generation.on_ended(ended(0))
        return timer.cancelled()

    assert asyncio.run(run())


def test_a_burst_before_the_reader_has_its_turn_is_not_held_against_it() -> None:
    async def run() -> int:
        generation = make()
        generation.on_accepted(1)
        task = asyncio.create_task(collect(generation))
        await asyncio.sleep(0)
        num = 0
        for number in range(40):
            piece = delta(10_000 * number, "x" * 10_000)
            generation.on_delta(piece)
            assert not generation.unread_too_much(piece, 1000.0 * number)
            num += 10_000
        generation.on_ended(ended(num))
        return sum(len(piece.text) for piece in await task)

    assert asyncio.run(run()) == 400_000
