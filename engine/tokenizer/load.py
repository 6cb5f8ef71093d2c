"""load_tokenizer: ModelFiles -> Tokenizer."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.gguf_header import read_gguf_header
from engine.model_files.types import ModelFiles
from engine.tokenizer.base import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Build the tokenizer a model uses. Its eos_ids are the config's and the tokenizer's own together.

    Raises ModelFileError.
    """
    if files.tokenizer_vocab_size is not None:
        from engine.tokenizer.from_gguf import resized_tokenizer

        tokenizer = resized_tokenizer(read_gguf_header(files.tokenizer_path), files.tokenizer_vocab_size)
    else:
        tokenizer = tokenizer_from_path(Path(files.tokenizer_path))
    ids = dict.fromkeys((*files.config.eos_ids, *tokenizer.eos_ids))
    tokenizer.eos_ids = tuple(id for id in ids if 0 <= id < files.config.vocab_size)
    if tokenizer.bos_id is None and files.config.bos_id is not None:
        tokenizer.bos_id = files.config.bos_id if files.config.bos_id < tokenizer.vocab_size else None
    return tokenizer


def tokenizer_from_path(path: Path) -> Tokenizer:
    """Build from a directory, a tokenizer.json, a tokenizer.model or a .gguf file. Raises ModelFileError."""
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model")
        found = next((path / name for name in names if (path / name).is_file()), None)
        if found is None:
            raise ModelFileError(f"{path}: no {' or '.join(names)}")
        path = found
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such tokenizer file")
    if path.suffix == ".json":
        from engine.tokenizer.from_json import tokenizer_from_json

        return tokenizer_from_json(path)
    if path.suffix == ".gguf":
        from engine.tokenizer.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(read_gguf_header(path))
    if path.suffix == ".model":
        from engine.tokenizer.sentencepiece import tokenizer_from_model

        return tokenizer_from_model(path)
    raise ModelFileError(f"{path}: a tokenizer file must end in .json, .model or .gguf")
