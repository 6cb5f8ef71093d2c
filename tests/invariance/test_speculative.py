"""Answers are the same with drafts as without: greedy and seeded, whatever drafts, and how many."""

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
from kernels.speculative import Drafts
from scheduler_proc.plan import Joins
from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
from scheduler_proc.worker.model_runner import ModelRunner
from tests.support.matrix import Case, Reference, assert_same, cases, config, references, run_together
from tests.support.scheduler import Harness

LENGTHS = [1, 2, 15, 16, 17, 31, 40, 64, 65, 90, 5, 33]
TOKENS = 24
FULL = [
    case
    for number, case in enumerate(
        itertools.product(["cpu", "delayed"], [0, 1, 2], [1, 16], [7, 64], ["ngram", "tree", "chain"])
    )
    if number % 2 == 0
]


def drafting(num_tokens: int = 6, **options: object) -> EngineConfig:
    """Drafts in every step."""
    speculative = SpeculativeOptions(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=num_tokens,
        speculative_adaptive=False,
        speculative_ngram_min_match_window_size=1,
    )
    return msgspec.structs.replace(config(**options), speculative=speculative)


def runner_of(harness: Harness) -> ModelRunner:
    device = harness.device
    assert isinstance(device, CpuDevice | DelayedDevice)
    return device._runner


class Knowing:
    """Drafts what will come, amid much that will not: a node goes on rightly, wrongly, or not at all."""

    def __init__(self, runner: ModelRunner, texts: list[list[int]], *, as_tree: bool) -> None:
        self._slots = runner.slots
        self._vocab = runner.decoder.spec.vocab_size
        self._texts = {tuple(text[:length]): text for text, length in ((t, len(t) - TOKENS) for t in texts)}
        self._of: dict[int, list[int]] = {}
        self._as_tree = as_tree
        self._rng = np.random.default_rng(3)
        self.hits = self.later_children = 0
        self._last: tuple[Tensor, Drafts] | None = None

    def join(self, joins: Joins) -> None:
        assert joins.drafting is not None
        ends = np.cumsum(joins.drafting.text_lens)
        for slot, end, length in zip(joins.slots.tolist(), ends, joins.drafting.text_lens, strict=True):
            known = joins.drafting.texts[end - length : end].tolist()
            self._of[slot] = next(t for start, t in self._texts.items() if known[: len(start)] == list(start))

    def draft(self, rows: Tensor, num_drafts: int, longest: int) -> Drafts:
        tokens = torch.full((len(rows), num_drafts), -1, dtype=torch.int64)
        parents = torch.zeros_like(tokens)
        for index, slot in enumerate(rows.tolist()):
            text, at = self._of[slot], int(self._slots.seq_len[slot])
            depth = [0] * (num_drafts + 1)
            right = [True] + [False] * num_drafts
            for node in range(1, num_drafts + 1):
                parent = int(self._rng.integers(max(node - 3, 0), node)) if self._as_tree else node - 1
                parents[index, node - 1] = parent
                depth[node] = depth[parent] + 1
                place = at + depth[node]
                kind = self._rng.integers(0, 6)
                if kind == 0 or place >= len(text):
                    continue
                right[node] = right[parent] and kind > 1
                tokens[index, node - 1] = text[place] if kind > 1 else self._rng.integers(0, self._vocab)
        drafts = Drafts(tokens, parents if self._as_tree else None)
        self._last = rows, drafts
        return drafts

    def took(self, rows: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        if counts is None or self._last is None:
            return
        _, drafts = self._last
        self.hits += int((counts - 1).clamp(min=0).sum())
        if drafts.parents is not None:
            for row in range(len(rows)):
                children = drafts.tokens[row][drafts.parents[row] == 0].tolist()
                found = int(counts[row]) > 1 and int(tokens[row, 0]) in children
                self.later_children += found and children.index(int(tokens[row, 0])) > 0


@pytest.fixture(scope="module")
def made(tiny: ModelFiles) -> list[Case]:
    return cases(tiny.config.vocab_size, LENGTHS, TOKENS)


@pytest.fixture(scope="module")
def alone(tiny: ModelFiles, made: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return references(tmp_path_factory.mktemp("alone"), tiny, made)


@pytest.mark.parametrize(("device", "depth", "page_size", "chunk", "kind"), FULL)
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
    kind: str,
) -> None:
    options = drafting(device=device, overlap_depth=depth, page_size=page_size, chunked_prefill_size=chunk)
    harness = Harness.of_model(tmp_path, options, tiny)
    texts = [[*case.prompt, *reference.tokens] for case, reference in zip(made, alone, strict=True)]
    knowing = Knowing(runner_of(harness), texts, as_tree=kind == "tree")
    if kind != "ngram":
        verifier = runner_of(harness).verifier
        assert verifier is not None
        verifier.drafter = knowing
    got = run_together(harness, made, stagger=1)
    assert_same(f"{device} {depth} {page_size} {chunk} {kind}", alone, got)
    assert harness.workload.num_verified > 0 and not harness.workload.audit()
    if kind != "ngram":
        # Steps of 7 tokens have hardly room for drafts.
        assert harness.workload.num_accepted > (20 if chunk > 7 else 0)
        assert kind == "chain" or chunk == 7 or knowing.later_children > 3
