"""cuBLASLt's own algorithms for a dense product, one by one: what cuBLAS would take by its rules is not always fastest.

The library is the one that torch has loaded; its functions are called through ctypes. Products are column-major there:
out^T `[N, M]` = weight^T (which its memory is) transposed, times x^T.
Source: the reference of cuBLASLt, https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 << 20
"""What algorithms may use: as much as torch gives them on Hopper."""
MOST_ALGORITHMS = 8
"""How many are asked for; they come in the order of what cuBLAS expects of them."""

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_TRANSPOSED = 1
_DESC_TRANSA = 3
_PREF_MAX_WORKSPACE_BYTES = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A way to do one product, of one version of the library."""

    name: str
    """Made of its configuration: the same whenever it is the same."""
    raw: _Algorithm


@dataclass(eq=False)
class _Product:
    """Sizes, strides and types, as the library wants to be told of them."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithms: Mapping[str, Algorithm] | None = None
    """By name; None: not asked for yet."""


class CublasLt:
    """The library on one device. What runs at a time must be on one stream: all share a workspace."""

    def __init__(self, library: Any, device: torch.device) -> None:
        """library: what ctypes loaded. Raises RuntimeError if it does not work."""
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(self._preference))
        most = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            *(self._preference, ctypes.c_int(_PREF_MAX_WORKSPACE_BYTES), ctypes.byref(most), ctypes.c_size_t(8)),
        )
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._products: dict[tuple[object, ...], _Product] = {}

    def algorithms(self, x: Tensor, weight: Tensor) -> Mapping[str, Algorithm]:
        """Those for `x @ weight.T` by name, the one that the library expects most of first; none for what it refuses.

        x: `[tokens, in_dim]`, weight: `[out_dim, in_dim]`, rows dense, both bfloat16, float16 or float32.
        """
        product = self._product(x, weight)
        if product.algorithms is None:
            product.algorithms = {each.name: each for each in self._found(product)}
        return product.algorithms

    def _found(self, product: _Product) -> list[Algorithm]:
        found = (_Heuristic * MOST_ALGORITHMS)()
        count = ctypes.c_int()
        try:
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(self._handle, product.operation, product.weight, product.x, product.out, product.out),
                *(self._preference, ctypes.c_int(MOST_ALGORITHMS), found, ctypes.byref(count)),
            )
        except RuntimeError as error:
            log.debug("event=no_algorithms reason=%s", error)
            return []
        usable = [_Algorithm.from_buffer_copy(each.algorithm) for each in found[: count.value] if each.status == 0]
        return [Algorithm(hashlib.sha256(bytes(raw)).hexdigest()[:8], raw) for raw in usable]

    def run(self, algorithm: Algorithm, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T`, for arguments of the sizes and strides that the algorithm is for; summed in float32."""
        product = self._product(x, weight)
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        self._call(
            "cublasLtMatmul",
            *(self._handle, product.operation, ctypes.byref(self._one)),
            *(ctypes.c_void_p(weight.data_ptr()), product.weight, ctypes.c_void_p(x.data_ptr()), product.x),
            *(ctypes.byref(self._zero), ctypes.c_void_p(out.data_ptr()), product.out),
            *(ctypes.c_void_p(out.data_ptr()), product.out, ctypes.byref(algorithm.raw)),
            *(ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES)),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return out

    def _product(self, x: Tensor, weight: Tensor) -> _Product:
        (num_tokens, in_dim), out_dim = x.shape, weight.shape[0]
        key = (num_tokens, in_dim, out_dim, x.stride(0), weight.stride(0), x.dtype)
        known = self._products.get(key)
        if known is not None:
            return known
        assert x.stride(1) == weight.stride(1) == 1 and x.dtype == weight.dtype and weight.shape[1] == in_dim
        operation = ctypes.c_void_p()
        self._call(
            "cublasLtMatmulDescCreate",
            ctypes.byref(operation),
            ctypes.c_int(_COMPUTE_32F),
            ctypes.c_int(_TYPES[torch.float32]),
        )
        transposed = ctypes.c_int32(_TRANSPOSED)
        self._call(
            "cublasLtMatmulDescSetAttribute",
            *(operation, ctypes.c_int(_DESC_TRANSA), ctypes.byref(transposed), ctypes.c_size_t(4)),
        )
        product = _Product(
            operation,
            self._layout(x.dtype, in_dim, out_dim, weight.stride(0)),
            self._layout(x.dtype, in_dim, num_tokens, x.stride(0)),
            self._layout(x.dtype, out_dim, num_tokens, out_dim),
        )
        self._products[key] = product
        return product

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate",
            *(ctypes.byref(layout), ctypes.c_int(_TYPES[dtype]), ctypes.c_uint64(rows), ctypes.c_uint64(columns)),
            ctypes.c_int64(stride),
        )
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*arguments)
        if status:
            raise RuntimeError(f"{name} ended with status {status}")


def load(device: torch.device) -> CublasLt | None:
    """None where torch has no such library, or it does not work."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return CublasLt(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), device)
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning("event=cublaslt_unusable effect=torch chooses among its algorithms reason=%s", error)
        return None
