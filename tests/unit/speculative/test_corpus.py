"""The corpus of n-grams: files that are none, and what is known of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, SpeculativeOptions
from engine.errors import ConfigError
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from engine.tokenizer.load import load_tokenizer
from kernels.ngram import NgramSearch, ngram_key
from scheduler_proc.settle import settle
from scheduler_proc.speculative import corpus
from scheduler_proc.speculative.corpus import load_corpus, read_corpus
from scheduler_proc.speculative.corpus_index import index_corpus
from tests.support.tiny_models import write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path_factory.mktemp("tiny"))))


def configured(path: Path, algorithm: str | None = "NGRAM") -> EngineConfig:
    options = SpeculativeOptions(
        speculative_algorithm=algorithm,  # type: ignore[arg-type]
        speculative_ngram_external_corpus_path=str(path),
    )
    return EngineConfig(speculative=options)


def test_files_that_cannot_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.txt"
    for wrong in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"--speculative-ngram-external-corpus-path .*: there is no such file"):
            settle(configured(wrong))
    path.write_text("text")
    settle(configured(path))
    with pytest.raises(ConfigError, match=r"corpus-path needs --speculative-algorithm NGRAM"):
        settle(configured(path, None))
    monkeypatch.setattr(corpus, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match="has 4 bytes, more than 3"):
        settle(configured(path))


def test_texts_that_cannot_be_one(tmp_path: Path, model: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.txt"
    for content, said in ((b"", "is empty"), (b"ab\xff", r"is not UTF-8: invalid start byte at byte 2")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_corpus(path, model)
    path.write_text("one two three four")
    monkeypatch.setattr(corpus, "MAX_TOKENS", 1)
    with pytest.raises(ConfigError, match="tokens, more than 1"):
        read_corpus(path, model)


def test_a_file_is_the_models_tokens(
    tmp_path: Path, model: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, text = tmp_path / "corpus.txt", "".join(f"line {number} says hello\n" for number in range(40)) + "x" * 200
    path.write_text(text)
    tokenizer = load_tokenizer(model)
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert read_corpus(path, model).tolist() == whole
    monkeypatch.setattr(corpus, "_PART", 64)
    assert tokenizer.decode(read_corpus(path, model).tolist()) == text
    assert "".join(corpus._parts(text)) == text and max(map(len, corpus._parts(text))) <= 64
    monkeypatch.undo()
    with caplog.at_level("INFO"):
        known = load_corpus(path, model, NgramSearch(2, 4, 3), CPU)
    assert known.tokens.tolist() == whole and f"tokens={len(whole)} ngrams={len(known.keys)}" in caplog.text


@pytest.mark.parametrize("branches", [1, 3])
def test_what_is_known(branches: int) -> None:
    tokens = np.random.default_rng(branches).integers(0, 4, 300).astype(np.int32)
    known = index_corpus(tokens, NgramSearch(2, 5, branches), CPU)
    assert known.keys.dtype == torch.int64 and bool((known.keys.diff() > 0).all())
    ngrams = {tuple(tokens[end - n : end]) for n in range(2, 6) for end in range(n, 300)}
    assert len(known.keys) == len(known.places) == len(ngrams) and known.places.shape[1] == branches
    for ngram in ngrams:
        at = int(torch.searchsorted(known.keys, ngram_key(torch.tensor(ngram[::-1]))))
        places = [place for place in known.places[at].tolist() if place >= 0]
        assert places
        for place in places:
            assert tuple(tokens[place - len(ngram) + 1 : place + 1]) == ngram
        assert len({tokens[place + 1] for place in places}) == len(places)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_corpus_that_is_shorter_than_a_match(num_tokens: int) -> None:
    known = index_corpus(np.arange(num_tokens, dtype=np.int32), NgramSearch(3, 8, 2), CPU)
    assert known.keys.tolist() == [0] and known.places.tolist() == [[-1, -1]]
