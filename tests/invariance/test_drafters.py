"""Drafts of heads and drafters change no answer, and do not depend on how the text before them was computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.config import EngineConfig, ModelOptions
from engine.model_files.types import ModelFiles
from kernels.speculative import Drafts, VerifyLimits
from scheduler_proc.plan import Joins
from scheduler_proc.worker.forward import EagerForward
from scheduler_proc.worker.program_forward import ProgramForward
from tests.invariance.test_speculative import Knowing, halved, runner_of
from tests.support.dflash_drafters import write_drafter
from tests.support.eagle_heads import write_eagle_head, write_head
from tests.support.matrix import TOKENS, Case, Reference, assert_same, drafting_with, references, run_together
from tests.support.packed import needs_kernels
from tests.support.scheduler import Harness
from tests.support.tiny_models import tiny_config

WRITERS = {"EAGLE": write_eagle_head, "EAGLE2": write_eagle_head, "EAGLE3": write_head, "DFLASH": write_drafter}
PACKED = ModelOptions(quantization="int8")
MODELS = {"floats": None, "packed": PACKED}
QUICK = (("cpu", 2, 16, 7, 3), ("delayed", 0, 1, 64, 1))
"""Of others than EAGLE3: but for what they compute, all that happens is as with that."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(tmp_path_factory.mktemp(kind), tiny_config()) for kind, write in WRITERS.items()}


def drafting(kind: str, paths: dict[str, Path], top_k: int, **options: object) -> EngineConfig:
    return drafting_with(kind, str(paths[kind]), top_k, **options)


def matrix() -> list[Any]:
    found = []
    for case in halved(("cpu", "delayed"), 3):
        values, marks = getattr(case, "values", case), getattr(case, "marks", ())
        found.append(pytest.param("EAGLE3", *values, marks=marks))
        marks = () if values in QUICK else pytest.mark.slow
        kinds = ("EAGLE", "DFLASH") if values[-1] == 1 else ("EAGLE2",)
        found += [pytest.param(kind, *values, marks=marks) for kind in kinds]
    return found


@pytest.mark.parametrize(("kind", "device", "depth", "page_size", "chunk", "top_k"), matrix())
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    paths: dict[str, Path],
    tmp_path: Path,
    kind: str,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
    top_k: int,
) -> None:
    options = drafting(
        kind, paths, top_k, device=device, overlap_depth=depth, page_size=page_size, chunked_prefill_size=chunk
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    assert_same(f"{device} {depth} {page_size} {chunk}", alone, run_together(harness, made, stagger=1))
    assert harness.workload.num_drafted > 0


@pytest.mark.parametrize(("kind", "top_k"), [("EAGLE3", 1), ("EAGLE3", 3), ("DFLASH", 1)])
def test_what_kernels_read_is_dense(
    tiny: ModelFiles,
    made: list[Case],
    paths: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    top_k: int,
) -> None:
    """Kernels of other devices go through positions and locations by a step of one."""
    options = drafting(kind, paths, top_k)
    harness = Harness.of_model(tmp_path, options, tiny)
    runner, seen = runner_of(harness), set()
    stored = runner.decoder.kernels.rope_store

    def rope_store(*arguments: Any) -> None:
        assert all(arguments[at].is_contiguous() for at in (3, 6))
        seen.add(len(arguments[0]))
        stored(*arguments)

    assert runner.verifier is not None
    drafter: Any = runner.verifier.drafter
    part = drafter._head.layer if kind == "EAGLE3" else drafter._model
    monkeypatch.setattr(part, "_kernels", replace(part._kernels, rope_store=rope_store))
    for number, case in enumerate(made[:3], start=1):
        harness.add(number, case.prompt, max_tokens=12)
    harness.run()
    assert 3 in seen or kind == "DFLASH"


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "top_k"),
    [
        ("EAGLE3", 3),
        *(
            pytest.param(kind, top_k, marks=pytest.mark.slow)
            for kind, top_k in (("EAGLE3", 1), ("EAGLE", 1), ("EAGLE2", 3), ("DFLASH", 1))
        ),
    ],
)
def test_packed_weights_leave_no_bit_to_chance(
    tiny: ModelFiles,
    made: list[Case],
    paths: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    top_k: int,
) -> None:
    """Answers are those without drafts, and drafts are the same whether passes are recorded or not."""
    alone = [reference.tokens for reference in references(tmp_path, tiny, made, options=PACKED)]
    drafts = []
    for name, device, options in (
        ("recorded", "cpu", {"page_size": 4, "chunked_prefill_size": 16}),
        ("delayed", "delayed", {"overlap_depth": 2}),
        ("called one by one", "cpu", {"page_size": 4, "chunked_prefill_size": 16}),
    ):
        if name == "called one by one":
            for module in ("scheduler_proc.model_device", "scheduler_proc.speculative.make"):
                monkeypatch.setattr(f"{module}.can_record", lambda kernels: False)
        options = drafting(kind, paths, top_k, device=device, model=PACKED, **options)
        harness = Harness.of_model(tmp_path, options, tiny)
        assert isinstance(runner_of(harness).forward, EagerForward if name == "called one by one" else ProgramForward)
        spy = Spy(harness) if device == "cpu" else None
        assert run_together(harness, made, stagger=1) == alone
        assert harness.workload.num_drafted > 0
        if spy is not None:
            drafts.append(spy.found)
    assert len(drafts[0]) > 40 and drafts[0] == drafts[1]


class Spy:
    """Keeps what was drafted, by the text before it."""

    def __init__(self, harness: Harness, instead: Knowing | None = None) -> None:
        """instead: what it drafts is verified."""
        runner = runner_of(harness)
        assert runner.verifier is not None
        self._instead = instead
        if instead is not None:
            join = runner.verifier.drafter.join

            def both(joins: Joins) -> None:
                join(joins)
                instead.join(joins)

            runner.verifier.drafter.join = both  # type: ignore[method-assign]
        self._slots, self._harness = runner.slots, harness
        self._draft = runner.verifier.drafter.draft
        self.found: dict[tuple[int, ...], list[int]] = {}
        runner.verifier.drafter.draft = self.draft  # type: ignore[method-assign]

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        drafts = self._draft(rows, num_drafts, longest, limits)
        host = self._harness.slots
        parents = drafts.tokens.new_zeros(drafts.tokens.shape) if drafts.parents is None else drafts.parents
        both = (drafts.tokens + 1000 * parents).tolist()
        for row, slot in zip(both, rows.tolist(), strict=True):
            length = int(self._slots.seq_len[slot]) + 1
            assert length == int(host.num_known[slot])
            # Behind the end of an answer anything may be drafted.
            left = int(host.full_len[slot]) - length
            self.found[tuple(host.tokens[slot, :length].tolist())] = row if left > 12 else []
        return drafts if self._instead is None else self._instead.draft(rows, num_drafts, longest, limits)


@pytest.mark.parametrize(
    ("kind", "top_k", "weights"),
    [
        ("EAGLE3", 3, "floats"),
        ("DFLASH", 1, "floats"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("EAGLE3", 1, "floats"),
                ("EAGLE", 1, "floats"),
                ("EAGLE2", 3, "floats"),
                ("EAGLE3", 3, "packed"),
                ("EAGLE", 1, "packed"),
                ("DFLASH", 1, "packed"),
            )
        ),
    ],
)
def test_drafts_follow_from_the_text_alone(
    tiny: ModelFiles, made: list[Case], paths: dict[str, Path], tmp_path: Path, kind: str, top_k: int, weights: str
) -> None:
    """Whole or in chunks, beside others or alone, from the prefix cache or computed, by steps of any kind."""
    greedy = [Case(case.prompt, TOKENS) for case in made]
    model = MODELS[weights]
    alone = references(tmp_path, tiny, greedy, options=model)
    seen: list[dict[tuple[int, ...], list[int]]] = []
    for name, options, warm in (
        ("whole", {"chunked_prefill_size": 4096}, False),
        ("chunks", {"chunked_prefill_size": 16, "page_size": 4}, False),
        ("page of 1", {"page_size": 1}, False),
        ("warm", {"page_size": 4}, True),
        ("retracted", {"page_size": 2, "max_total_tokens": 128, "schedule_conservativeness": 0.01}, False),
        ("accepted", {"page_size": 2}, False),
    ):
        harness = Harness.of_model(tmp_path, drafting(kind, paths, top_k, model=model, **options), tiny)
        if warm:
            for number, case in enumerate(greedy, start=100):
                harness.add(number, case.prompt, max_tokens=TOKENS - 5)
            harness.run()
        texts = [[*case.prompt, *reference.tokens] for case, reference in zip(greedy, alone, strict=True)]
        is_told = name == "accepted"
        spy = Spy(harness, Knowing(runner_of(harness), texts, as_tree=kind != "DFLASH") if is_told else None)
        for number, case in enumerate(greedy, start=1):
            harness.add(number, case.prompt, max_tokens=case.max_tokens)
        harness.run()
        if warm:
            assert sum(harness.cached[number] for number in range(1, len(greedy) + 1)) > 100
        assert not is_told or harness.workload.num_accepted > 30
        assert name != "retracted" or harness.planner.num_retractions > 0
        seen.append(spy.found)
    for other in seen[1:]:
        both = seen[0].keys() & other.keys()
        assert len(both) > 40
        for text in both:
            # Few rows leave room for more drafts; trees and blocks are others then.
            one, two = seen[0][text], other[text]
            shared = min(len(one), len(two))
            is_other = len(one) != len(two) and (top_k > 1 or kind == "DFLASH")
            assert is_other or one[:shared] == two[:shared]
