"""The dense product on CUDA: kernels of our own for few tokens, where the weights' bytes are the cost; else torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda.activation import silu_and_mul
from kernels.cuda.context import Context
from kernels.cuda.pdl import can, is_wanted
from kernels.cuda.small_gemm_launch import (
    DTYPES,
    MAX_TOKENS,
    TOKEN_CLASSES,
    Config,
    configs,
    default_name,
    token_class,
)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What has the signature of `kernels.linear.linear`."""


class Linear:
    """`kernels.linear.linear`; rows of x and of weight may be any distance apart.

    Up to MAX_TOKENS tokens in bfloat16 or float16, whatever was fastest for the shape and the class of num_tokens (1,
    up to 8, up to 16 and so on): sums in fp32 are rounded once, after the bias. A token's result does not depend on the
    other tokens, nor, within a class, on how many there are, unless torch was chosen. Repeated calls agree to the bit.
    """

    op = "linear"
    gated = False

    def __init__(self, context: Context, *, pdl: bool | None = None) -> None:
        """pdl: begin, with loads of weights, before the kernel before has ended (programmatic dependent launch), on
        devices that can; then that kernel must not write the weights. None: as all kernels do.
        """
        self._tuner = context.tuner
        self._tickets = context.tickets
        device = context.device
        self._pdl = None if pdl is None else pdl and can(device)
        self._classes = {kind: configs(kind, gated=self.gated) for kind in TOKEN_CLASSES}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `kernels.linear`."""
        num_tokens, in_dim = x.shape
        if not 0 < num_tokens <= MAX_TOKENS or not _fit(x, weight, bias):
            return self._torch(x, weight, bias)
        kind = token_class(num_tokens)
        found = self._classes[kind]
        # Where rows do not start at multiples of 16 numbers, loads are narrow: the kernels are right but slow then.
        aligned = in_dim % 16 == 0 and weight.stride(0) % 16 == 0
        key = (kind, weight.shape[0], in_dim, str(x.dtype), int(bias is not None), int(aligned))
        name = self._tuner.known(self.op, key)
        if name is None:
            runs: dict[str, Callable[[], Tensor]] = {
                name: partial(self._run, config, x, weight, bias) for name, config in found.items()
            }
            runs["torch"] = partial(self._torch, x, weight, bias)
            name = self._tuner.choose(self.op, key, runs, default_name(num_tokens) if aligned else "torch")
        return self._torch(x, weight, bias) if name == "torch" else self._run(found[name], x, weight, bias)

    def candidates(self, num_tokens: int) -> dict[str, Product]:
        """Every implementation that may be chosen for so many tokens (1 to MAX_TOKENS), by name, to time it."""
        found: dict[str, Product] = {
            name: partial(self._run, config) for name, config in self._classes[token_class(num_tokens)].items()
        }
        return {**found, "torch": self._torch}

    def _run(self, config: Config, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.stride(1) == 1 and weight.stride(1) == 1, "rows must be dense"
        assert weight.dtype == x.dtype and weight.shape[1] == x.shape[1], (weight.dtype, weight.shape, x.shape)
        assert bias is None or bias.stride(0) == 1, "the bias must be dense"
        out_dim = weight.shape[0]
        out = torch.empty((x.shape[0], out_dim // 2 if self.gated else out_dim), dtype=x.dtype, device=x.device)
        pdl = is_wanted(x) if self._pdl is None else self._pdl
        config.launch(x, weight, bias, out, self._tickets, gated=self.gated, pdl=pdl)
        return out

    def _torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our kernels take these; torch takes anything."""
    dense = x.stride(1) == weight.stride(1) == 1 and (bias is None or bias.stride(0) == 1)
    return dense and x.dtype in DTYPES and x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)


class GatedLinear(Linear):
    """`kernels.linear.gated_linear`, as Linear: gate and up are rounded, then silu, then the product, as in torch."""

    op = "gated_linear"
    gated = True

    def _torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return silu_and_mul(F.linear(x, weight, bias))
