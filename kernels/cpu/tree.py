"""The trees of drafted tokens that a step's rows add, as the CPU kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kernels.attention import TreeMask
from kernels.cpu.abi import TreeArgs

MAX_TREE_TOKENS = 256
"""The most tokens that a row of a step with a tree adds."""


class StepTrees:
    """What attention reads at every run: the trees that were `set`, or none. One for all layers."""

    def __init__(self) -> None:
        self._args = TreeArgs()
        self._kept: tuple[Tensor, ...] = ()
        self.address = ctypes.addressof(self._args)

    def set(self, tree: TreeMask, q_lens: np.ndarray) -> None:
        """Attention of a step of these rows goes by `tree`, until `clear`.

        q_lens: as AttentionBatch's, MAX_TREE_TOKENS at most. What is dense in the mask is not copied: leave it alone.
        """
        visible, depths = tree.visible, tree.depths
        num_tokens, longest = int(q_lens.sum()), int(q_lens.max(initial=0))
        assert longest <= MAX_TREE_TOKENS, f"a row adds {longest} tokens; with a tree {MAX_TREE_TOKENS} can be had"
        assert visible.dtype == torch.bool and depths.dtype == torch.int32, (visible.dtype, depths.dtype)
        assert visible.device.type == depths.device.type == "cpu"
        assert visible.shape[0] >= num_tokens and visible.shape[1] >= longest, tuple(visible.shape)
        assert len(depths) >= num_tokens, len(depths)
        visible = visible if visible.stride(1) == 1 else visible.contiguous()
        depths = depths.contiguous()
        self._kept = (visible, depths)
        self._args.visible, self._args.stride = visible.data_ptr(), visible.stride(0)
        self._args.depths = depths.data_ptr()

    def clear(self) -> None:
        """No trees: a token sees all of its row up to itself."""
        self._args.visible, self._args.stride, self._args.depths = None, 0, None
        self._kept = ()

    @contextmanager
    def of(self, tree: TreeMask | None, q_lens: np.ndarray) -> Generator[None]:
        """`set` in here; nothing where `tree` is None."""
        if tree is None:
            yield
            return
        self.set(tree, q_lens)
        try:
            yield
        finally:
            self.clear()
