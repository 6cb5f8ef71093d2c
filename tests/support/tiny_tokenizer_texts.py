"""Texts that tokenizers trip over: joined emoji, CJK, combining accents, code, odd white space."""

from __future__ import annotations

TEXTS = (
    "",
    " ",
    "  two  spaces  ",
    "Hello, world! It's 2024 and I'm 1234567 years old.",
    "naïve café — Zürich, “quotes” … fin",
    "cafe\u0301 a\u0308 o\u0302\u0323",
    "日本語とEnglishの混在。你好，世界！ 한국어 텍스트",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs, 😀😀",
    "def f(x: int) -> int:\n\treturn x ** 2  # comment\n\n\nclass A:\n    pass\r\n",
    "\n\n\n   \n\t\t\n end",
    "العربية עברית हिन्दी ไทย",
    "DON'T SHOUT; we'll they've I'd",
    "x=1;y=[1,2,3];print(f'{x!r:>10}')$+<>^`|~",
    "\x00\x01\x7f control \u200b zero width \ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 🂡",
)
