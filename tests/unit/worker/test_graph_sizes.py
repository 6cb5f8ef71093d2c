"""Which sizes of steps have graphs."""

from __future__ import annotations

import pytest

from scheduler_proc.worker.graph_forward import graph_sizes
from scheduler_proc.worker.prompt_graphs import token_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 64, 65, 100, 256, 1000])
def test_every_batch_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for num in range(1, most + 1):
        size = next(size for size in sizes if size >= num)
        assert size - num < (8 if num <= 64 else num / 4)
    assert len(graph_sizes(256)) == 23


@pytest.mark.parametrize("most", [1, 15, 16, 17, 63, 64, 65, 100, 256, 4096, 5000])
def test_every_step_with_prompts_is_filled_up_by_a_fourth_at_most(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes)) and all(size <= most for size in sizes)
    for num in range(65, max(sizes, default=0) + 1):
        assert next(size for size in sizes if size >= num) <= 1.25 * num + 1
