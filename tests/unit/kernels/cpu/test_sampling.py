"""Sampling by the CPU kernels: the torch reference's draws, filters to the token, noise, rows, edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import sampling as reference
from kernels.cpu import sampling as kernels
from kernels.noise import ACCEPT, SAMPLE, gumbel_noise, hash_columns
from tests.support.packed import every_isa, needs_kernels, using

pytestmark = needs_kernels
every_count = pytest.mark.parametrize("threads", [1, 2, 3])
every_vocab = pytest.mark.parametrize("vocab", [1, 5, 16, 17, 64, 65, 1000, 4097, 49152])

inf, nan = math.inf, math.nan


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel leaves unwritten is no token."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, -77, dtype=dtype)

    monkeypatch.setattr(kernels, "empty", empty)
    yield


class Params:
    """Sampling parameters of some rows: one value for all, or one each; row i has seed `first_seed + i`."""

    def __init__(self, rows: int, /, **values: Any) -> None:
        def of(name: str, off: float, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values.get(name, off)).to(dtype).expand(rows).contiguous()

        self.temperature = of("temperature", 1.0, torch.float32)
        self.top_k = of("top_k", -1, torch.int32)
        self.top_p = of("top_p", 1.0, torch.float32)
        self.min_p = of("min_p", 0.0, torch.float32)
        self.seeds = torch.arange(rows) + values.get("first_seed", 0)
        self.positions = of("positions", 7, torch.int64)
        self.needs_filter = bool(values.keys() & {"top_k", "top_p", "min_p"})

    def draw(self, sample: Any, logits: Tensor, rows: slice = slice(None), **more: Any) -> Tensor:
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        arguments = {name: getattr(self, name)[rows] for name in names}
        return sample(logits[rows], **arguments, needs_filter=self.needs_filter, all_greedy=False, **more)

    def noise(self, vocab: int) -> Tensor:
        return gumbel_noise(self.seeds, self.positions, SAMPLE, vocab)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept_tokens(scaled: Tensor, top_k: int, top_p: float, min_p: float, slack: float = 0.0) -> Tensor:
    """Which tokens of a row pass the filters, by definition; slack: added to p."""
    x = scaled.double()
    kept = torch.ones(len(x), dtype=torch.bool)
    if 1 <= top_k < len(x):
        kept = x >= x.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        values, places = x.masked_fill(~kept, -inf).unique(return_inverse=True)
        weights = torch.zeros_like(values).index_add_(0, places, (x - x.max()).exp() * kept)
        above = weights.flip(0).cumsum(0).flip(0) - weights
        passes = above < (top_p + slack) * weights.sum()
        passes[-1] = True
        kept &= passes[places]
    return kept & (scaled >= scaled.max() + torch.tensor(min_p).log())


def check_draws(tokens: Tensor, logits: Tensor, params: Params) -> None:
    """Each token is the best of those that pass, but for rounding: of sums with noise, and of the mass at the edge."""
    scaled = logits / params.temperature.unsqueeze(1)
    sums = scaled + params.noise(logits.shape[1])
    if not params.needs_filter:
        drawn, best = sums.gather(1, tokens.long().unsqueeze(1))[:, 0], sums.amax(dim=1)
        assert bool((drawn >= best - 1e-5 * best.abs().clamp_(min=1.0)).all())
        return
    for i, token in enumerate(tokens.tolist()):
        filters = (int(params.top_k[i]), float(params.top_p[i]), float(params.min_p[i]))
        surely = kept_tokens(scaled[i], *filters, slack=-1e-6)
        perhaps = kept_tokens(scaled[i], *filters, slack=1e-6)
        assert perhaps[token], (i, token)
        best = float(sums[i].masked_fill(~surely, -inf).max())
        assert float(sums[i, token]) >= best - 1e-5 * max(1.0, abs(best)), (i, token)


# ---- argmax


@every_isa
@every_count
@every_vocab
def test_argmax(isa: str, threads: int, vocab: int) -> None:
    for rows in (1, 2, 7):
        logits = (randn(rows, vocab + 5, seed=rows) * 3).round()[:, :vocab]
        with using(isa, threads):
            assert torch.equal(kernels.argmax_rows(logits), logits.max(dim=-1).indices.int())


@every_isa
@every_count
def test_argmax_of_ties_nan_and_infinities(isa: str, threads: int) -> None:
    logits = torch.zeros(9, 9000)
    logits[0, [8999, 4500, 7]] = 5.0
    logits[1, [1500, 20, 2000]] = torch.tensor([0.0, -0.0, -0.0])
    logits[1] -= 0.0
    logits[2, 8999] = nan
    logits[2, 3] = inf
    logits[3] = -inf
    logits[4] = -inf
    logits[4, 6789] = -1e30
    logits[5, 5000] = inf
    logits[6] = nan
    logits[7] = -0.0
    logits[7, 4200] = 0.0
    logits[8, 0] = nan
    expected = [7, 0, -1, 0, 6789, 5000, -1, 0, -1]
    with using(isa, threads):
        assert kernels.argmax_rows(logits).tolist() == expected
        assert [int(kernels.argmax_rows(logits[i : i + 1])) for i in range(9)] == expected
        assert kernels.argmax_rows(logits[:0]).tolist() == []
        assert kernels.argmax_rows(logits.t().contiguous().t()).tolist() == expected


# ---- Draws


@every_isa
@every_count
@every_vocab
def test_draws_are_the_reference_s(isa: str, threads: int, vocab: int) -> None:
    rows = 1000 if vocab <= 1000 else 6
    logits = randn(rows, vocab, seed=vocab) * 2
    params = Params(rows, first_seed=-3, temperature=torch.linspace(0.2, 3.0, rows))
    with using(isa, threads):
        tokens = params.draw(kernels.sample, logits)
        assert torch.equal(params.draw(kernels.sample, logits, slice(0, 1)), tokens[:1])
    check_draws(tokens, logits, params)
    assert int((tokens != params.draw(reference.sample, logits)).sum()) <= rows // 500


@every_isa
def test_every_word_of_the_stream_counts(isa: str) -> None:
    logits = torch.zeros(1, 300).expand(2000, -1)
    gen = torch.Generator().manual_seed(5)
    params = Params(2000)
    params.seeds = torch.randint(-(2**63), 2**63 - 1, (2000,), generator=gen)
    params.positions = torch.randint(0, 2**32, (2000,), generator=gen)
    with using(isa):
        for purpose in (SAMPLE, ACCEPT):
            tokens = params.draw(kernels.sample, logits, purpose=purpose)
            # Uniform numbers near 0 and 1 aside, equal sums come from equal hashes alone.
            assert torch.equal(tokens, params.draw(reference.sample, logits, purpose=purpose))


# Seeds whose first column has a hash close to 0, and close to 2**31, at position 7.
_LOW_SEEDS = (67988117, 14444994, 94391754, 15038665, 158934330, 11320461, 63542297, 2112800)
_HIGH_SEEDS = (49510192, 67679895, 1634100, 71175978)


@every_isa
def test_noise(isa: str) -> None:
    """A token that is ahead by noise alone is caught up with where the noise says so, to one part in 100,000."""
    params = Params(4000)
    params.seeds[: len(_LOW_SEEDS)] = torch.tensor(_LOW_SEEDS)
    params.seeds[100 : 100 + len(_HIGH_SEEDS)] = torch.tensor(_HIGH_SEEDS)
    bits = hash_columns(params.seeds, params.positions, SAMPLE, 1)[:, 0] & 0x7FFFFFFF
    assert int(bits[: len(_LOW_SEEDS)].max()) < 100
    assert int(bits[100 : 100 + len(_HIGH_SEEDS)].min()) > 2**31 - 40
    noise = params.noise(2).double()
    step = 1e-5 * noise.abs().amax(dim=1).clamp_(min=1.0)
    for sign, expected in ((-1, 0), (1, 1)):
        logits = torch.zeros(4000, 2)
        logits[:, 1] = noise[:, 0] - noise[:, 1] + sign * step
        with using(isa):
            assert params.draw(kernels.sample, logits).tolist() == [expected] * 4000


@every_isa
def test_frequencies(isa: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2]])
    with using(isa):
        tokens = Params(40_000, temperature=2.0).draw(kernels.sample, logits.expand(40_000, -1))
    expected = (logits[0].double() / 2).softmax(-1) * 40_000
    counts = torch.bincount(tokens.long(), minlength=8)
    # 99.9th percentile of chi-square with 7 degrees of freedom.
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


# ---- Filters

_FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40},
    {"top_k": 700},
    {"top_k": 3000},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 2000, "top_p": 0.5, "min_p": 0.01},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
]


@every_isa
@pytest.mark.parametrize("spread", [0.001, 1.0, 8.0])
@pytest.mark.parametrize("vocab", [5, 17, 1000, 49152])
def test_filtered_draws_are_the_reference_s(isa: str, spread: float, vocab: int) -> None:
    copies = 1 if vocab > 1000 else 12
    settings: list[dict[str, Any]] = [
        {"top_k": -1, "top_p": 1.0, "min_p": 0.0} | one for one in _FILTERS for _ in range(copies)
    ]
    rows = len(settings)
    params = Params(
        rows,
        temperature=torch.tensor([0.7, 1.0, 1.6]).repeat(rows)[:rows],
        **{name: torch.tensor([one[name] for one in settings]) for name in ("top_k", "top_p", "min_p")},
    )
    logits = randn(rows, vocab, seed=vocab) * spread
    # As a model of 16 bits gives them: with ties.
    logits[::2] = logits[::2].bfloat16().float()
    with using(isa):
        tokens = params.draw(kernels.sample, logits)
    check_draws(tokens, logits, params)


@every_isa
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("setting", _FILTERS, ids=str)
def test_what_is_drawn_is_what_passes(isa: str, setting: dict[str, Any], coarse: bool) -> None:
    row = randn(70, seed=3) * 0.5
    row = (row * 4).round() / 4 if coarse else row
    params = Params(3000, temperature=1.5, **setting)
    with using(isa):
        tokens = params.draw(kernels.sample, row.expand(3000, -1))
    scaled = row / 1.5
    filters = (setting.get("top_k", -1), setting.get("top_p", 1.0), setting.get("min_p", 0.0))
    assert set(tokens.tolist()) == set(kept_tokens(scaled, *filters).nonzero().flatten().tolist())


@every_isa
@pytest.mark.parametrize("vocab", [300, 7000])
def test_the_last_token_that_passes(isa: str, vocab: int) -> None:
    """The token with the largest noise of almost equal ones wins if it is the last that passes, not if the next."""
    ranks = [k for k in (1, 2, 31, 60, 109, 110, 111, 290, 2500, 6990) if k < vocab]
    params = Params(len(ranks))
    favourites = params.noise(vocab).argmax(dim=1)
    values = torch.linspace(1e-3, 0, vocab)
    for by in ("top_k", "top_p", "min_p"):
        for place in (0, 1):
            logits = torch.empty(len(ranks), vocab)
            for i, k in enumerate(ranks):
                order = torch.randperm(vocab, generator=torch.Generator().manual_seed(i))
                order = torch.cat([order[order != favourites[i]], favourites[i : i + 1]])
                at = k - 1 + place
                logits[i, torch.cat([order[:at], order[-1:], order[at:-1]])] = values
            rank = torch.tensor(ranks)
            # Half a step before the mass, or the logit, of the next token.
            mass = values.double().softmax(-1).cumsum(-1)[rank - 1] - 0.5 / vocab
            limit = {"top_k": rank, "top_p": mass, "min_p": (-(rank - 0.5) * 1e-3 / (vocab - 1)).exp()}[by]
            with using(isa):
                tokens = Params(len(ranks), **{by: limit}).draw(kernels.sample, logits)
            assert (tokens == favourites).tolist() == [place == 0] * len(ranks), by


@every_isa
def test_ties_of_any_number_pass_together(isa: str) -> None:
    row = torch.zeros(6000)
    row[100:3100] = 1.0
    row[5000] = 2.0
    settings: list[dict[str, Any]] = [
        {"top_k": 2},
        {"top_k": 3001},
        {"top_p": 0.2},
        {"top_k": 2, "top_p": 0.5},
        {"min_p": 0.3},
    ]
    for setting in settings:
        with using(isa):
            tokens = Params(400, **setting).draw(kernels.sample, row.expand(400, -1))
        assert bool(((tokens >= 100) & (tokens < 3100) | (tokens == 5000)).all()), setting
        assert int(tokens.max()) == 5000 or int((tokens < 3100).sum()) > 390
        assert int(tokens.min()) < 300 and int(tokens[tokens < 5000].max()) > 2900, setting


@every_isa
def test_filters_where_values_crowd(isa: str) -> None:
    """Values that only their last bits tell apart, beside one far off: every level of the search has to work."""
    steps = torch.arange(5000, dtype=torch.int32)
    crowd = (steps + torch.tensor(1.0).view(torch.int32)).view(torch.float32)
    tiny = torch.cat([crowd[:2500] * 1e-30, -crowd[:2500] * 1e-20])
    for base in (crowd, -crowd, tiny, randn(5000) * 1e35):
        row = base.clone()
        row[17] = row[17].abs() + 3.0
        rows = row.expand(20, -1)
        for k in (2, 600, 4900):
            only_k, both = Params(20, top_k=k), Params(20, top_k=k, top_p=0.8)
            with using(isa):
                assert torch.equal(only_k.draw(kernels.sample, rows), only_k.draw(reference.sample, rows))
                check_draws(both.draw(kernels.sample, rows), rows, both)


# ---- Rows


@every_isa
def test_a_draw_depends_on_its_row_alone(isa: str) -> None:
    gen = torch.Generator().manual_seed(1)
    rows, vocab = 12, 9001
    logits = torch.randn(rows, vocab, generator=gen) * 2
    params = Params(
        rows,
        temperature=torch.rand(rows, generator=gen) * 2 + 0.1,
        top_k=torch.tensor([-1, 0, 5, 50, 2000, -1, 1, 9999, 3, -1, 40, 7]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.999, 0.1, 1.0, 0.0, 0.8, 0.95, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.2, 0.0, 1.0]),
    )
    params.temperature[4] = 0.0
    logits[7, 9000] = nan
    with using(isa, threads=1):
        together = params.draw(kernels.sample, logits)
    assert int(together[4]) == int(logits[4].argmax())
    assert int(together[7]) == -1
    for threads in (1, 2, 3, 5):
        with using(isa, threads):
            assert torch.equal(params.draw(kernels.sample, logits), together)
            for rows in (slice(i, i + n) for n in (1, 2, 4) for i in range(0, 12, n)):
                assert torch.equal(params.draw(kernels.sample, logits, rows), together[rows])


@every_isa
@every_count
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.5}, {"min_p": 0.3}])
def test_edges(isa: str, threads: int, filters: dict[str, Any]) -> None:
    vocab = 4200
    plain = randn(vocab, seed=9)
    with_minus_inf = plain.masked_fill(plain < 0.5, -inf)
    one_left = torch.full((vocab,), -inf)
    one_left[4177] = -1e4
    with_inf = plain.clone()
    with_inf[[4000, 70]] = inf
    with_nan = plain.clone()
    with_nan[4199] = nan
    huge = plain * 1e35
    nothing = torch.full((vocab,), -inf)
    cases = [
        (row, temperature)
        for row in (plain, with_minus_inf, one_left, with_inf, with_nan, huge, nothing, torch.zeros(vocab))
        for temperature in (0.0, -1.0, 1e-7, 1e-6, 1e-5, 0.01, 1.0, 100.0, 1e30, inf, nan)
    ]
    logits = torch.stack([row for row, _ in cases])
    params = Params(len(cases), temperature=torch.tensor([temperature for _, temperature in cases]), **filters)
    expected = params.draw(reference.sample, logits).tolist()
    with using(isa, threads):
        assert params.draw(kernels.sample, logits).tolist() == expected
        for i in range(0, len(cases), 3):
            assert params.draw(kernels.sample, logits, slice(i, i + 1)).tolist() == expected[i : i + 1], cases[i][1]


@every_isa
def test_parameters_out_of_range(isa: str) -> None:
    logits = randn(300, 50)
    settings: list[dict[str, Any]] = [
        {"min_p": 2.0},
        {"min_p": nan, "top_k": 3},
        {"top_p": -1.0},
        {"top_p": nan, "top_k": 4},
    ]
    for setting in settings:
        params = Params(300, **setting)
        with using(isa):
            assert torch.equal(params.draw(kernels.sample, logits), params.draw(reference.sample, logits)), setting


@every_isa
def test_types_and_strides_of_arguments(isa: str) -> None:
    wide = randn(8, 130)
    logits = wide[:, ::2]
    params = Params(8, top_k=30)
    with using(isa):
        plain = params.draw(kernels.sample, logits.contiguous())
        params.top_k = params.top_k.long()
        params.temperature = params.temperature.double()
        params.seeds = torch.stack([params.seeds, params.seeds], dim=1)[:, 0]
        assert torch.equal(params.draw(kernels.sample, logits), plain)
        assert torch.equal(params.draw(kernels.sample, wide.t().contiguous().t()[:, ::2]), plain)
        greedy = kernels.sample(logits, *[params.min_p] * 6, needs_filter=False, all_greedy=True)
        assert torch.equal(greedy, kernels.argmax_rows(logits))
        assert len(params.draw(kernels.sample, logits, slice(0, 0))) == 0
    assert torch.equal(wide, randn(8, 130))
