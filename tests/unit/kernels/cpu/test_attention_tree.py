"""Attention of the CPU kernels over trees of drafted tokens: every node gets the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import TreeMask
from kernels.cpu import attention
from kernels.cpu.tree import MAX_TREE_TOKENS
from tests.support.packed import instruction_sets, needs_kernels, using
from tests.support.paged_rows import Context, Shape, Step

pytestmark = needs_kernels

INSTRUCTIONS = instruction_sets()
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# All of them take minutes: the one that this machine runs is quick, the others are slow.
every_isa = pytest.mark.parametrize(
    "isa", [isa if isa == INSTRUCTIONS[-1] else pytest.param(isa, marks=pytest.mark.slow) for isa in INSTRUCTIONS]
)
SMALL = Shape(9, 3, 64)
SHAPES = (SMALL, Shape(2, 2, 64), Shape(8, 2, 128), Shape(3, 1, 128), Shape(4, 1, 40))
# (nodes, context before the step) of each row: paths end before, on and after the edges of blocks and partitions.
ROWS = ((8, 0), (1, 0), (5, 40), (17, 58), (9, 64), (20, 150), (7, 250), (64, 240), (12, 255), (9, 256), (6, 300))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "empty", lambda *shape: torch.full(shape, torch.nan))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's threads spin where ours want to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Trees:
    """A step whose rows add random trees, and the paths to their nodes."""

    def __init__(self, rows: Sequence[tuple[int, int]], shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        self.contexts = [Context(shape, before + nodes, seed + i, dtype) for i, (nodes, before) in enumerate(rows)]
        self.rows = [(context, nodes, context.length) for context, (nodes, _) in zip(self.contexts, rows, strict=True)]
        random = np.random.default_rng(seed)
        self.paths = [_random_paths(nodes, random) for nodes, _ in rows]
        self.mask = _mask(self.paths, max(nodes for nodes, _ in rows) + 3, random)
        self.max_depth = int(self.mask.depths.max())

    def step(self, page_size: int, window: int | None) -> Step:
        return Step(self.rows, page_size, window=window, tree=self.mask)

    def decoded(self, page_size: int, window: int | None) -> Tensor:
        """What each node gets from a step of its own, after its ancestors."""
        rows = []
        for (context, nodes, length), paths in zip(self.rows, self.paths, strict=True):
            before = length - nodes
            for path in paths:
                order = [*range(before), *(before + node for node in path)]
                rows.append((context.at(order), 1, len(order)))
        return Step(rows, page_size, window=window).run()


def _random_paths(nodes: int, random: np.random.Generator) -> list[list[int]]:
    """Of each node, its ancestors from the root on and itself; in half of the trees, nodes are in any order."""
    paths: list[list[int]] = []
    order = random.permutation(nodes) if random.random() < 0.5 else np.arange(nodes)
    for j, node in enumerate(order.tolist()):
        parent = j - 1 if random.random() < 0.5 else int(random.integers(-1, j)) if j else -1
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return sorted(paths, key=lambda path: path[-1])


def _mask(paths: Sequence[list[list[int]]], width: int, random: np.random.Generator) -> TreeMask:
    """What is behind a row's own columns means nothing."""
    nodes = [(path, len(row)) for row in paths for path in row]
    visible = random.random((len(nodes), width)) < 0.5
    for token, (path, row_tokens) in enumerate(nodes):
        visible[token, :row_tokens] = False
        visible[token, path] = True
    depths = np.array([len(path) - 1 for path, _ in nodes], dtype=np.int32)
    return TreeMask(torch.from_numpy(visible), torch.from_numpy(depths))


def _chains(q_lens: Sequence[int]) -> TreeMask:
    width = max(q_lens)
    visible = torch.cat([torch.ones(q_len, width, dtype=torch.bool).tril() for q_len in q_lens])
    return TreeMask(visible, torch.cat([torch.arange(q_len, dtype=torch.int32) for q_len in q_lens]))


@every_isa
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_node_gets_the_bits_of_decoding(isa: str, dtype: torch.dtype, shape: Shape) -> None:
    trees = Trees(ROWS, shape, dtype)
    with using(isa):
        for page_size, window in ((1, None), (7, trees.max_depth + 1), (16, 100), (16, 259)):
            step = trees.step(page_size, window)
            out, expected = step.run(), step.expected()
            assert torch.equal(out, trees.decoded(16, window))
            error = float((out - expected).abs().max() / expected.abs().max())
            assert error < (0.02 if dtype == torch.int8 else 1e-5)


@every_isa
@every_dtype
@pytest.mark.parametrize(
    "before", [31, 256, *(pytest.param(before, marks=pytest.mark.slow) for before in (0, 1, 63, 127, 200, 251, 300))]
)
def test_contexts(isa: str, dtype: torch.dtype, before: int) -> None:
    """Of one row, on the direct way and on that of panels."""
    for nodes in (2, 8, 30):
        trees = Trees([(nodes, before)], SMALL, dtype, seed=before + nodes)
        with using(isa):
            assert torch.equal(trees.step(16, None).run(), trees.decoded(7, None))


@every_isa
@every_dtype
@pytest.mark.parametrize("window", [1, 3, 70])
def test_a_window_hides_no_node(isa: str, dtype: torch.dtype, window: int) -> None:
    """Of the step's own tokens the mask alone decides, of the context the window and the depth."""
    step = Trees(ROWS, SMALL, dtype).step(7, window)
    with using(isa):
        expected = step.expected()
        error = float((step.run() - expected).abs().max() / expected.abs().max())
    assert error < (0.02 if dtype == torch.int8 else 1e-5)


@every_isa
@every_dtype
@pytest.mark.parametrize(
    "shape",
    [SMALL, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (Shape(4, 4, 80), Shape(8, 2, 128)))],
    ids=str,
)
def test_a_chain_is_no_tree(isa: str, dtype: torch.dtype, shape: Shape) -> None:
    rows = [(8, 8), (1, 1), (3, 2000), (64, 300), (30, 270), (8, 900)]
    contexts = [(Context(shape, length, i, dtype), q_len, length) for i, (q_len, length) in enumerate(rows)]
    for window in (None, 64, 259):
        plain, chains = (
            Step(contexts, 16, window=window, tree=tree) for tree in (None, _chains([q_len for q_len, _ in rows]))
        )
        for threads in (1, 2, 3):
            with using(isa, threads):
                assert torch.equal(chains.run(), plain.run())


@every_isa
@every_dtype
def test_long_contexts_are_shared_out(isa: str, dtype: torch.dtype) -> None:
    """One row, whose partitions go to several threads, on both ways."""
    for nodes in (5, 40):
        trees = Trees([(nodes, 2040)], Shape(6, 2, 16), dtype, seed=nodes)
        with using(isa, threads=1):
            expected = trees.decoded(16, None)
        for threads in (1, 2, 3, 5):
            with using(isa, threads):
                assert torch.equal(trees.step(16, None).run(), expected)


@every_isa
@every_dtype
@pytest.mark.parametrize("nodes", [8, 40])
def test_nan_is_seen_by_descendants(isa: str, dtype: torch.dtype, nodes: int) -> None:
    trees = Trees([(nodes, 100)], SMALL, dtype, seed=3)
    clean = trees.step(16, None)
    sees = trees.mask.visible[:, 2]
    place = 102
    with using(isa):
        expected = clean.run()
        for half in (0, 1):
            bad = clean.kv.clone()
            spot = bad[clean.batch.page_table[0, place // 16], half, place % 16, 1]
            if dtype == torch.int8:
                spot[64:] = -1
            else:
                spot[5] = torch.nan
            out = clean.run(kv=bad)
            assert out[sees, 3:6].isnan().any(-1).all()
            out[sees, 3:6] = expected[sees, 3:6]
            assert torch.equal(out, expected)


@every_isa
def test_masks_of_any_strides(isa: str) -> None:
    trees = Trees([(8, 30), (3, 9)], SMALL, torch.float16)
    with using(isa):
        expected = trees.step(16, None).run()
        visible, depths = trees.mask.visible, trees.mask.depths
        wide = torch.stack((depths, depths + 1), 1)[:, 0]
        for other in (visible.T.contiguous().T, torch.cat((visible, visible), 1)[:, : visible.shape[1]]):
            trees.mask = TreeMask(other, wide)
            step = trees.step(16, None)
            assert torch.equal(step.run(), expected)
            assert torch.equal(step.run(), expected)


@every_isa
def test_most_tokens(isa: str) -> None:
    trees = Trees([(MAX_TREE_TOKENS, 20), (2, 20)], Shape(2, 1, 16), torch.float32)
    with using(isa):
        assert torch.equal(trees.step(16, None).run(), trees.decoded(16, None))
        with pytest.raises(AssertionError, match="257 tokens; with a tree 256"):
            Trees([(MAX_TREE_TOKENS + 1, 0)], Shape(2, 1, 16), torch.float32).step(16, None).run()
