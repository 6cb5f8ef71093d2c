"""What the contexts of many rows begin with, in the same pages: attention may go through that once for all of them."""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from scheduler_proc.cache.page_table import PageTable

LEAST_SAVED = 16_384
"""Keys, over all rows, that must be saved: each launch has its price, and reading so many takes about as long."""
_CANDIDATES = 2


def minds_common(config: EngineConfig) -> bool:
    """Whether the device makes use of it: in graphs of decode steps, where no fixed order of sums forbids it."""
    options = config.scheduler
    return config.device == "cuda" and config.cuda_graph_max_bs > 0 and not options.deterministic


def common_lens(table: PageTable, rows: np.ndarray, page_size: int, least_saved: int) -> np.ndarray | None:
    """int32 [n]: tokens, whole pages, that a row has in common with all others that have any; the same number or 0.

    rows: int32 [n], slots. Only pages of the tree count. None if going through them once would not save least_saved
    keys. Costs a look at the first page of each row where no two begin alike.
    """
    shared = table.shared[rows]
    first = np.where(shared > 0, table.pages[rows, 0], -1 - np.arange(len(rows), dtype=np.int32))
    pages, counts = np.unique(first, return_counts=True)
    most = int(counts.argmax()) if len(counts) else 0
    if len(counts) == 0 or counts[most] < 2:
        return None
    members = np.flatnonzero(first == pages[most])
    if (len(members) - 1) * int(shared[members].max()) * page_size < least_saved:
        return None
    width = int(shared[members].max())
    fronts = table.pages[rows[members], :width]
    inside = np.arange(width) < shared[members][:, None]
    best_saved, best = least_saved - 1, None
    # Whom the others follow furthest is not known: a few are tried.
    for leader in np.linspace(0, len(members) - 1, _CANDIDATES).astype(int):
        follows = inside & inside[leader] & (fronts == fronts[leader])
        lens = np.where(follows.all(axis=1), width, follows.argmin(axis=1))
        ordered = np.sort(lens)
        saved = ordered * np.arange(len(members) - 1, -1, -1) * page_size
        index = int(saved.argmax())
        if saved[index] > best_saved:
            best_saved, best = int(saved[index]), (members[lens >= ordered[index]], int(ordered[index]))
    if best is None:
        return None
    found = np.zeros(len(rows), np.int32)
    found[best[0]] = best[1] * page_size
    return found
