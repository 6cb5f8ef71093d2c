"""Plans written by hand for a tiny model, and what the model says of a sequence in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from engine.config import LogprobsMode
from kernels.dispatch import KernelSet
from scheduler_proc.cache.kv_pool import KVPool
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Adjustment, Joins, PageUpdates, PromptScores, StepPlan, StepResult
from scheduler_proc.worker.capture import Captured
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import EagerForward, Forward, Pages
from scheduler_proc.worker.graph_forward import GraphForward
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.prompt_graphs import PromptGraphs
from scheduler_proc.worker.rehearsal import Rehearsal
from scheduler_proc.worker.transfer import Transfer
from tests.support.tiny_models import tiny_config, tiny_tensors, write_tiny_model
from tests.unit.kernels.wishes import Wish
from tests.unit.models.paging import cpu_kernels, decoder_from, run_one, spec_in

VOCAB = 120
MAX_LEN = 160
PAGE = 4
MAX_STOPS = 3
MAX_GRAPH_TOKENS = 32


@cache
def tiny_decoder() -> Decoder:
    """One model for all tests; nobody changes it."""
    return new_decoder()


def new_decoder(kernels: KernelSet | None = None) -> Decoder:
    """The same model once more, with kernels of one's own."""
    config = tiny_config(vocab_size=VOCAB)
    tensors = {name: torch.from_numpy(tensor) for name, tensor in tiny_tensors(config).items()}
    with TemporaryDirectory() as folder:
        spec = spec_in(write_tiny_model(Path(folder), vocab_size=VOCAB, tokenizer=False))
    return decoder_from(spec, tensors, kernels)


def logits_of(tokens: Sequence[int]) -> np.ndarray:
    """float32 [len(tokens), VOCAB]: the model's logits after each token."""
    return run_one(tiny_decoder(), torch.tensor(list(tokens))).numpy()


@dataclass
class Occupant:
    """One request in a slot, as the host knows it."""

    prompt: list[int]
    output: list[int]
    wish: Wish | None
    sampling: dict[str, float]
    stops: Sequence[int] = ()
    done: int = 0
    """Tokens whose KV is planned."""
    told: bool = False
    drawn: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output


class Steps:
    """A runner, and a host that plans for it as a test says."""

    def __init__(
        self,
        mode: LogprobsMode = "raw",
        num_slots: int = 6,
        kernels: KernelSet | None = None,
        decoder: Decoder | None = None,
        max_graph_rows: int = 0,
    ) -> None:
        """max_graph_rows: decode steps of up to so many rows, and short ones with prompts, are replayed, as on a device
        that has graphs."""
        decoder = decoder or tiny_decoder()
        shape, max_pages = decoder.kv_shape, MAX_LEN // PAGE
        cpu = torch.device("cpu")
        num_pages = num_slots * max_pages
        pool = KVPool(shape.num_layers, num_pages + 1, PAGE, shape.num_kv_heads, shape.head_dim, torch.float32, cpu)
        slots = DeviceSlots(num_slots, max_pages, Transfer(cpu), MAX_STOPS)
        pages = Pages(pool.layers, PAGE, num_pages)
        forward: Forward = EagerForward(decoder, slots, pages)
        self.runner = ModelRunner(decoder, kernels or cpu_kernels(), pool, slots, forward, mode)
        if max_graph_rows:
            rehearsal = Rehearsal(self.runner, num_pages, PAGE, MAX_LEN)
            prompts = PromptGraphs(decoder, slots, pages, MAX_GRAPH_TOKENS, MAX_LEN, forward)
            prompts.capture(Again(), rehearsal.seat, lambda done: None)
            graphs = GraphForward(decoder, slots, pages, max_graph_rows, prompts, minds_common=True)
            graphs.capture(Again(), rehearsal.seat, lambda done: None)
            rehearsal.clear()
            self.runner.forward = graphs
        self.slots: dict[int, Occupant] = {}
        self._max_pages = max_pages
        self._step = 0
        self._versions: dict[tuple[int, ...], int] = {}

    def join(
        self,
        slot: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        wish: Wish | None = None,
        stops: Sequence[int] = (),
        **sampling: float,
    ) -> Occupant:
        """A new occupant; the device hears of it with the next plan. `wish` needs no prompt and output of its own."""
        if wish is not None:
            wish = replace(wish, prompt=list(prompt), output=list(output))
        self.slots[slot] = Occupant(list(prompt), list(output), wish, sampling, stops)
        return self.slots[slot]

    def plan(
        self,
        decode: Sequence[int] = (),
        chunks: Mapping[int, int] | None = None,
        logprobs: Mapping[int, int] | None = None,
        prompt_widths: Mapping[int, int] | None = None,
    ) -> StepPlan:
        """A step: slots that decode, tokens that others prefill, widths of logprobs by slot, of their prompts too."""
        chunks, logprobs, prompt_widths = chunks or {}, logprobs or {}, prompt_widths or {}
        rows = [*decode, *chunks]
        q_lens = [1] * len(decode) + list(chunks.values())
        tokens: list[int] = []
        sample = [True] * len(decode)
        scores = []
        joins = [slot for slot, occupant in self.slots.items() if not occupant.told]
        joined = self._joins(joins) if joins else None
        for index, (slot, length) in enumerate(chunks.items(), start=len(decode)):
            occupant = self.slots[slot]
            start, end = occupant.done, occupant.done + length
            tokens += occupant.known[start:end]
            sample.append(end == len(occupant.known))
            targets = occupant.prompt[start + 1 : end + 1]
            if slot in prompt_widths and targets:
                scores.append(PromptScores(index, 0, np.array(targets, np.int32), prompt_widths[slot]))
        for slot, length in zip(rows, q_lens, strict=True):
            self.slots[slot].done += length
        kv_lens = np.array([self.slots[slot].done for slot in rows], np.int32)
        sampling = [self.slots[slot] for slot, samples in zip(rows, sample, strict=True) if samples]
        wanted = np.array([logprobs.get(s, -1) if samples else -1 for s, samples in zip(rows, sample, strict=True)])
        self._step += 1
        return StepPlan(
            step=self._step,
            rows=np.array(rows, np.int32),
            num_decode=len(decode),
            q_lens=np.array(q_lens, np.int32),
            kv_lens=kv_lens,
            tokens=np.array(tokens, np.int32),
            sample=np.array(sample, bool),
            all_greedy=all(occupant.sampling.get("temperature", 0.0) == 0.0 for occupant in sampling),
            needs_filter=any(occupant.sampling.keys() - {"temperature", "seed"} for occupant in sampling),
            rows_version=self._version(tuple(rows), bool(chunks) or bool(joins)),
            slots_version=-1,
            joins=joined,
            pages=(self._pages(joins) if joins else None,),
            adjusts_logits=any(occupant.wish is not None for occupant in sampling),
            logprobs=wanted.astype(np.int32) if (wanted >= 0).any() else None,
            prompt_scores=tuple(scores),
        )

    def run(self, *plans: StepPlan) -> list[StepResult]:
        """Run plans that were all made before the first result was seen, then take in what they drew."""
        results = [self.runner.run(plan) for plan in plans]
        for plan, result in zip(plans, results, strict=True):
            for index in np.flatnonzero(plan.sample):
                self.slots[int(plan.rows[index])].drawn.append(int(result.tokens[index, 0]))
        return results

    def _version(self, rows: tuple[int, ...], changes: bool) -> int:
        if changes:
            self._versions.clear()
            return self._step
        return self._versions.setdefault(rows, self._step)

    def _joins(self, slots: list[int]) -> Joins:
        occupants = [self.slots[slot] for slot in slots]
        for occupant in occupants:
            occupant.told = True

        def values(name: str, default: float, dtype: type) -> np.ndarray:
            return np.array([occupant.sampling.get(name, default) for occupant in occupants], dtype)

        return Joins(
            slots=np.array(slots, np.int32),
            context_lens=np.array([occupant.done for occupant in occupants], np.int32),
            temperature=values("temperature", 0.0, np.float32),
            top_p=values("top_p", 1.0, np.float32),
            top_k=values("top_k", -1, np.int32),
            min_p=values("min_p", 0.0, np.float32),
            seeds=values("seed", 0, np.int64),
            stop_ids=np.array([stop_ids(occupant) for occupant in occupants], np.int32),
            adjustments=tuple(
                adjustment_of(slot, occupant.wish)
                for slot, occupant in zip(slots, occupants, strict=True)
                if occupant.wish is not None
            ),
        )

    def _pages(self, slots: list[int]) -> PageUpdates:
        columns = np.tile(np.arange(self._max_pages, dtype=np.int32), len(slots))
        rows = np.repeat(np.array(slots, np.int32), self._max_pages)
        return PageUpdates(rows, columns, rows * self._max_pages + columns)


class Again:
    """Captures on the CPU: what was captured is called again, into the same output."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> Captured:
        output = work()
        return Captured(lambda: output.copy_(work()), output)

    def borrowed(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def seconds(self, captured: Captured, prepare: Callable[[], None]) -> float:
        for _ in range(3):
            prepare()
            captured.replay()
        return 0.0

    ways = (nullcontext, nullcontext)


def stop_ids(occupant: Occupant) -> list[int]:
    return [*occupant.stops, *[-1] * (MAX_STOPS - len(occupant.stops))]


def adjustment_of(slot: int, wish: Wish) -> Adjustment:
    """As the host tells it: prompt and output only where there are penalties."""
    penalties = (wish.repetition, wish.presence, wish.frequency) != (1.0, 0.0, 0.0)
    return Adjustment(
        slot=slot,
        repetition_penalty=wish.repetition,
        presence_penalty=wish.presence,
        frequency_penalty=wish.frequency,
        prompt_ids=np.array(wish.prompt if penalties else [], np.int32),
        output_ids=np.array(wish.output if penalties else [], np.int32),
        bias_ids=np.array(list(wish.bias), np.int32),
        bias_values=np.array(list(wish.bias.values()), np.float32),
        min_len=wish.min_len,
        end_ids=np.array(wish.ends, np.int32),
    )
