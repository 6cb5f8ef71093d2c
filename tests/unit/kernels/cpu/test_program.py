"""Recorded passes: the same result as call by call, in an arena that no two living buffers share."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBatch, AttentionSpec, TreeMask
from kernels.cpu import attention, linear, native, norm
from kernels.cpu.matrix import PackedLinear, pack
from kernels.cpu.program import Program, Recording
from tests.support.packed import needs_kernels, random_rows, using

pytestmark = needs_kernels

DIM = 64


class _Block:
    """A residual block like a decoder's."""

    def __init__(self, seed: int) -> None:
        self.first = PackedLinear(
            [pack(random_rows("Q4_1", 96, DIM, seed)), pack(random_rows("Q8_0", 96, DIM, 9))], None
        )
        self.second = PackedLinear([pack(random_rows("Q8_0", DIM, 96, seed + 50))], torch.randn(DIM))
        self.weight = torch.randn(DIM)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, residual = norm.add_norm_rows(x, residual, self.weight, 1e-5)
        return linear.packed_linear(self.second, linear.packed_gated_linear(self.first, rows)), residual


class _Model:
    def __init__(self) -> None:
        self.table = pack(torch.randn(50, DIM))
        self.blocks = [_Block(seed) for seed in range(4)]
        self.weight = torch.randn(DIM)

    def __call__(self, ids: torch.Tensor, recording: Recording | None = None) -> torch.Tensor:
        residual = linear.packed_embed(self.table, ids)
        x = norm.rms_norm(residual, self.weight, 1e-5)
        for block in self.blocks:
            x, residual = block(x, residual)
            if recording is not None:
                recording.mark()
        return norm.add_rms_norm(x, residual, self.weight, 1e-5)[0]


def _recorded(model: _Model, ids: torch.Tensor) -> Program:
    recording = Recording(len(ids), 1)
    with recording.taking():
        hidden = model(ids, recording)
    return recording.finish(hidden)


def test_a_program_gives_what_its_calls_gave() -> None:
    model, ids = _Model(), torch.zeros(40, dtype=torch.int64)
    with using(threads=2):
        program = _recorded(model, ids)
        for num_tokens in (1, 40, 3, 17):
            ids[:num_tokens] = torch.randint(0, 50, (num_tokens,))
            expected = model(ids[:num_tokens])
            program.run(num_tokens, 1)
            assert torch.equal(program.results[0][:num_tokens], expected)
            program.results[0].zero_()
            parts: list[int] = []
            program.run_in_parts(num_tokens, 1, lambda parts=parts: parts.append(1))
            assert torch.equal(program.results[0][:num_tokens], expected)
            assert len(parts) == 5


def test_runs_with_trees_and_without() -> None:
    num_tokens, num_rows, page_size = 12, 2, 4
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    kv = torch.randn(20, 2, page_size, 2, 16)
    q_lens, kv_lens = np.array([7, 5], np.int32), torch.tensor([30, 11])
    spec = AttentionSpec(0.25)
    other = kv.flip(0)
    q = torch.randn(num_tokens, 4, 16)
    # Two branches below a root.
    parents = [0, 0, 1, 0, 3, 4, 2]
    visible, depths = torch.zeros(num_tokens, 7, dtype=torch.bool), torch.zeros(num_tokens, dtype=torch.int32)
    for start, nodes in ((0, 7), (7, 5)):
        visible[start, 0] = True
        for node in range(1, nodes):
            visible[start + node] = visible[start + parents[node]]
            visible[start + node, node] = True
            depths[start + node] = depths[start + parents[node]] + 1
    tree = TreeMask(visible, depths)

    def step(tree: TreeMask | None) -> AttentionBatch:
        return AttentionBatch(q_lens, kv_lens, 30, table, page_size, tree)

    with using(threads=2):
        recording = Recording(num_tokens, num_rows)
        with recording.taking():
            # The second layer's queries are what the first gives.
            first = attention.paged_attention(q, kv, step(None), spec)
            program = recording.finish(attention.paged_attention(first, other, step(None), spec))
            with pytest.raises(AssertionError, match="recorded without trees"):
                attention.paged_attention(q, kv, step(tree), spec)
        expected = {
            with_tree: attention.paged_attention(
                attention.paged_attention(q, kv, step(mask), spec), other, step(mask), spec
            )
            for with_tree, mask in ((False, None), (True, tree))
        }
        assert not torch.equal(expected[False], expected[True])
        for with_tree in (False, True, False, True, True):
            with program.trees.of(tree if with_tree else None, q_lens):
                program.run(num_tokens, num_rows)
            assert torch.equal(program.results[0], expected[with_tree])
        with pytest.raises(KeyError), program.trees.of(tree, q_lens):
            raise KeyError
        program.run(num_tokens, num_rows)
        assert torch.equal(program.results[0], expected[False])


def test_buffers_are_reused() -> None:
    model, ids = _Model(), torch.zeros(40, dtype=torch.int64)
    recording = Recording(40, 1)
    taken: list[torch.Tensor] = []
    adopt = recording.adopt

    def counted(tensor: torch.Tensor) -> None:
        taken.append(tensor)
        adopt(tensor)

    recording.adopt = counted  # type: ignore[method-assign]
    with recording.taking():
        hidden = model(ids)
    program = recording.finish(hidden)
    assert program.arena_bytes < sum(tensor.nbytes for tensor in taken) / 2


def test_what_cannot_be_repeated_is_refused() -> None:
    recording = Recording(8, 1)
    with recording.taking(), pytest.raises(ValueError, match="cannot be part of a program"):
        norm.rms_norm(torch.zeros(3, DIM), torch.ones(DIM), 1e-5)
    with pytest.raises(ValueError, match="must be the output"):
        recording.finish(torch.zeros(8, DIM))


def test_runs_from_many_threads_wait_for_each_other() -> None:
    model = _Model()
    ids = torch.randint(0, 50, (6,))
    expected = model(ids)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(1 for _ in range(100) if not torch.equal(model(ids), expected))

    with using(threads=3):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_long_and_short_runs_alternate() -> None:
    """A worker still leaving one run must not take part of the next for it."""
    model, ids = _Model(), torch.zeros(4, dtype=torch.int64)
    with using(threads=4):
        program = _recorded(model, ids)
        expected = model(ids)
        for _ in range(300):
            program.run(4, 1)
            assert torch.equal(program.results[0], expected)
            native.set_threads(4) if _ % 100 == 50 else linear.quantise_rows(torch.zeros(1, 32))


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="such forks may hang in ASan itself")
def test_a_fork_in_the_middle_of_runs_leaves_a_pool_that_works() -> None:
    """In a child of its own: forking the test process beside its threads would be asking for trouble."""
    script = """
import os, threading, torch
from kernels.cpu import linear, native
native.set_threads(2)
x = torch.ones(64, 512)
going = True
def work():
    while going:
        linear.quantise_rows(x)
thread = threading.Thread(target=work)
thread.start()
failed = 0
for _ in range(10):
    child = os.fork()
    if child == 0:
        native.set_threads(2)
        linear.quantise_rows(x)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
going = False
thread.join()
raise SystemExit(failed)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, cwd=Path(__file__).parents[4])
    assert done.returncode == 0
