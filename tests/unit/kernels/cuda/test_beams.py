"""Dynamic trees in Triton, against kernels.beams."""

from __future__ import annotations

import pytest
import torch

from kernels import beams as reference
from kernels.cuda import beams
from tests.support.quick import quick_first
from tests.unit.kernels.beam_cases import Growth


@pytest.mark.parametrize(("seed",), quick_first(((seed,) for seed in range(20)), (3, 7, 12, 19)))
def test_trees(seed: int, device: torch.device) -> None:
    growth = Growth(seed, device)
    one, frontiers, drafts = growth.grown(beams)
    two, wanted_frontiers, wanted = growth.grown(reference)
    for name in ("tokens", "scores", "extended"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for found, expected in zip(frontiers, wanted_frontiers, strict=True):
        for name in ("tokens", "parents", "visible", "depths"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert drafts.parents is not None and wanted.parents is not None
    assert torch.equal(drafts.tokens, wanted.tokens) and torch.equal(drafts.parents, wanted.parents)


@pytest.mark.parametrize(("vocab", "block"), [(5, 4096), (300, 64), (1000, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_likeliest(
    vocab: int, block: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beams, "VOCAB_BLOCK", block)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(4)]).to(dtype).to(device) / 8 - 3
    offsets = torch.arange(vocab, device=device) * 3 if vocab % 2 else None
    for width in (1, 4):
        log_probs, ids = beams.likeliest(logits, width, offsets)
        values, columns = logits.float().log_softmax(-1).sort(dim=1, descending=True, stable=True)
        wanted = columns[:, :width] if offsets is None else columns[:, :width] + offsets[columns[:, :width]]
        assert torch.equal(ids, wanted)
        assert torch.allclose(log_probs, values[:, :width], atol=1e-5)


@pytest.mark.parametrize("hidden", [8, 96])
@pytest.mark.parametrize("seed", range(6))
def test_features(seed: int, hidden: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_slots, size, pages, page_size = 3, 6, 1 + seed, 24, 1 + seed % 3
    features = torch.randn(num_rows, size, hidden, generator=generator).to(device)
    own = torch.randn(num_slots, hidden, generator=generator).to(device)
    rows = torch.randperm(num_slots, generator=generator)[:num_rows].to(device)
    wide = size + seed % 2
    parents = torch.randint(0, size, (num_rows, wide - 1), generator=generator).to(device)
    for one, slots in ((own, rows), (own[:num_rows], None)):
        for arguments in ((parents, wide), (None, size)):
            found = beams.features_before(one, slots, features, *arguments)
            assert torch.equal(found, reference.features_before(one, slots, features, *arguments))
    way = torch.randint(0, size, (num_rows, size), generator=generator).to(device)
    counts = torch.randint(0, size + 1, (num_rows, 2), generator=generator).int().to(device)[:, 1]
    places = torch.randperm((pages - 1) * page_size, generator=generator)[: num_rows * size]
    locations = places.view(num_rows, size).to(device)
    for told, way_of in ((counts, way), (None, None)):
        kept = [(own.clone(), torch.zeros(pages, hidden, device=device)) for _ in range(2)]
        for ops, (of_slots, of_pages) in zip((beams, reference), kept, strict=True):
            ops.keep_features(features, way_of, told, rows, locations, page_size, of_slots, of_pages)
        assert torch.equal(kept[0][0], kept[1][0]) and torch.equal(kept[0][1][:-1], kept[1][1][:-1])
