"""Rows side by side and added up by the CPU kernels against the torch references."""

from __future__ import annotations

import pytest
import torch

from kernels import rows as reference
from kernels.cpu import rows as native_ops
from kernels.cpu.program import Recording
from tests.support.packed import every_isa, needs_kernels, using

pytestmark = needs_kernels


@every_isa
@pytest.mark.parametrize("dims", [(64,), (1, 7, 100), (576, 576)])
def test_concat_is_a_copy(isa: str, dims: tuple[int, ...]) -> None:
    wide = torch.randn(5, sum(dims) + 3)
    parts = list(wide[:, 3:].split(dims, dim=1))
    with using(isa):
        got = native_ops.concat(parts)
    assert torch.equal(got, reference.concat(parts))
    before = got.clone()
    wide.zero_()
    assert torch.equal(got, before)


@every_isa
@pytest.mark.parametrize("dim", [1, 7, 577])
def test_add_rows(isa: str, dim: int) -> None:
    x, total = torch.randn(9, dim + 3)[:, 3:], torch.randn(9, dim)
    expected = reference.add_rows(x, total.clone())
    with using(isa):
        got = native_ops.add_rows(x, total)
    assert torch.equal(got, expected) and torch.equal(total, expected)


def test_in_a_program() -> None:
    x = torch.randn(6, 40)
    with using():
        recording = Recording(6, 1)
        with recording.taking():
            both = native_ops.concat([x, x[:, :8]])
            program = recording.finish(native_ops.add_rows(both[:, :8], native_ops.concat([x[:, :8]])))
        x.copy_(torch.randn(6, 40))
        program.run(4, 1)
    assert torch.equal(program.results[0][:4], x[:4, :8] * 2)
