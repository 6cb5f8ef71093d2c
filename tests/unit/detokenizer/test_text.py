"""TextStream: whole characters, nothing lost, cut exactly before the first stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from detokenizer_proc.text import TextStream

BYTES = [bytes([value]) for value in range(256)]


def stream(data: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream, int]:
    """Feed one byte per token; returns the pieces, the stream, and how many tokens were used."""
    text = TextStream(BYTES, frozenset(), stops)
    pieces = []
    for index, token in enumerate(data):
        if text.push(token):
            pieces.append(text.take())
            return pieces, text, index + 1
        pieces.append(text.take())
    text.finish()
    pieces.append(text.take())
    return pieces, text, len(data)


@given(st.binary(max_size=60))
def test_pieces_join_to_the_decoded_bytes(data: bytes) -> None:
    pieces, _, _ = stream(data)
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(text: str) -> None:
    data = text.encode(errors="replace")
    pieces, _, _ = stream(data)
    assert "".join(pieces) == data.decode()
    assert all("�" not in piece or "�" in text for piece in pieces)


@given(st.text("abcß€", max_size=40), st.lists(st.text("abcß€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_cut_before_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, state, used = stream(text.encode(), tuple(stops))
    # The earliest end by token index wins; among matches that end together, the one that begins first.
    ends = [
        (len(text[: start + len(stop)].encode()), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not ends:
        assert "".join(pieces) == text
        assert state.matched is None
        return
    first_end, start = min(ends)
    assert used == first_end
    assert "".join(pieces) == text[:start]
    assert state.matched in stops


def test_nothing_of_a_stop_string_is_sent_before_it_is_decided() -> None:
    pieces, _, _ = stream(b"hello END", ("END",))
    assert "".join(pieces) == "hello "
    pieces, _, _ = stream(b"hello ENough", ("END",))
    assert "".join(pieces) == "hello ENough"
    pieces, _, _ = stream(b"hello EN", ("END",))
    assert "".join(pieces) == "hello EN"


def test_skipped_and_unknown_tokens_add_nothing() -> None:
    text = TextStream(BYTES, frozenset({65}), ())
    for token in (65, 66, 9999):
        assert not text.push(token)
    assert text.take() == "B"


def test_half_characters_are_sent_once_they_cannot_become_whole() -> None:
    text = TextStream(BYTES, frozenset(), ())
    seen = ""
    for _ in range(50):
        text.push(0xE2)
        seen += text.take()
    assert len(seen) >= 48


def test_a_stop_string_within_the_first_min_tokens_does_not_count() -> None:
    text = TextStream(BYTES, frozenset(), ("ab",), min_tokens=3)
    assert [text.push(token) for token in b"abxab"] == [False, False, False, False, True]
    assert text.take() == "abx"


def test_a_stop_string_does_not_match_across_the_end_of_the_first_min_tokens() -> None:
    text = TextStream(BYTES, frozenset(), ("ab",), min_tokens=1)
    assert [text.push(token) for token in b"abab"] == [False, False, False, True]
    assert text.take() == "ab"


def test_a_kept_stop_string_stays_in_the_text() -> None:
    text = TextStream(BYTES, frozenset(), ("<end>",), keep_stop=True)
    assert [text.push(token) for token in b"hi<end>"][-1]
    assert text.take() == "hi<end>"
    assert text.matched == "<end>"
