"""Products by cuBLASLt's algorithms, through a stand-in that reads what it is told as the library does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.activation import silu_and_mul
from kernels.cuda.context import Context, make_context
from kernels.cuda.cublas_lt import CublasLt, _Algorithm, _Heuristic, load
from kernels.cuda.linear import MOST_CHOSEN, GatedLinear, Linear
from kernels.cuda.small_gemm_launch import MAX_TOKENS
from kernels.cuda.tuning import Tuner

CPU = torch.device("cpu")


class Library:
    """Column-major float32 products; `refuses`: it knows no algorithm."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.made: list[tuple] = []
        self.used: list[int] = []
        self.num_asked = 0

    def _new(self, target, *what) -> int:
        self.made.append(what)
        target._obj.value = len(self.made)
        return 0

    def cublasLtCreate(self, target) -> int:
        return self._new(target, "handle")

    def cublasLtMatmulPreferenceCreate(self, target) -> int:
        return self._new(target, "preference")

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size) -> int:
        assert (attribute.value, size.value) == (1, 8) and value._obj.value == 32 << 20
        return 0

    def cublasLtMatmulDescCreate(self, target, compute, scale) -> int:
        assert (compute.value, scale.value) == (68, 0)
        return self._new(target, "operation", {})

    def cublasLtMatmulDescSetAttribute(self, operation, attribute, value, size) -> int:
        assert size.value == 4
        self.made[operation.value - 1][1][attribute.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, target, dtype, rows, columns, stride) -> int:
        assert dtype.value == 0
        return self._new(target, "layout", rows.value, columns.value, stride.value)

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, most, found, count) -> int:
        self.num_asked += 1
        if self.refuses:
            return 15
        count._obj.value = 3
        for index in range(3):
            assert isinstance(found[index], _Heuristic)
            found[index].algorithm.data[0] = 100 + index
            found[index].status = 15 if index == 1 else 0
        return 0

    def cublasLtMatmul(
        self, handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *rest
    ) -> int:
        assert self.made[operation.value - 1][1] == {3: 1}, "the first matrix is transposed"
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0) and c.value == d.value
        assert isinstance(algorithm._obj, _Algorithm)
        self.used.append(algorithm._obj.data[0])
        left, right, out = (
            self._matrix(place, layout) for place, layout in ((a, a_layout), (b, b_layout), (d, d_layout))
        )
        out[:] = left.T @ right
        return 0

    def _matrix(self, place, layout) -> np.ndarray:
        _, rows, columns, stride = self.made[layout.value - 1]
        numbers = (ctypes.c_float * (stride * (columns - 1) + rows)).from_address(place.value)
        flat = np.frombuffer(numbers, np.float32)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (4, 4 * stride))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))


def test_every_algorithm_is_right() -> None:
    library = Library()
    lt = CublasLt(library, CPU)
    around = torch.randn(5, 40), torch.randn(7, 24)
    for x, weight in ((torch.randn(3, 16), torch.randn(6, 16)), (around[0][:, 8:24], around[1][:, :16])):
        found = lt.algorithms(x, weight)
        assert len(found) == 2 and list(found) == list(lt.algorithms(x, weight))
        for algorithm in found.values():
            torch.testing.assert_close(lt.run(algorithm, x, weight), F.linear(x, weight))
    assert library.used == [100, 102] * 2
    assert library.num_asked == 2


def test_what_the_library_refuses_has_none() -> None:
    assert CublasLt(Library(refuses=True), CPU).algorithms(torch.randn(3, 16), torch.randn(6, 16)) == {}


def test_there_is_none_without_a_device() -> None:
    assert load(CPU) is None


class _Wanted(Tuner):
    """Takes the last candidate but torch."""

    def __init__(self) -> None:
        super().__init__(CPU, None)
        self.asked: list[tuple[str, list[str]]] = []

    def choose(self, op, key, candidates, default) -> str:
        self.asked.append((op, list(candidates)))
        name = [*candidates][-2] if len(candidates) > 1 else default
        self._names[op, key] = name
        return name


@pytest.mark.parametrize(
    ("kind", "expected"), [(Linear, F.linear), (GatedLinear, lambda x, w: silu_and_mul(F.linear(x, w)))]
)
def test_products_of_many_tokens(kind: type[Linear], expected: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cuda.linear.DTYPES", (torch.float32,))
    monkeypatch.setattr("kernels.cuda.linear.silu_and_mul", silu_and_mul)
    library, tuner = Library(), _Wanted()
    context = Context(CPU, tuner, make_context(CPU, tuner).tickets, CublasLt(library, CPU))
    product = kind(context)
    weight = torch.randn(32, 16)
    for _ in range(2):
        x = torch.randn(MAX_TOKENS + 1, 16)
        torch.testing.assert_close(product(x, weight, None), expected(x, weight))
    assert [(op, len(names)) for op, names in tuner.asked] == [("dense", 3)]
    assert library.used == [102, 102]
    for x, bias in ((torch.randn(MOST_CHOSEN + 1, 16), None), (torch.randn(MAX_TOKENS + 1, 16), torch.randn(32))):
        sums = F.linear(x, weight, bias)
        torch.testing.assert_close(product(x, weight, bias), silu_and_mul(sums) if kind is GatedLinear else sums)
    assert len(library.used) == 2
