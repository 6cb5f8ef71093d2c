"""The default model's own tokenizer, against transformers' reading of the same file."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from engine.model_files.gguf_header import read_gguf_header
from engine.model_files.resolve import resolve
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.chat import encode_chat
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.load import load_tokenizer
from tests.support.tiny_tokenizer_texts import TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(None))


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    path = Path(resolve(None).path)
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_ids_agree_with_transformers(tokenizer: Tokenizer, reference) -> None:
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "1234 5 678"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(id) for id in ids) == text.encode()
        assert ids == reference.encode(text, add_special_tokens=False)


def test_bytes_of_random_ids_decode_like_transformers(tokenizer: Tokenizer, reference) -> None:
    random.seed(1)
    for _ in range(200):
        ids = [random.randrange(tokenizer.vocab_size) for _ in range(40)]
        expected = reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert b"".join(tokenizer.token_bytes(id) for id in ids).decode(errors="replace") == expected


def test_chat(tokenizer: Tokenizer, reference) -> None:
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}] * 2
    text = template.render(messages)
    expected = reference.apply_chat_template(
        messages, chat_template=tokenizer.chat_template, tokenize=False, add_generation_prompt=True
    )
    assert text == expected
    assert encode_chat(tokenizer, template, messages) == reference.encode(text, add_special_tokens=False)


def test_start_is_quick() -> None:
    path = resolve(None).path
    header_s = min(_seconds(lambda: read_gguf_header(path)) for _ in range(3))
    tokenizer = load_tokenizer(resolve(None))
    assert header_s < 0.15
    assert _seconds(tokenizer.token_table) < 0.3


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
