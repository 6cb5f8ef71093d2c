"""GPT-2's byte alphabet: each byte is one printable character of a vocabulary entry (public GPT-2 encoder)."""

from __future__ import annotations


def byte_alphabet() -> list[str]:
    """The character of each byte, [256]: itself where printable, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def byte_level_bytes(tokens: list[str]) -> list[bytes]:
    """The bytes of each entry of a byte-level vocabulary; an entry with a foreign character is its own UTF-8."""
    # Bytes pass through Latin-1, which maps U+0000..U+00FF to themselves; characters outside the alphabet are moved
    # out of Latin-1's reach, so that encoding fails for them and only for them.
    table: dict[int, int] = {code: 0x110000 - 1 - code for code in range(256)}
    table.update({ord(char): byte for byte, char in enumerate(byte_alphabet())})
    out: list[bytes] = []
    for token in tokens:
        try:
            out.append(token.translate(table).encode("latin-1"))
        except UnicodeEncodeError:
            out.append(token.encode())
    return out
