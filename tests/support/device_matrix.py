"""The invariance matrix in bfloat16 on any device, judged by float32 logits on the CPU.

A run is one way to compute the answers of some requests. Whatever the way, each token must be the one with the largest
float32 logit for the text before it, wherever the best two are more than a few roundings apart; and the logprobs that
came with it must be close to the float32 ones. With `deterministic`, all runs give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions
from engine.ipc.messages import Logprobs, RowReader, StepOutput
from engine.model_files.hf_config import hf_model_config
from engine.model_files.types import ModelFiles
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.worker.cpu import CpuDevice
from tests.support.matrix import CLOSE, Case
from tests.support.scheduler import Harness
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import decoder_from, run_one

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192}),
    "qwen3": ("qwen3", {"head_dim": 128, "hidden_size": 256}),
    "mistral_window": ("mistral", {"head_dim": 64, "sliding_window": 24}),
}
TOPS = 20
"""Logprobs that are asked for beside each token's own."""
CLOSE_ULPS = 4
"""Best two logits this many bfloat16 roundings apart may change places."""
SMALL_POOL = 192
"""Tokens: too few for all requests at once, enough for any one."""


@dataclass(frozen=True)
class Run:
    """One way to run some requests."""

    company: bool = False
    """All at once, rather than one after another."""
    chunk: int = 512
    cache: str = "off"
    """`cold`, `warm` (the same requests went before) or `off`."""
    page_size: int = 16
    depth: int = 0
    graphs: bool = False
    small_pool: bool = False
    """Running requests are retracted."""

    def __str__(self) -> str:
        words = (
            "together" if self.company else "alone",
            f"chunk{self.chunk}",
            self.cache,
            f"page{self.page_size}",
            f"depth{self.depth}",
            "graphs" if self.graphs else "eager",
            "small" if self.small_pool else "large",
        )
        return "-".join(words)


AXES: dict[str, Sequence[Any]] = {
    "company": (False, True),
    "chunk": (512, 7, 64),
    "cache": ("off", "cold", "warm"),
    "page_size": (16, 1, 64),
    "depth": (0, 1, 2),
    "graphs": (False, True),
    "small_pool": (False, True),
}


def pairwise(axes: Mapping[str, Sequence[Any]] = AXES) -> list[Run]:
    """Few runs, among which every two values of two axes meet; the first has the first value of each axis."""
    names = list(axes)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    runs = [every[0]]
    left = set().union(*map(_pairs, every)) - _pairs(every[0])
    while left:
        runs.append(max(every, key=lambda run: len(_pairs(run) & left)))
        left -= _pairs(runs[-1])
    return [Run(**run) for run in runs]


def _pairs(run: dict[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(run.items(), 2))


@dataclass(frozen=True)
class TinyModel:
    """A model with random weights of bfloat16 values, in a file."""

    files: ModelFiles

    @cached_property
    def reference(self) -> Decoder:
        """In float32, on the CPU."""
        tensors = load_file(self.files.weight_files[0])
        return decoder_from(spec_of(self.files.config), tensors)


def tiny_model(folder: Path, family: str = "llama", **overrides: Any) -> TinyModel:
    """Written into `folder`, without a tokenizer; `family` is one of FAMILIES."""
    from safetensors.torch import save_file

    kind, own = FAMILIES[family]
    write_tiny_model(folder, kind, tokenizer=False, **{**own, **overrides})
    path = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    return TinyModel(ModelFiles(family, "safetensors", hf_model_config(folder), str(folder), (str(path),), ""))


@dataclass
class Answer:
    """Tokens of one request, with the logprob of each and of the `TOPS` most likely ones beside it."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    tops: list[tuple[float, ...]] = field(default_factory=list)

    def at(self, index: int) -> tuple[int, float, tuple[int, ...], tuple[float, ...]]:
        """All of one token."""
        return self.tokens[index], self.chosen[index], self.ids[index], self.tops[index]

    def take(self, at: int, tokens: list[int], logprobs: Logprobs) -> None:
        """What came from output index `at` on."""
        num, width = len(tokens), logprobs.width
        ids = np.frombuffer(logprobs.ids, np.int32).reshape(num, width).tolist()
        tops = np.frombuffer(logprobs.tops, np.float32).reshape(num, width).tolist()
        self.tokens[at:] = tokens
        self.chosen[at:] = np.frombuffer(logprobs.chosen, np.float32).tolist()
        self.ids[at:] = [tuple(row) for row in ids]
        self.tops[at:] = [tuple(row) for row in tops]


def configured(device: str, run: Run = Run(), *, model: ModelOptions | None = None, **options: Any) -> EngineConfig:
    """An engine configuration for a run; `options` are SchedulerOptions, and come before those of the run."""
    own: dict[str, Any] = {
        "device": device,
        "overlap_depth": run.depth,
        "page_size": run.page_size,
        "chunked_prefill_size": max(run.chunk, 16),
        "max_prefill_tokens": run.chunk,
        "disable_radix_cache": run.cache == "off",
        "disable_cuda_graph": not run.graphs,
        # Fewer than the requests that run at once: some steps are graphs, some too large.
        "cuda_graph_max_bs": 4,
        "max_running_requests": 8,
        "max_total_tokens": SMALL_POOL if run.small_pool else 4096,
        "schedule_conservativeness": 0.01 if run.small_pool else 1.0,
    }
    return EngineConfig(
        model=model or ModelOptions(dtype="bfloat16"),
        scheduler=SchedulerOptions(**{**own, **options}),
        process=ProcessOptions(cpu_threads=1),
    )


def cpu_decoder(harness: Harness) -> Decoder:
    """The model behind a harness on the device `cpu`."""
    assert isinstance(harness.device, CpuDevice)
    return harness.device._runner.decoder


def answers_of(harness: Harness, numbers: Sequence[int]) -> list[Answer]:
    """What the requests with these numbers got; all of them asked for logprobs."""
    found: dict[int, Answer] = {}
    reader = RowReader()
    for output in harness.outlet.messages:
        assert isinstance(output, StepOutput)
        batch, start = output.tokens, 0
        ids, logprobs = np.frombuffer(batch.tokens, np.int32), dict(batch.logprobs)
        for index, (number, _, first, count, _, _) in enumerate(reader.rows(batch)):
            tokens = ids[start : start + count].tolist()
            start += count
            if count and number in numbers:
                found.setdefault(number, Answer()).take(first, tokens, logprobs[index])
    return [found[number] for number in numbers]


def assert_scored(expected: Answer, got: Answer, close: float = CLOSE) -> None:
    """The same tokens so far, each with its logprobs, up to what a batch does to their last bits."""
    assert got.tokens == expected.tokens[: len(got.tokens)]
    assert len(got.chosen) == len(got.ids) == len(got.tops) == len(got.tokens)
    for index in range(len(got.tokens)):
        _, chosen, ids, tops = expected.at(index)
        np.testing.assert_allclose(got.chosen[index], chosen, atol=close)
        np.testing.assert_allclose(got.tops[index], tops, atol=close)
        # Those that are hardly apart may change places.
        is_below = np.diff(tops, prepend=np.inf) < -10 * close
        is_apart = is_below & np.append(is_below[1:], False)
        assert (np.array(got.ids[index]) == ids)[is_apart].all()


@dataclass
class Outcome:
    """Answers of a run, and how often requests were retracted in it."""

    answers: list[Answer]
    num_retractions: int


def carry_out(folder: Path, config: EngineConfig, model: TinyModel, made: Sequence[Case], run: Run) -> Outcome:
    """The answers of all cases, run as `run` says."""
    harness = Harness.of_model(folder, config, model.files)
    numbers = list(range(1, len(made) + 1))
    try:
        for first in (101, 1) if run.cache == "warm" else (1,):
            for number, case in zip(numbers, made, strict=True):
                sampling = {"logprobs": TOPS, **case.sampling}
                harness.add(first - 1 + number, case.prompt, max_tokens=case.max_tokens, **sampling)
                if run.company:
                    harness.turn()
                else:
                    harness.run()
            harness.run()
        assert not harness.errors
    finally:
        harness.device.close()
    if run.cache == "warm" and not run.small_pool:
        assert any(harness.cached[number] for number in numbers)
    return Outcome(answers_of(harness, numbers), harness.planner.num_retractions)


@dataclass
class Verdict:
    """How far answers are from float32: per token, the divergence; and how many tokens hung on a near tie."""

    divergences: list[float] = field(default_factory=list)
    num_ties: int = 0


class Judge:
    """Float32 logits of one model for any text, each computed once."""

    def __init__(self, model: TinyModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """float32 [len(tokens), vocab]: those that each token was taken from."""
        ids = (*prompt, *tokens[:-1])
        if ids not in self._known:
            with torch.inference_mode():
                self._known[ids] = run_one(self._model.reference, torch.tensor(ids))
        return self._known[ids][len(prompt) - 1 :]

    def greedy(self, label: str, made: Sequence[Case], answers: Sequence[Answer]) -> Verdict:
        """Raises AssertionError for a token that is none of the best."""
        verdict = Verdict()
        for row, (case, answer) in enumerate(zip(made, answers, strict=True)):
            expected = self.logits(case.prompt, answer.tokens)
            verdict.divergences += divergence(expected, answer).tolist()
            best = expected.max(dim=1).values
            behind = best - expected[torch.arange(len(answer.tokens)), answer.tokens]
            verdict.num_ties += int((behind > 0).sum())
            too_far = (behind > CLOSE_ULPS * bfloat16_ulp(best)).nonzero().flatten().tolist()
            assert not too_far, (
                f"{label}: row {row}, tokens {too_far} are {behind[too_far].tolist()} behind the best logits "
                f"{best[too_far].tolist()}"
            )
        return verdict


def bfloat16_ulp(values: Tensor) -> Tensor:
    """The distance of two neighbouring bfloat16 numbers at each value."""
    return torch.exp2(values.abs().clamp(min=2**-20).log2().floor() - 7)


def divergence(expected: Tensor, answer: Answer) -> Tensor:
    """Kullback-Leibler divergence of an answer's logprobs from the expected logits, per token [n].

    All tokens but the reported ones count as one.
    """
    wanted = expected.double().log_softmax(-1).gather(1, torch.tensor(answer.ids))
    found = torch.tensor(answer.tops, dtype=torch.float64)
    wanted, found = _with_rest(wanted), _with_rest(found)
    return (wanted.exp() * (wanted - found)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-12).log()
    return torch.cat([logprobs, rest], dim=-1)


def assert_identical(label: str, expected: Sequence[Answer], answers: Sequence[Answer]) -> None:
    """Token by token and bit by bit; says where they part first."""
    for row, (one, other) in enumerate(zip(expected, answers, strict=True)):
        assert len(one.tokens) == len(other.tokens), f"{label}: row {row} has {len(other.tokens)} tokens"
        for at in range(len(one.tokens)):
            assert one.at(at) == other.at(at), (
                f"{label}: row {row} differs at token {at}: {one.tokens[at]} at {one.chosen[at]!r} was expected, "
                f"{other.tokens[at]} at {other.chosen[at]!r} came"
            )


def greedy_cases(vocab_size: int, lengths: Sequence[int], max_tokens: int, seed: int = 0) -> list[Case]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [Case(rng.integers(3, vocab_size, length).tolist(), max_tokens) for length in lengths]


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "seed": 6},
    {"temperature": 1.2, "min_p": 0.05, "seed": 7, "presence_penalty": 1.0},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"logit_bias": tuple((token, 2.0) for token in range(3, 60))},
    {"min_tokens": 8, "stop_token_ids": tuple(range(3, 19))},
    {"stop_token_ids": tuple(range(20, 36)), "temperature": 1.0, "seed": 8},
    {},
)
"""Ways to sample that must not depend on the run."""


def sampling_cases(vocab_size: int, lengths: Sequence[int], max_tokens: int, seed: int = 1) -> list[Case]:
    """Random prompts, which sample in all the ways of KINDS."""
    plain = greedy_cases(vocab_size, lengths, max_tokens, seed)
    return [replace(case, sampling=KINDS[index % len(KINDS)]) for index, case in enumerate(plain)]
