"""What the contexts of many rows begin with, in the same pages: attention may go through that once for all of them."""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from scheduler_proc.cache.page_table import PageTable

LEAST_ROWS = 16
"""The smallest step that has a graph which goes through a common prefix once."""
LEAST_SAVED = 16_384
"""Keys, over all rows, that must be saved: each launch has its price, and reading so many takes about as long."""
LEAST_SHARE = 8
"""One in so many of a step's keys at least: the graphs for it have fewer sizes, and less to choose from."""


def most_common_rows(config: EngineConfig) -> int:
    """Of a step that the device goes through so: a graph, where no fixed order of sums forbids it. 0: none."""
    options = config.scheduler
    if config.device != "cuda" or options.deterministic or config.cuda_graph_max_bs < LEAST_ROWS:
        return 0
    return config.cuda_graph_max_bs


def common_lens(table: PageTable, rows: np.ndarray, page_size: int, least_saved: int) -> np.ndarray | None:
    """int32 [n]: tokens, whole pages, that a row has in common with all others that have any; the same number or 0.

    table: of a group that keeps whole contexts; rows: int32 [n], slots. None if going through them once would not save
    least_saved keys. Only pages of the tree count. Each has one place in the tree, so rows that have one in common have
    all before it in common too: a column tells. Where no two rows begin alike one look is enough.
    """
    shared = table.shared[rows]
    best, best_saved = None, 0
    column, longest = 0, int(shared.max(initial=0))
    while column < longest:
        page, count = _majority(table, rows, shared, column)
        if count < 2:
            break
        saved = (count - 1) * (column + 1)
        if saved > best_saved:
            best, best_saved = (column, count), saved
        # The first, second, fourth, eighth page, and so on.
        column = 2 * column + 1
    if best is None:
        return None
    column = _last_column(table, rows, shared, *best, longest)
    page, count = _majority(table, rows, shared, column)
    if (count - 1) * (column + 1) * page_size < least_saved:
        return None
    has_it = (shared > column) & (table.pages[rows, column] == page)
    return np.where(has_it, (column + 1) * page_size, 0).astype(np.int32)


def _majority(table: PageTable, rows: np.ndarray, shared: np.ndarray, column: int) -> tuple[int, int]:
    """The page that most rows have in a column, and how many do."""
    there = table.pages[rows[shared > column], column]
    if not len(there):
        return -1, 0
    pages, counts = np.unique(there, return_counts=True)
    most = int(counts.argmax())
    return int(pages[most]), int(counts[most])


def _last_column(table: PageTable, rows: np.ndarray, shared: np.ndarray, column: int, count: int, end: int) -> int:
    """The last column that as many rows have in common as have `column`; fewer do from column `end` on."""
    while end - column > 1:
        middle = (column + end) // 2
        if _majority(table, rows, shared, middle)[1] >= count:
            column = middle
        else:
            end = middle
    return column
