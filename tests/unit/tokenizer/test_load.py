from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine.errors import ModelFileError
from engine.model_files.resolve import resolve
from engine.tokenizer.load import load_tokenizer, tokenizer_from_path
from tests.support.gguf_writer import bpe_keys, write_gguf
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tests.unit.model_files.test_hf_config import BASE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path, 420)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"vocab_size": 420, "eos_token_id": [0, 5000]}))
    return tmp_path


def test_end_ids_of_config_and_tokenizer(model: Path) -> None:
    assert load_tokenizer(resolve(str(model), load_format="dummy")).eos_ids == (0, 2)


@pytest.mark.parametrize("vocab_size", [300, 420, 600])
def test_resized_stand_in(model: Path, tmp_path: Path, vocab_size: int) -> None:
    stand_in = write_gguf(tmp_path / "stand-in.gguf", keys=bpe_keys(model))
    files = msgspec.structs.replace(
        resolve(str(model), load_format="dummy", model_overrides={"vocab_size": vocab_size}),
        tokenizer_path=str(stand_in),
        tokenizer_vocab_size=vocab_size,
    )
    tokenizer = load_tokenizer(files)
    assert tokenizer.vocab_size == vocab_size
    text = "Hello, 世界!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ModelFileError, match=r"must end in \.json, \.model or \.gguf"):
        tokenizer_from_path(tmp_path / "vocab.txt")
    with pytest.raises(ModelFileError, match="no such tokenizer file"):
        tokenizer_from_path(tmp_path / "nothing.json")
