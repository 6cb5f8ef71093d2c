"""Steps whose kernels begin before the one before has ended give, to the bit, what steps of waiting kernels give.

A step is that of a small decoder, from its slots to its drawn tokens, and the next one goes on from those: what any
kernel of any step reads too early changes all that comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cuda import pdl
from kernels.cuda.activation import silu_and_mul
from kernels.cuda.attention import PagedAttention
from kernels.cuda.context import make_context
from kernels.cuda.embedding import embed
from kernels.cuda.linear import GatedLinear, Linear
from kernels.cuda.norm import add_rms_norm, rms_norm
from kernels.cuda.rope_store import rope_store
from kernels.cuda.sampling import sample
from kernels.cuda.step import advance_ends, step_inputs
from kernels.cuda.tuning import Key, Tuner
from kernels.step import SlotTensors, StepInputs

CUDA = torch.device("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not pdl.can(CUDA), reason="needs compute capability 9.0"),
    pytest.mark.timeout(300),
]

PAGE_SIZE = 16
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its batch."""

    rows: int
    hidden: int = 1024
    inner: int = 2048
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 6
    vocab: int = 5000
    pages: int = 48
    """Of a slot."""
    steps: int = 300


class Picker(Tuner):
    """Takes the n-th of the candidates, so that nothing is measured and both ways launch the same kernels."""

    def __init__(self, device: torch.device, nth: int) -> None:
        super().__init__(device, None)
        self.nth = nth

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        own = sorted(candidates.keys() - {"torch"})
        return own[self.nth % len(own)]


class Steps:
    """A decoder with random weights and its running batch."""

    def __init__(self, sizes: Sizes, device: torch.device, nth: int, drawing: str) -> None:
        """nth: of the configurations of products and attention, and every other one has its gate within the product;
        drawing: "greedy", "plain" or "filtered".
        """
        self.sizes = sizes
        self.gates = nth % 2 == 0
        self.is_greedy, self.needs_filter = drawing == "greedy", drawing == "filtered"
        self.generator = torch.Generator(device).manual_seed(sizes.rows)
        self.device = device
        context = make_context(device, Picker(device, nth))
        self.linear, self.gated, self.attention = Linear(context), GatedLinear(context), PagedAttention(context)
        heads, hidden, inner = sizes.heads + 2 * sizes.kv_heads, sizes.hidden, sizes.inner
        self.table, self.head = self.weight(sizes.vocab, hidden, 1.0), self.weight(sizes.vocab, hidden)
        self.norms = [self.weight(2, hidden, 1.0) for _ in range(sizes.layers)]
        self.head_norms = [self.weight(2, sizes.head_dim, 1.0) for _ in range(sizes.layers)]
        self.qkv = [self.weight(heads * sizes.head_dim, hidden) for _ in range(sizes.layers)]
        self.biases = [self.weight(1, heads * sizes.head_dim)[0] for _ in range(sizes.layers)]
        self.out = [self.weight(hidden, sizes.heads * sizes.head_dim) for _ in range(sizes.layers)]
        self.up = [self.weight(2 * inner, hidden) for _ in range(sizes.layers)]
        self.down = [self.weight(hidden, inner) for _ in range(sizes.layers)]
        self.cos_sin = torch.rand(sizes.pages * PAGE_SIZE, sizes.head_dim, generator=self.generator, device=device)
        self.parameters = self._parameters()
        self.state = self._state()
        self.kv = [self.state[f"kv{layer}"] for layer in range(sizes.layers)]
        self.slots = SlotTensors(*(self.state[field.name] for field in fields(SlotTensors)))
        self.rows = torch.arange(sizes.rows, device=device)
        vectors = torch.zeros(4, sizes.rows, dtype=torch.int64, device=device).unbind(0)
        table = torch.zeros(sizes.rows, sizes.pages, dtype=torch.int32, device=device)
        self.inputs = StepInputs(*vectors, table)
        self.begin = {name: values.clone() for name, values in self.state.items()}

    def weight(self, rows: int, columns: int, scale: float | None = None) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self.generator, device=self.device)
        return (drawn * (columns**-0.5 if scale is None else scale)).to(torch.bfloat16)

    def _parameters(self) -> tuple[Tensor, ...]:
        """Temperature, top_k, top_p, min_p and seeds of the rows."""

        def of_rows(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((self.sizes.rows,), value, dtype=dtype, device=self.device)

        top_k, top_p = (40, 0.9) if self.needs_filter else (0, 1.0)
        filters = of_rows(top_k, torch.int64), of_rows(top_p, torch.float32), of_rows(0.0, torch.float32)
        seeds = torch.arange(self.sizes.rows, dtype=torch.int64, device=self.device)
        return of_rows(0.0 if self.is_greedy else 1.0, torch.float32), *filters, seeds

    def _state(self) -> dict[str, Tensor]:
        """What steps change; rows begin with contexts of various lengths."""
        sizes, device = self.sizes, self.device
        num_slots = sizes.rows + 1
        most = sizes.pages * PAGE_SIZE - sizes.steps
        pages = torch.randperm(num_slots * sizes.pages, generator=self.generator, device=device) + 1
        seq_len = torch.arange(1, num_slots + 1, device=device) * most // num_slots
        seq_len[-1] = 0
        ended = torch.zeros(num_slots, dtype=torch.bool, device=device)
        ended[-1] = True
        state = {
            "seq_len": seq_len,
            "last_token": torch.arange(num_slots, device=device),
            "ended": ended,
            "stop_ids": torch.full((num_slots, 2), -1, dtype=torch.int32, device=device),
            "page_table": pages.view(num_slots, sizes.pages).to(torch.int32),
        }
        width = 2 * PAGE_SIZE * sizes.kv_heads * sizes.head_dim
        for layer in range(sizes.layers):
            kv = self.weight(num_slots * sizes.pages + 1, width, 1.0)
            state[f"kv{layer}"] = kv.view(-1, 2, PAGE_SIZE, sizes.kv_heads, sizes.head_dim)
        return state

    def restart(self) -> None:
        for name, values in self.state.items():
            values.copy_(self.begin[name])

    def step(self) -> Tensor:
        """The logits of one step; the drawn tokens are in the slots."""
        sizes, inputs, rows = self.sizes, self.inputs, self.sizes.rows
        step_inputs(self.rows, None, None, self.slots, PAGE_SIZE, 0, True, inputs)
        longest = sizes.pages * PAGE_SIZE
        batch = AttentionBatch(np.ones(rows, np.int32), inputs.kv_lens, longest, inputs.page_table, PAGE_SIZE)
        spec = AttentionSpec(sizes.head_dim**-0.5)
        residual = x = embed(self.table, inputs.tokens)
        for layer in range(sizes.layers):
            norms = self.norms[layer]
            if layer == 0:
                x = rms_norm(x, norms[0], EPS)
            else:
                x, residual = add_rms_norm(x, residual, norms[0], EPS)
            qkv = self.linear(x, self.qkv[layer], self.biases[layer]).view(rows, -1, sizes.head_dim)
            q, k, v = qkv.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
            q_norm, k_norm = self.head_norms[layer]
            kv = self.kv[layer]
            rope_store(q, k, v, inputs.positions, self.cos_sin, kv, inputs.locations, q_norm, k_norm, EPS)
            x = self.linear(self.attention(q, kv, batch, spec).view(rows, -1), self.out[layer], None)
            x, residual = add_rms_norm(x, residual, norms[1], EPS)
            if self.gates:
                x = self.gated(x, self.up[layer], None)
            else:
                x = silu_and_mul(self.linear(x, self.up[layer], None))
            x = self.linear(x, self.down[layer], None)
        x, residual = add_rms_norm(x, residual, self.norms[0][0], EPS)
        logits = self.linear(x, self.head, None)
        drawn = sample(
            logits, *self.parameters, inputs.kv_lens, needs_filter=self.needs_filter, all_greedy=self.is_greedy
        )
        advance_ends(self.slots, self.rows, drawn)
        return logits


@pytest.fixture
def either_way() -> Iterator[Callable[[bool], None]]:
    """Decides whether kernels that are launched from now on take part."""
    with ExitStack() as stack:
        yield lambda takes_part: stack.enter_context(pdl.dependent_launch(takes_part))


def captured(steps: Steps) -> Callable[[], Tensor]:
    steps.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = steps.step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def outcome(steps: Steps, step: Callable[[], Tensor], num_steps: int) -> dict[str, Tensor]:
    """The logits of all steps, and what they have left in the slots and the pages."""
    steps.restart()
    logits = torch.empty(num_steps, steps.sizes.rows, steps.sizes.vocab, dtype=torch.bfloat16, device=steps.device)
    for into in logits:
        into.copy_(step())
    return {"logits": logits, **{name: values.clone() for name, values in steps.state.items()}}


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert not wanted["logits"].isnan().any()
    for name, values in wanted.items():
        assert torch.equal(got[name], values), name


@pytest.mark.parametrize("drawing", ["greedy", "plain", "filtered"])
@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("nth", range(4))
def test_replayed_steps(either_way: Callable[[bool], None], nth: int, rows: int, drawing: str) -> None:
    either_way(False)
    sizes = Sizes(rows)
    waiting = Steps(sizes, CUDA, nth, drawing)
    wanted = outcome(waiting, captured(waiting), sizes.steps)
    # Tokens that differ, and so inputs that do.
    assert wanted["logits"].float().argmax(-1).unique().numel() > 20
    either_way(True)
    early = Steps(sizes, CUDA, nth, drawing)
    step = captured(early)
    for _ in range(2):
        assert_same(outcome(early, step, sizes.steps), wanted)


@pytest.mark.parametrize("rows", [1, 32])
def test_steps_launched_one_by_one(either_way: Callable[[bool], None], rows: int) -> None:
    either_way(False)
    waiting = Steps(Sizes(rows), CUDA, 0, "filtered")
    wanted = outcome(waiting, waiting.step, 40)
    either_way(True)
    early = Steps(Sizes(rows), CUDA, 0, "filtered")
    assert_same(outcome(early, early.step, 40), wanted)
