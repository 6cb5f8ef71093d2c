"""The structs that Python and the C++ kernels share; src/abi.h says what their fields mean."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from typing import ClassVar

ABI = 4
"""Changes with every change of these structs; a library of another number is not used."""


class Packing(IntEnum):
    """How a matrix's elements are stored; named after the GGUF type they come from."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7


class KvType(IntEnum):
    """Element type of KV pages."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3


class Matrix(Structure):
    _fields_ = (("packing", c_int64), ("rows", c_int64), ("cols", c_int64), ("data", c_void_p))


class KvPages(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("type", c_int64),
        ("page_size", c_int64),
        ("page_stride", c_int64),
        ("half_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
    )


class Args(Structure):
    """Arguments of one op. `BUFFERS` are the fields that may point into a step's own memory."""

    KIND: ClassVar[int]
    BUFFERS: ClassVar[tuple[str, ...]]


class EmbedArgs(Args):
    KIND = 0
    BUFFERS = ("ids", "out")
    _fields_ = (("table", c_void_p), ("ids", c_void_p), ("out", c_void_p), ("out_stride", c_int64))


class QuantiseArgs(Args):
    KIND = 1
    BUFFERS = ("x", "out")
    _fields_ = (("x", c_void_p), ("x_stride", c_int64), ("out", c_void_p), ("dim", c_int64))


class NormArgs(Args):
    KIND = 2
    BUFFERS = ("x", "residual", "out", "codes")
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("codes", c_void_p),
        ("dim", c_int64),
        ("eps", c_double),
    )


class LinearArgs(Args):
    KIND = 3
    BUFFERS = ("x", "out")
    _fields_ = (
        ("matrices", c_void_p),
        ("num_matrices", c_int64),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )


class GatedLinearArgs(Args):
    KIND = 4
    BUFFERS = ("x", "out")
    _fields_ = (("matrices", c_void_p), ("x", c_void_p), ("bias", c_void_p), ("out", c_void_p))


class RopeStoreArgs(Args):
    KIND = 5
    BUFFERS = ("q", "k", "v", "positions", "locations")
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("token_stride", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_double),
        ("positions", c_void_p),
        ("locations", c_void_p),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("kv", KvPages),
    )


class TreeArgs(Structure):
    """The trees that a step's rows add; all null: there are none."""

    _fields_ = (("visible", c_void_p), ("stride", c_int64), ("depths", c_void_p))


class AttentionArgs(Args):
    KIND = 6
    BUFFERS = ("q", "out", "q_lens", "kv_lens", "page_table")
    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_double),
        ("window", c_int64),
        ("q_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("page_table", c_void_p),
        ("page_table_stride", c_int64),
        ("kv", KvPages),
        ("tree", c_void_p),
    )


class ArgmaxArgs(Args):
    KIND = 7
    BUFFERS = ("logits", "tokens")
    _fields_ = (("logits", c_void_p), ("vocab", c_int64), ("stride", c_int64), ("tokens", c_void_p))


class SampleArgs(Args):
    KIND = 8
    BUFFERS = ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", "tokens")
    _fields_ = (
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("stride", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("needs_filter", c_int64),
        ("purpose", c_int64),
        ("tokens", c_void_p),
    )


class ScoreArgs(Args):
    KIND = 9
    BUFFERS = ("logits", "tokens", "chosen", "ids", "tops")
    _fields_ = (
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("stride", c_int64),
        ("tokens", c_void_p),
        ("width", c_int64),
        ("chosen", c_void_p),
        ("ids", c_void_p),
        ("tops", c_void_p),
    )


class CopyArgs(Args):
    KIND = 10
    BUFFERS = ("x", "out")
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("dim", c_int64),
        ("adds", c_int64),
    )


class StepInputs(Structure):
    """Where a step's inputs come from (the slots) and where a program has them; src/abi.h."""

    _fields_ = (
        ("seq_len", c_void_p),
        ("last_token", c_void_p),
        ("slot_pages", c_void_p),
        ("pages_stride", c_int64),
        ("page_size", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("locations", c_void_p),
        ("q_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("page_table", c_void_p),
    )


class Op(Structure):
    _fields_ = (("kind", c_int64), ("args", c_void_p))


def op(args: Args) -> Op:
    """The op of some arguments, which must outlive it."""
    return Op(args.KIND, ctypes.addressof(args))
