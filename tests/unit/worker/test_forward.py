"""A recorded pass over packed weights: as good as the float model, and the same bits whatever is computed beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model_files.resolve import resolve
from kernels.attention import AttentionBatch, TreeMask
from kernels.dispatch import can_record, select
from scheduler_proc.cache.kv_pool import KVPool
from scheduler_proc.layers.packed import Packed
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.plan import StepPlan
from scheduler_proc.weights.load import load_weights
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import EagerForward, Forward, Pages
from scheduler_proc.worker.program_forward import ProgramForward
from scheduler_proc.worker.step_arrays import upload_arrays
from scheduler_proc.worker.transfer import Transfer
from tests.support.packed import every_isa, needs_kernels, using
from tests.support.tiny_models import write_tiny_model

pytestmark = needs_kernels

LENGTH = 150
MAX_TOKENS = 160
SLOTS = 4


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    # Rows of 72 and 24 columns are no whole number of blocks.
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), request.param, hidden_size=72, intermediate_size=88)
    files = resolve(str(path))
    kernels = select("cpu", torch.float32, "", packed=True)
    made = Decoder(spec_of(files.config), kernels, "cpu", torch.float32, max_position=512, method=Packed(kernels))
    load_weights(made, files)
    return made


class _Runs:
    """Steps over one pool; row i of a step is slot i."""

    def __init__(
        self, decoder: Decoder, page_size: int = 16, kv: torch.dtype = torch.float16, program: bool = True
    ) -> None:
        shape = decoder.kv_shape
        self.max_pages = -(-LENGTH // page_size)
        self.page_size = page_size
        self.pool = pool = KVPool(
            shape.num_layers,
            SLOTS * self.max_pages + 1,
            page_size,
            shape.num_kv_heads,
            shape.head_dim,
            kv,
            torch.device("cpu"),
        )
        # What nobody wrote must not matter.
        pool.fill(torch.arange(SLOTS * self.max_pages), 1e4)
        self.slots = DeviceSlots(SLOTS, self.max_pages, Transfer(torch.device("cpu")), 1)
        order = torch.randperm(SLOTS * self.max_pages, generator=torch.Generator().manual_seed(page_size))
        self.slots.page_table[:SLOTS].copy_(order.view(SLOTS, self.max_pages))
        pages = Pages(pool.layers, page_size, SLOTS * self.max_pages)
        eager = EagerForward(decoder, self.slots, pages)
        self.forward: Forward = eager
        if program:
            self.forward = ProgramForward(decoder, self.slots, pages, MAX_TOKENS, eager)
        self.hidden: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]

    @torch.inference_mode()
    def step(self, chunks: dict[int, list[int]]) -> None:
        """Add tokens to slots; a single token counts as decoded."""
        slots = sorted(chunks, key=lambda slot: len(chunks[slot]) > 1)
        num_decode = sum(len(chunks[slot]) == 1 for slot in slots)
        for slot in slots[:num_decode]:
            self.slots.last_token[slot] = chunks[slot][0]
        rows = torch.tensor(slots)
        q_lens = np.array([len(chunks[slot]) for slot in slots], np.int32)
        tokens = np.array([token for slot in slots[num_decode:] for token in chunks[slot]], np.int32)
        plan = StepPlan(
            step=0,
            rows=np.array(slots, np.int32),
            num_decode=num_decode,
            q_lens=q_lens,
            kv_lens=self.slots.seq_len[rows].numpy().astype(np.int32) + q_lens,
            tokens=tokens,
            sample=np.ones(len(slots), bool),
            all_greedy=True,
            needs_filter=False,
            rows_version=0,
            slots_version=-1,
            joins=None,
            pages=(None,),
        )
        self.done = done = self.forward(plan, upload_arrays(plan, self.slots.transfer))
        assert torch.equal(self.slots.seq_len[rows], done.kv_lens)
        for slot, states in zip(slots, done.states.split(q_lens.tolist()), strict=True):
            self.hidden[slot].append(states.clone())

    @torch.inference_mode()
    def verify(self, slots: list[int], nodes: list[list[int]], *, as_tree: bool) -> torch.Tensor:
        """States of nodes behind the texts of slots; as_tree: the last of each is its first one's sibling."""
        size, rows = len(nodes[0]), torch.tensor(slots)
        context, page_size = self.slots.seq_len[rows].unsqueeze(1), self.page_size
        inputs = self.forward.room(len(slots) * size, len(slots), self.max_pages)
        depths = torch.arange(size).expand(len(slots), -1).clone()
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        if as_tree:
            depths[:, -1] = 0
            visible[-1, :-1] = False
        places = context + torch.arange(size)
        pages = self.slots.page_table[rows.unsqueeze(1), places // page_size].long()
        inputs.tokens.copy_(torch.tensor(nodes).flatten())
        inputs.positions.copy_((context + depths).flatten())
        inputs.locations.copy_((pages * page_size + places % page_size).flatten())
        inputs.kv_lens.copy_(context.flatten() + size)
        inputs.page_table[:, : self.max_pages] = self.slots.page_table[rows, : self.max_pages]
        tree = TreeMask(visible.repeat(len(slots), 1), depths.flatten().to(torch.int32)) if as_tree else None
        return self.forward.verify(inputs, len(slots), int(inputs.kv_lens.max()), tree)

    def states(self, slot: int) -> torch.Tensor:
        return torch.cat(self.hidden[slot])


def _prompt(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(3, 400, length).tolist()


@every_isa
@pytest.mark.parametrize("kv", [torch.float32, torch.float16, torch.int8])
def test_same_bits_for_every_chunking_page_size_neighbour_and_thread_count(
    decoder: Decoder, isa: str, kv: torch.dtype
) -> None:
    prompt, other = _prompt(1), _prompt(2)
    with using(isa, threads=1):
        whole = _Runs(decoder, kv=kv)
        whole.step({0: prompt})
        expected = whole.states(0)
    assert torch.isfinite(expected).all()
    for chunk, page_size, threads in ((1, 7, 2), (7, 1, 3), (64, 16, 2), (149, 7, 1)):
        with using(isa, threads):
            runs = _Runs(decoder, page_size, kv)
            for begin in range(0, LENGTH, chunk):
                step = {1: prompt[begin : begin + chunk]}
                if begin < 100:
                    step[3] = other[begin : begin + min(chunk, 5)]
                runs.step(step)
        assert torch.equal(runs.states(1), expected), (chunk, page_size, threads)


def test_the_program_is_the_eager_pass(decoder: Decoder) -> None:
    prompt = _prompt(3, 40)
    with using(threads=2):
        program, eager = _Runs(decoder), _Runs(decoder, program=False)
        for runs in (program, eager):
            runs.step({0: prompt, 2: prompt[:9]})
            runs.step({0: [5], 2: [6]})
            runs.step({2: [7], 1: prompt})
        for slot in range(3):
            assert torch.equal(program.states(slot), eager.states(slot))


class _Seen:
    """A follower that keeps all it is shown."""

    def __init__(self, num_layers: int) -> None:
        self.layers = tuple(range(num_layers + 2))
        self.rows: list[tuple[list[int], list[int] | None]] = []
        self.passes: list[list[torch.Tensor]] = []

    def expect(self, rows: torch.Tensor, q_starts: torch.Tensor | None, parents: torch.Tensor | None = None) -> None:
        self.rows.append((rows.tolist(), None if q_starts is None else q_starts.tolist()))

    def follow(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        locations: torch.Tensor,
        states: list[torch.Tensor],
    ) -> None:
        longest = int(batch.kv_lens.max())
        assert longest <= batch.max_kv_len <= batch.page_table.shape[1] * batch.page_size
        table = batch.page_table[:, : -(-int(batch.kv_lens.min()) // batch.page_size)]
        q_lens = torch.from_numpy(batch.q_lens)
        shown = (inputs, positions, locations, q_lens, batch.kv_lens, table, *states)
        self.passes.append([part.clone() for part in shown])


def test_a_follower_sees_of_the_program_what_it_sees_of_the_eager_pass(decoder: Decoder) -> None:
    prompt, seen = _prompt(10, 40), []
    with using(threads=2):
        for is_program in (True, False):
            decoder.follower = follower = _Seen(decoder.spec.num_layers)
            try:
                runs = _Runs(decoder, program=is_program)
                runs.step({0: prompt, 2: prompt[:9]})
                runs.step({0: [5], 2: [6]})
                runs.step({2: [7], 1: prompt})
                runs.verify([0, 2], [[8, 9, 10], [11, 12, 13]], as_tree=False)
                runs.verify([2, 1], [[8, 9, 10], [11, 12, 13]], as_tree=True)
                runs.step({0: [8]})
            finally:
                decoder.follower = None
            seen.append(follower)
    program, eager = seen
    assert program.rows == eager.rows and len(program.passes) == len(eager.passes) == 6
    for got, expected in zip(program.passes, eager.passes, strict=True):
        assert len(got) == len(expected) == 6 + decoder.spec.num_layers + 2
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def test_the_program_is_near_the_reference_operations(decoder: Decoder) -> None:
    reference = select("cpu", torch.float32, "", packed=False)
    assert can_record(decoder.kernels) and not can_record(reference)
    prompt = _prompt(4, 60)
    with using(threads=2):
        native = _Runs(decoder, kv=torch.float32)
        native.step({0: prompt})
        slow = _with_kernels(decoder, reference)
        expected = _Runs(slow, kv=torch.float32, program=False)
        expected.step({0: prompt})
    got, want = native.states(0), expected.states(0)
    # Codes of activations that lie between two steps may fall either way.
    assert float((got - want).norm() / want.norm()) < 0.02


def _with_kernels(decoder: Decoder, kernels: object) -> Decoder:
    """The same packed weights, by other operations."""
    made = Decoder(decoder.spec, kernels, "cpu", torch.float32, max_position=512, method=Packed(kernels))  # type: ignore[arg-type]
    for name in ("_embed", "_lm_head"):
        getattr(made, name)._weight._parts = getattr(decoder, name)._weight._parts
    for mine, theirs in zip(made._layers, decoder._layers, strict=True):
        for one, other in (
            (mine.attn._qkv, theirs.attn._qkv),
            (mine.attn._o, theirs.attn._o),
            (mine.mlp._gate_up, theirs.mlp._gate_up),
            (mine.mlp._down, theirs.mlp._down),
        ):
            one._weight._parts, one._weight._bias = other._weight._parts, other._weight._bias  # type: ignore[attr-defined]
        mine.attn_norm.weight.copy_(theirs.attn_norm.weight)
        mine.mlp_norm.weight.copy_(theirs.mlp_norm.weight)
        for mine_norm, their_norm in zip(mine.attn._norms(), theirs.attn._norms(), strict=True):
            mine_norm.weight.copy_(their_norm.weight)
    made._norm.weight.copy_(decoder._norm.weight)
    return made


def test_logits_come_with_a_decode_step_unless_it_is_large(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = _prompt(8, 12)
    with using(threads=2):
        runs = _Runs(decoder)
        runs.step({0: prompt, 1: prompt})
        assert runs.done.logits is None
        runs.step({0: [5], 1: [6]})
        logits = runs.done.logits
        assert logits is not None and runs.done.likeliest is not None
        assert torch.equal(logits, decoder.logits(runs.done.states))
        assert torch.equal(runs.done.likeliest, logits.argmax(-1).to(torch.int32))
        monkeypatch.setattr("scheduler_proc.worker.program_forward.HEAD_ROWS", 1)
        small = _Runs(decoder)
        small.step({0: prompt, 1: prompt})
        small.step({0: [5], 1: [6]})
        assert small.done.logits is None
        assert torch.equal(small.states(1), runs.states(1))


def test_steps_longer_than_the_program_run_eagerly(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = _prompt(9, 50)
    with using(threads=2):
        expected = _Runs(decoder)
        expected.step({0: prompt})
        monkeypatch.setattr("scheduler_proc.worker.program_forward.PROGRAM_TOKENS", 20)
        runs = _Runs(decoder)
        runs.step({0: prompt[:30]})
        runs.step({0: prompt[30:]})
        runs.step({1: prompt[:20]})
    assert torch.equal(runs.states(0), expected.states(0))
    assert torch.equal(runs.states(1), expected.states(0)[:20])


def test_long_steps_show_signs_of_life(decoder: Decoder) -> None:
    beats: list[int] = []
    decoder.on_layer = lambda: beats.append(1)
    try:
        with using(threads=2):
            runs = _Runs(decoder)
            runs.step({0: _prompt(5, 4)})
            assert not beats
            runs.step({1: _prompt(5, 50)})
        assert len(beats) == decoder.spec.num_layers + 1
    finally:
        decoder.on_layer = lambda: None


def test_a_nan_stays_in_its_row(decoder: Decoder) -> None:
    with using(threads=2):
        clean = _Runs(decoder)
        clean.step({0: _prompt(6, 20), 1: _prompt(7, 20)})
        runs = _Runs(decoder)
        runs.step({0: _prompt(6, 19), 1: _prompt(7, 19)})
        # The first key of slot 0 in every layer.
        page = int(runs.slots.page_table[0, 0])
        for layer in runs.pool.layers:
            layer[page, 0, 0] = float("nan")
        runs.step({0: _prompt(6, 20)[19:], 1: _prompt(7, 20)[19:]})
    assert runs.hidden[0][-1].isnan().all()
    assert torch.equal(runs.hidden[1][-1], clean.states(1)[-1:])
