"""Answers are the same with trees of n-grams and with a corpus, and later branches are accepted."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, SpeculativeOptions
from engine.model_files.types import ModelFiles
from kernels.ngram import NgramCorpus, NgramSearch
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.corpus_index import index_corpus
from scheduler_proc.speculative.drafter import Drafter
from scheduler_proc.speculative.ngram import NgramDrafter
from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
from tests.support.matrix import Case, Reference, assert_same, cases, config, references, run_together
from tests.support.quick import quick_first
from tests.support.scheduler import Harness

TOKENS = 24
KINDS = ["branches", "corpus", "both"]


@pytest.fixture(scope="module")
def made(tiny: ModelFiles) -> list[Case]:
    """Their answers are of few kinds of tokens: they come back to what was there, and go on differently."""
    made = cases(tiny.config.vocab_size, [1, 17, 40, 64, 33, 90], TOKENS)
    for case in made:
        case.sampling["logit_bias"] = tuple((token, 100.0) for token in range(5, 9))
    return made


@pytest.fixture(scope="module")
def alone(tiny: ModelFiles, made: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return references(tmp_path_factory.mktemp("alone"), tiny, made)


def drafting(breadth: int, corpus: Path | None = None, **options: object) -> EngineConfig:
    speculative = SpeculativeOptions(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=8,
        speculative_adaptive=False,
        speculative_ngram_min_match_window_size=1,
        speculative_ngram_max_bfs_breadth=breadth,
        speculative_ngram_external_corpus_path=None if corpus is None else str(corpus),
    )
    return msgspec.structs.replace(config(**options), speculative=speculative)


class Watched:
    """Counts accepted nodes whose parent has an earlier child."""

    def __init__(self, drafter: Drafter) -> None:
        self.kv = drafter.kv
        self._drafter = drafter
        self.later_children = 0

    def join(self, joins: Joins) -> None:
        self._drafter.join(joins)

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        self._drafter.took(rows, tokens)

    def clear(self) -> None:
        self._drafter.clear()

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        return self._drafter.draft(rows, num_drafts, longest, limits)

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        parents = nodes.drafts.parents
        for row, count in enumerate(taken.counts.tolist()):
            for node in taken.way[row, 1 : max(count, 1)].tolist() if parents is not None else ():
                siblings = parents[row, : node - 1] == parents[row, node - 1]
                self.later_children += bool(siblings.any())
        self._drafter.verified(rows, nodes, taken)


def corpus_of(made: list[Case], alone: list[Reference], search: NgramSearch) -> NgramCorpus:
    """What is right is there once, what is wrong often twice."""
    rng, tokens = np.random.default_rng(1), []
    for case, reference in zip(made, alone, strict=True):
        text = [*case.prompt, *reference.tokens]
        for end in rng.integers(len(case.prompt), len(text), 6).tolist():
            tokens += 2 * [*text[max(end - 8, 0) : end], *rng.integers(3, 400, 4).tolist()]
        tokens += text
    return index_corpus(np.array(tokens, np.int32), search, torch.device("cpu"))


MATRIX = list(itertools.product([("cpu", 0), ("delayed", 1), ("delayed", 2)], [1, 16], [2, 4], KINDS))


@pytest.mark.parametrize(("where", "page_size", "breadth", "kind"), quick_first(MATRIX, {0, 5, 17, 26}))
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    where: tuple[str, int],
    page_size: int,
    breadth: int,
    kind: str,
) -> None:
    device, depth = where
    breadth = 1 if kind == "corpus" else breadth
    options = drafting(breadth, device=device, overlap_depth=depth, page_size=page_size, chunked_prefill_size=64)
    harness = Harness.of_model(tmp_path, options, tiny)
    assert isinstance(harness.device, CpuDevice | DelayedDevice)
    runner = harness.device._runner
    assert runner.verifier is not None
    search = NgramSearch(1, 8, breadth)
    corpus = None if kind == "branches" else corpus_of(made, alone, search)
    watched = Watched(NgramDrafter(runner.decoder.kernels, runner.slots, harness.slots.max_len, search, corpus))
    runner.verifier.drafter = watched
    assert_same(f"{where} {page_size} {breadth} {kind}", alone, run_together(harness, made, stagger=1))
    assert harness.workload.num_accepted > 5 and not harness.workload.audit()
    assert watched.later_children > {"branches": 5, "corpus": -1, "both": 0}[kind]


def test_a_corpus_from_a_file(tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    harness = Harness.of_model(tmp_path, drafting(2, path), tiny)
    assert_same("file", alone, run_together(harness, made))
    assert harness.workload.num_drafted > 0
