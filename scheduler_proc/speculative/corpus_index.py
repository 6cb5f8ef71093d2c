"""What came after each n-gram of a corpus, once at the start, for a search of a few steps afterwards."""

from __future__ import annotations

import numpy as np
import torch

from kernels.ngram import MULTIPLIER, NgramCorpus, NgramSearch

_PAIR = np.int64(0x2545F4914F6CDD1D)
"""Of hashes of an n-gram and what comes after it."""


def index_corpus(tokens: np.ndarray, search: NgramSearch, device: torch.device) -> NgramCorpus:
    """tokens: int32 [n]. Of each n-gram of `search.least` to `search.most` tokens, the `search.branches` most frequent
    next tokens are kept, of equally frequent ones those that came latest."""
    keys, places = [], []
    hashes = np.ones(max(len(tokens) - 1, 0), np.int64)
    for length in range(1, search.most + 1):
        # hashes[i]: of the n-gram that ends at place i + length - 1. The last place has nothing behind it.
        hashes = hashes[1:] if length > 1 else hashes
        hashes = hashes * np.int64(MULTIPLIER) + tokens[: len(hashes)] + 1
        if length >= search.least:
            own_keys, own_places = _most_frequent(hashes, tokens[length:], search.branches)
            keys.append(own_keys)
            places.append(np.where(own_places < 0, -1, own_places + (length - 1)).astype(np.int32))
    all_keys, all_places = np.concatenate(keys), np.concatenate(places)
    if not len(all_keys):
        # Too short for any; a search wants one key at least, and finds no place there.
        all_keys, all_places = np.zeros(1, np.int64), np.full((1, search.branches), -1, np.int32)
    order = np.argsort(all_keys)
    return NgramCorpus(
        torch.from_numpy(tokens.astype(np.int32)).to(device),
        torch.from_numpy(all_keys[order]).to(device),
        torch.from_numpy(all_places[order]).to(device),
    )


def _most_frequent(hashes: np.ndarray, following: np.ndarray, branches: int) -> tuple[np.ndarray, np.ndarray]:
    """The different ones of hashes (int64 [n]) and, int64 [m, branches], the latest index of each with each of the most
    frequent ones that follow; -1 after the last."""
    pairs = hashes * _PAIR + following
    order = np.argsort(pairs, kind="stable")
    is_last = np.append(np.diff(pairs[order]) != 0, np.ones(min(len(pairs), 1), bool))
    latest = order[is_last]
    counts = np.diff(np.flatnonzero(is_last), prepend=-1)
    order = np.lexsort((-latest, -counts, hashes[latest]))
    latest = latest[order]
    found = hashes[latest]
    is_first = np.append(np.ones(min(len(found), 1), bool), np.diff(found) != 0)
    firsts = np.flatnonzero(is_first)
    rank = np.arange(len(found)) - np.repeat(firsts, np.diff(firsts, append=len(found)))
    places = np.full((len(firsts), branches), -1, np.int64)
    kept = rank < branches
    places[(np.cumsum(is_first) - 1)[kept], rank[kept]] = latest[kept]
    return found[firsts], places
