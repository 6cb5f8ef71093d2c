"""The corpus that n-grams are looked up in beside the texts themselves: a file, as tokens."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from engine.errors import ConfigError
from engine.model_files.types import ModelFiles
from engine.tokenizer.load import load_tokenizer
from kernels.ngram import NgramCorpus, NgramSearch
from scheduler_proc.speculative.corpus_index import index_corpus

log = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
MAX_TOKENS = 4 << 20
_FLAG = "--speculative-ngram-external-corpus-path"
_PART = 64 << 10
"""Characters that are tokenised at a time: in parallel, and in a bounded memory."""


def check_corpus_file(path: Path) -> None:
    """What can be said of it before there is a model. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{_FLAG} {path}: there is no such file.")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ConfigError(f"{_FLAG} {path} has {size} bytes, more than {MAX_BYTES}.")


def load_corpus(path: Path, model: ModelFiles, search: NgramSearch, device: torch.device) -> NgramCorpus:
    """The file as the model's tokens, with what came after their n-grams. Raises ConfigError, ModelFileError."""
    begin = time.monotonic()
    tokens = read_corpus(path, model)
    corpus = index_corpus(tokens, search, device)
    size = sum(part.nbytes for part in (corpus.tokens, corpus.keys, corpus.places))
    log.info(
        "event=ngram_corpus seconds=%.1f tokens=%d ngrams=%d memory_mib=%d",
        time.monotonic() - begin,
        len(corpus.tokens),
        len(corpus.keys),
        size >> 20,
    )
    return corpus


def read_corpus(path: Path, model: ModelFiles) -> np.ndarray:
    """int32 [num_tokens]; special tokens are read as such. Raises ConfigError, ModelFileError."""
    check_corpus_file(path)
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path}: {error.strerror}.") from error
    parts = load_tokenizer(model).encode_batch(_parts(text), add_special_tokens=False)
    tokens = np.fromiter((token for part in parts for token in part), np.int64, sum(map(len, parts)))
    if not len(tokens):
        raise ConfigError(f"{_FLAG} {path} is empty.")
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"{_FLAG} {path} has {len(tokens)} tokens, more than {MAX_TOKENS}.")
    if tokens.max() >= model.config.vocab_size:
        raise ConfigError(f"{_FLAG} {path} has tokens that the model does not know ({tokens.max()}).")
    return tokens.astype(np.int32)


def _parts(text: str) -> list[str]:
    """Cut where a line ends, if it does in time."""
    parts, start = [], 0
    while start < len(text):
        end = start + _PART
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        parts.append(text[start:end])
        start = end
    return parts
