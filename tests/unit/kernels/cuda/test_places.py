"""Places behind texts in Triton, against kernels.places."""

from __future__ import annotations

import pytest
import torch

from kernels import places as reference
from kernels.cuda import places
from kernels.places import Passes
from tests.unit.kernels.test_places import BLOCK, CHAIN, TREE
from tests.unit.kernels.test_speculative import PAGE_SIZE, PAGES, SCRATCH, Case


@pytest.mark.parametrize("passes", [CHAIN, BLOCK, TREE])
@pytest.mark.parametrize("seed", range(8))
def test_places(seed: int, passes: Passes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(places, "PAGE_BLOCK", 2)
    case = Case(seed, False).on(device)
    arguments = (case.rows, passes, case.slots, case.limits, PAGE_SIZE, SCRATCH, PAGES - seed % 2)
    found, wanted = (ops.draft_places(*arguments) for ops in (places, reference))
    assert torch.equal(found.tokens, wanted.tokens)
    longest = torch.stack([at.kv_lens for at in wanted.passes]).amax(dim=0)
    used = torch.arange(PAGES - seed % 2, device=device) * PAGE_SIZE < longest.unsqueeze(1)
    assert found.page_table.is_contiguous()
    assert torch.equal(found.page_table[used], wanted.page_table[used])
    assert len(found.passes) == len(wanted.passes)
    for one, two in zip(found.passes, wanted.passes, strict=True):
        for name in ("positions", "locations", "kv_lens"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
            assert getattr(one, name).is_contiguous() and getattr(one, name).data_ptr() % 16 == 0


def test_no_rows(device: torch.device) -> None:
    case = Case(0, False).on(device)
    found = places.draft_places(case.rows[:0], TREE, case.slots, case.limits, PAGE_SIZE, SCRATCH, PAGES)
    assert found.page_table.shape == (0, PAGES) and all(len(at.positions) == 0 for at in found.passes)
