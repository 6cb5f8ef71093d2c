"""Whether the running requests and one more will fit into memory until they end, by what is expected of each."""

from __future__ import annotations

import numpy as np


class Forecast:
    """The expected future of the running batch; made once per round of admissions, candidates are added to it.

    All in pages of `page_size` tokens, of the full-attention group. A request grows by a token a step until it has
    produced what is expected of it, and gives its own pages back then.
    """

    def __init__(
        self, page_size: int, known: np.ndarray, rest: np.ndarray, num: np.ndarray, shared: np.ndarray
    ) -> None:
        """int64 [n] each: tokens known, tokens still expected, pages held, pages of these that the tree owns."""
        self._page_size = page_size
        self._known = known
        self._rest = rest
        self._num = num
        self._shared = shared
        self._bound = int(np.maximum(-(-(known + rest) // page_size) - num, 0).sum())

    def fits(self, known: int, rest: int, cached: int, available: int) -> bool:
        """Whether a candidate with `cached` pages in the tree fits too.

        available: pages free or evictable now, the candidate's cached ones not counted.
        """
        own = -(-(known + rest) // self._page_size) - cached
        if self._bound + own <= available:
            return True
        ends = np.append(self._rest, rest)
        order = np.argsort(ends)
        ends = ends[order]
        num = np.append(self._num, cached)[order]
        # When the k-th request ends, those from k on have grown by ends[k], those before have given back.
        alive = np.arange(len(ends), 0, -1)
        known_alive = np.cumsum(np.append(self._known, known)[order][::-1])[::-1]
        held_alive = np.cumsum(num[::-1])[::-1]
        given_back = num - np.append(self._shared, cached)[order]
        freed = np.cumsum(given_back) - given_back
        # A last page is half full on average.
        grown = (known_alive + alive * ends) / self._page_size + alive / 2 - held_alive
        return bool((grown - freed).max() <= available)

    def add(self, known: int, rest: int, cached: int) -> None:
        """The candidate was admitted."""
        self._bound += -(-(known + rest) // self._page_size) - cached
        self._known = np.append(self._known, known)
        self._rest = np.append(self._rest, rest)
        self._num = np.append(self._num, cached)
        self._shared = np.append(self._shared, cached)
