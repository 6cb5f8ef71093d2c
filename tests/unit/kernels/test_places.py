"""Places behind texts against a slow reference that follows one row at a time."""

from __future__ import annotations

import pytest
import torch

from kernels.places import Passes, draft_places
from tests.unit.kernels.test_speculative import PAGE_SIZE, PAGES, SCRATCH, Case

CHAIN, BLOCK, TREE = Passes(4), Passes(1, 6, filler=77), Passes(3, growth=2)


@pytest.mark.parametrize("passes", [CHAIN, BLOCK, TREE, Passes(1, growth=3)])
@pytest.mark.parametrize("seed", range(12))
def test_places(seed: int, passes: Passes) -> None:
    case = Case(seed, False)
    slots, num_rows = case.slots, len(case.rows)
    done = draft_places(case.rows, passes, slots, case.limits, PAGE_SIZE, SCRATCH, PAGES - 1)
    assert len(done.passes) == passes.num
    table = slots.page_table[case.rows, : PAGES - 1]
    assert done.page_table.view(num_rows, passes.size, -1).unique(dim=1).squeeze(1).tolist() == table.tolist()
    for number, at in enumerate(done.passes):
        first, num = (0, 1 + number * passes.growth) if passes.growth else (number * passes.size, passes.size)
        assert all(part.is_contiguous() and part.dtype == torch.int64 for part in vars(at).values())
        for row, slot in enumerate(case.rows.tolist()):
            context, end = int(slots.seq_len[slot]), int(case.limits.full_lens[slot]) - 1
            active = context < end and not bool(slots.ended[slot])
            places = [context + first + i for i in range(num)]
            usable = [active and place < end for place in places]
            lengths = [place + 1 for place, is_usable in zip(places, usable, strict=True) if is_usable]
            seen = (context if active else 0) + num if passes.growth else max(lengths, default=1)
            assert at.kv_lens.view(num_rows, -1)[row].tolist() == [seen] * passes.size
            for i, (place, is_usable) in enumerate(zip(places, usable, strict=True)):
                depth = first + i if not passes.growth else -(-i // passes.growth)
                page = int(slots.page_table[slot, min(place // PAGE_SIZE, PAGES - 1)])
                expected = (context + depth, page * PAGE_SIZE + place % PAGE_SIZE) if is_usable else (0, SCRATCH)
                index = row * num + i
                assert (int(at.positions[index]), int(at.locations[index])) == expected
    first_tokens = done.tokens.view(num_rows, -1)
    assert first_tokens[:, 0].tolist() == slots.last_token[case.rows].tolist()
    assert (first_tokens[:, 1:] == passes.filler).all()
