"""Answers are the same with drafts as without: greedy and seeded, whatever drafts, and how many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig, ModelOptions, SpeculativeOptions
from engine.ipc.messages import Abort, Finish, unpack_u64
from engine.model_files.types import ModelFiles
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.plan import Joins, StepPlan
from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.program_forward import ProgramForward
from scheduler_proc.worker.step_arrays import StepArrays
from scheduler_proc.worker.verify_graphs import Verified, VerifyGraphs
from tests.support.matrix import TOKENS, Case, Reference, assert_same, config, references, run_together
from tests.support.packed import needs_kernels
from tests.support.scheduler import Harness
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import hf_files
from tests.unit.worker.steps import Again

FULL = [
    case
    for number, case in enumerate(
        itertools.product(["cpu", "delayed"], [0, 1, 2], [1, 16], [7, 64], ["ngram", "tree", "chain"])
    )
    if number % 4 == 0
]


def halved(devices: Sequence[str], top_k: int) -> list[Any]:
    """Device, depth, page size, chunk and width of trees: every seventh of all is quick, the next ones are slow."""
    every = itertools.product(devices, [0, 1, 2], [1, 16], [7, 64, 4096], [1, top_k])
    kept = [case for number, case in enumerate(every) if number % 7 in (0, 3)]
    return [case if number % 2 else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(kept)]


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

    kv: tuple[Tensor, ...] = ()

    def __init__(self, runner: ModelRunner, texts: list[list[int]], *, as_tree: bool) -> None:
        self._slots = runner.slots
        self._vocab = runner.decoder.spec.vocab_size
        self._texts = {tuple(text[:length]): text for text, length in ((t, len(t) - TOKENS) for t in texts)}
        self._of: dict[int, list[int]] = {}
        self._as_tree = as_tree
        self._rng = np.random.default_rng(3)
        self.hits = self.later_children = 0

    def join(self, joins: Joins) -> None:
        assert joins.drafting is not None
        ends = np.cumsum(joins.drafting.text_lens)
        for slot, end, length in zip(joins.slots.tolist(), ends, joins.drafting.text_lens, strict=True):
            known = joins.drafting.texts[end - length : end].tolist()
            self._of[slot] = next(t for start, t in self._texts.items() if known[: len(start)] == list(start))

    def clear(self) -> None:
        self._of.clear()

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        tokens = torch.full((len(rows), num_drafts), -1, dtype=torch.int64)
        parents = torch.zeros_like(tokens)
        for index, slot in enumerate(rows.tolist()):
            # Rows that fill up a graph are of nobody.
            text, at = self._of.get(slot, [0] * 100), int(self._slots.seq_len[slot])
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
        return Drafts(tokens, parents if self._as_tree else None)

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        """It knows anyway."""

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        counts, drafts = taken.counts, nodes.drafts
        self.hits += int((counts - 1).clamp(min=0).sum())
        if drafts.parents is not None:
            for row in range(len(rows)):
                children = drafts.tokens[row][drafts.parents[row] == 0].tolist()
                first = int(taken.tokens[row, 0])
                found = int(counts[row]) > 1 and first in children
                self.later_children += found and children.index(first) > 0


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
    drafter = None if kind == "ngram" else knowing(harness, made, alone, as_tree=kind == "tree")
    got = run_together(harness, made, stagger=1)
    assert_same(f"{device} {depth} {page_size} {chunk} {kind}", alone, got)
    assert harness.workload.num_verified > 0 and not harness.workload.audit()
    if drafter is not None:
        # Steps of 7 tokens have hardly room for drafts.
        assert harness.workload.num_accepted > (20 if chunk > 7 else 0)
        assert kind == "chain" or chunk == 7 or drafter.later_children > 3


def knowing(harness: Harness, made: list[Case], alone: list[Reference], *, as_tree: bool = True) -> Knowing:
    """Puts a drafter that knows the answers into a harness."""
    texts = [[*case.prompt, *reference.tokens] for case, reference in zip(made, alone, strict=True)]
    drafter = Knowing(runner_of(harness), texts, as_tree=as_tree)
    verifier = runner_of(harness).verifier
    assert verifier is not None
    verifier.drafter = drafter
    return drafter


DEVICES = [("cpu", 0), ("delayed", 1), ("delayed", 2)]


@pytest.mark.parametrize(("device", "depth"), DEVICES)
def test_retraction(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, depth: int
) -> None:
    options = drafting(
        device=device,
        overlap_depth=depth,
        page_size=2,
        max_total_tokens=128,
        chunked_prefill_size=32,
        schedule_conservativeness=0.01,
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    knowing(harness, made, alone)
    assert_same(f"retracted {device} {depth}", alone, run_together(harness, made))
    assert harness.planner.num_retractions > 0 and harness.workload.num_accepted > 0


@pytest.mark.parametrize(("device", "depth"), DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_cached_was_accepted(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, depth: int, page_size: int
) -> None:
    """Answers become parts of later prompts, whose keys and values come from the cache."""
    harness = Harness.of_model(tmp_path, drafting(device=device, overlap_depth=depth, page_size=page_size), tiny)
    knowing(harness, made, alone)
    first = len(made)
    for number, case in enumerate(made, start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
    harness.run()
    for number, (case, reference) in enumerate(zip(made, alone, strict=True), start=first + 1):
        prompt = [*case.prompt, *reference.tokens[:-6]]
        harness.add(number, prompt, max_tokens=6, **case.sampling)
    harness.run()
    harness.device.close()
    assert_same("first", alone, [harness.tokens[number] for number in range(1, first + 1)])
    rest = [Reference(reference.tokens[-6:], reference.gaps[-6:]) for reference in alone]
    got = [harness.tokens[number] for number in range(first + 1, 2 * first + 1)]
    # Penalties look at answers, which are a prompt here.
    plain = [index for index, case in enumerate(made) if "repetition_penalty" not in case.sampling]
    assert_same("continued", [rest[index] for index in plain], [got[index] for index in plain])
    assert sum(harness.cached[number] for number in range(first + 1, 2 * first + 1)) > 0


@pytest.mark.parametrize(("device", "depth"), DEVICES)
def test_an_answer_ends_within_what_was_accepted(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, depth: int
) -> None:
    """By a stop token, by length, by a text that the detokenizer ends; what comes after is neither sent nor counted."""
    harness = Harness.of_model(tmp_path, drafting(device=device, overlap_depth=depth), tiny)
    knowing(harness, made, alone, as_tree=False)
    for number, (case, reference) in enumerate(zip(made, alone, strict=True), start=1):
        options: dict = dict(case.sampling)
        if number % 2:
            options["stop_token_ids"] = (reference.tokens[number],)
        harness.add(number, case.prompt, max_tokens=number + 3, **options)
    harness.run()
    harness.device.close()
    for number, reference in enumerate(alone, start=1):
        expected = reference.tokens[: number + 3]
        stop = reference.tokens[number]
        finish = Finish.LENGTH
        if number % 2:
            expected, finish = expected[: expected.index(stop) + 1], Finish.STOP_TOKEN
        assert harness.tokens[number] == expected and harness.finish[number] == finish
    assert harness.workload.num_output_tokens == sum(len(tokens) for tokens in harness.tokens.values())
    assert harness.workload.num_accepted > 10


@pytest.mark.parametrize(("device", "depth"), DEVICES)
def test_requests_that_want_no_drafts_or_few(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, depth: int
) -> None:
    harness = Harness.of_model(tmp_path, drafting(device=device, overlap_depth=depth), tiny)
    knowing(harness, made, alone)
    kinds: list[dict] = [{"max_drafts": 0}, {"max_drafts": 0, "logprobs": 2}, {"max_drafts": 2}, {"logprobs": 1}]
    for number, case in enumerate(made, start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling, **kinds[number % 4])
    harness.run()
    harness.device.close()
    assert_same("mixed", alone, [harness.tokens[number] for number in range(1, len(made) + 1)])
    told: dict[int, tuple[int, int]] = {}
    logprobs = dict.fromkeys(range(1, len(made) + 1), 0)
    for output in harness.outlet.messages:
        told.update({drafted.request: (drafted.accepted, drafted.rejected) for drafted in output.drafted})
        requests = unpack_u64(output.tokens.requests).tolist()
        for row, scores in output.tokens.logprobs:
            logprobs[requests[row]] += len(scores.chosen) // 4
    assert {number % 4 for number in told} == {2, 3}
    assert sum(accepted for accepted, _ in told.values()) == harness.workload.num_accepted
    assert sum(map(sum, told.values())) == harness.workload.num_drafted
    assert logprobs == {number: TOKENS if number % 2 else 0 for number in logprobs}


def test_drafts_without_pages_are_left_out(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path
) -> None:
    """Nobody is retracted for drafts: a pool that lets two requests live one token at a time still does."""
    options = drafting(8, page_size=1, max_total_tokens=len(made[3].prompt) + len(made[4].prompt) + 2 * TOKENS)
    harness = Harness.of_model(tmp_path, options, tiny)
    knowing(harness, made, alone)
    for number in (4, 5):
        harness.add(number, made[number - 1].prompt, max_tokens=TOKENS, **made[number - 1].sampling)
    harness.run()
    assert [harness.tokens[number] for number in (4, 5)] == [alone[number - 1].tokens for number in (4, 5)]
    assert harness.planner.num_retractions == 0


@pytest.mark.slow
def test_a_storm_of_cancels(tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    options = drafting(
        device="delayed",
        overlap_depth=2,
        page_size=4,
        max_total_tokens=320,
        max_running_requests=6,
        chunked_prefill_size=48,
        schedule_conservativeness=0.01,
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    knowing(harness, made, alone)
    which: dict[int, int] = {}
    for number in range(1, 121):
        which[number] = int(rng.integers(0, len(made)))
        case = made[which[number]]
        harness.add(number, case.prompt, max_tokens=TOKENS, **case.sampling)
        if rng.random() < 0.4:
            harness.inbox.messages.append(Abort(int(rng.integers(1, number + 1)), 0))
        harness.turn(int(rng.integers(0, 4)))
    harness.run()
    harness.device.close()
    done = [number for number, finish in harness.finish.items() if finish is not Finish.ABORT]
    assert len(done) > 50
    assert_same("storm", [alone[which[n]] for n in done], [harness.tokens[n] for n in done])


class Replays:
    """Graphs of steps with drafts, called again instead of replayed, and how often they were."""

    def __init__(self, harness: Harness, drafter: Knowing) -> None:
        runner = runner_of(harness)
        verifier, slots = runner.verifier, runner.slots
        assert verifier is not None
        self._graphs = VerifyGraphs(runner.decoder, slots, verifier, runner.forward, 5, (1, 3), harness.slots.max_len)
        self.num = 0

        def prepare(num_rows: int) -> None:
            drafter._of.update(dict.fromkeys(range(num_rows), [0] * 100))
            slots.ended[:num_rows] = False

        self._graphs.capture(Again(), prepare, lambda done: None)
        slots.ended[:-1] = False
        slots.seq_len.zero_()
        verifier.clear()
        # Whose rows fill up a batch.
        drafter._of[slots.scratch] = [0]
        runner.verify_graphs = self  # type: ignore[assignment]

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Verified | None:
        found = self._graphs(plan, arrays)
        self.num += found is not None
        return found


@pytest.mark.parametrize("device", ["cpu", "delayed"])
@pytest.mark.parametrize("as_tree", [False, True])
def test_steps_as_graphs(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, as_tree: bool
) -> None:
    harness = Harness.of_model(tmp_path, drafting(4, device=device, overlap_depth=1), tiny)
    replays = Replays(harness, knowing(harness, made, alone, as_tree=as_tree))
    harness.add(99, made[0].prompt, max_tokens=TOKENS)
    harness.run()
    got = run_together(harness, made)
    assert_same(f"graphs {device}", alone, got)
    assert replays.num > 5 and harness.workload.num_accepted > 5


@needs_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("device", "depth", "page_size", "as_tree"), [("cpu", 0, 16, True), ("delayed", 2, 1, True), ("cpu", 1, 7, False)]
)
def test_packed_weights_leave_no_bit_to_chance(
    tiny: ModelFiles,
    made: list[Case],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    as_tree: bool,
    kv_cache_dtype: str,
) -> None:
    """Integer kernels: whatever is drafted, the answers are those without drafts."""
    packed = ModelOptions(quantization="int8", kv_cache_dtype=kv_cache_dtype)
    alone = references(tmp_path, tiny, made, options=packed)
    options = drafting(device=device, overlap_depth=depth, page_size=page_size, model=packed, chunked_prefill_size=64)
    harness = Harness.of_model(tmp_path, options, tiny)
    drafter = knowing(harness, made, alone, as_tree=as_tree)
    assert isinstance(runner_of(harness).forward, ProgramForward)
    assert run_together(harness, made, stagger=1) == [reference.tokens for reference in alone]
    assert harness.workload.num_accepted > 20 and (not as_tree or drafter.later_children > 3)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_not_a_number_stays_with_its_request(tmp_path: Path, page_size: int) -> None:
    """Drafts read no place that nobody wrote: it may hold what a request left that failed."""
    folder = write_tiny_model(tmp_path / "model", tokenizer=False)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, path)
    options = drafting(8, page_size=page_size, max_total_tokens=512, chunked_prefill_size=64)
    harness = Harness.of_model(tmp_path, options, hf_files(folder))
    harness.add(1, [5, 6, 7, 8] * 50, max_tokens=10)
    harness.run()
    assert set(harness.errors) == {1}
    rng = np.random.default_rng(0)
    for number in range(2, 26):
        pattern = rng.integers(8, 400, int(rng.integers(2, 6))).tolist()
        harness.add(number, (pattern * 30)[: int(rng.integers(4, 60))], max_tokens=30, logit_bias=((7, -100.0),))
        if number % 4 == 0:
            harness.run()
    harness.run()
    assert set(harness.errors) == {1} and harness.workload.num_accepted > 20


def test_who_left_amid_a_step_leaves_no_doubt(tiny: ModelFiles, tmp_path: Path) -> None:
    """Else others would wait for ever for a step that makes their pages certain."""
    options = {"max_running_requests": 4, "max_total_tokens": 128, "page_size": 4, "schedule_conservativeness": 0.1}
    harness = Harness.of_model(tmp_path, drafting(device="cpu", overlap_depth=1, **options), tiny)
    harness.add(1, [5, 6] * 4, max_tokens=60)
    for number in (2, 3):
        harness.add(number, [7 + number, 8 + number] * 3, max_tokens=100)
    harness.turn(6)
    assert harness.slots.slack.any()
    harness.inbox.messages.append(Abort(1, 0))
    harness.turn(2)
    harness.run()
    assert [len(harness.tokens[number]) for number in (2, 3)] == [100, 100]
    assert not harness.slots.slack.any() and harness.planner.num_retractions > 0
