"""How many tokens of KV fit on a device, and what is said where none do."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from scheduler_proc.worker.device_memory import MIB, RESERVED_BYTES, DeviceMemory

MEMORY = DeviceMemory(available=10_000 * MIB, weights=2000 * MIB, kernels=300 * MIB, step=500 * MIB, graphs=200 * MIB)
PER_TOKEN = MIB // 16
PAGE = 16


def test_all_that_is_left() -> None:
    tokens = MEMORY.kv_tokens(None, None, PER_TOKEN, PAGE)
    # One page more than there are, for scratch.
    left = (10_000 - 3000 - 1) * MIB - RESERVED_BYTES
    assert tokens == left // MIB * PAGE


def test_a_fraction_of_weights_and_kv_together() -> None:
    assert MEMORY.kv_tokens(0.5, None, PER_TOKEN, PAGE) == 3000 * PAGE
    assert MEMORY.kv_tokens(0.8, None, PER_TOKEN, PAGE) == 6000 * PAGE


def test_a_number_of_tokens() -> None:
    assert MEMORY.kv_tokens(None, 1000, PER_TOKEN, PAGE) == 992
    assert MEMORY.kv_tokens(0.1, 1000, PER_TOKEN, PAGE) == 992


@pytest.mark.parametrize(
    ("fraction", "tokens", "told"),
    [
        (0.95, None, r"--mem-fraction-static 0\.95 does not fit.*7000 MiB for 7500 MiB of KV; lower it"),
        (0.2, None, r"--mem-fraction-static 0\.2 does not fit.*for 0 MiB of KV; raise it"),
        (None, 7000 * PAGE, r"--max-total-tokens 112000 does not fit.*lower it, or --chunked-prefill-size"),
    ],
)
def test_what_does_not_fit_is_told_with_figures(fraction: float | None, tokens: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        MEMORY.kv_tokens(fraction, tokens, PER_TOKEN, PAGE)
    for figure in ("10000 MiB available", "weights take 2000 MiB", "kernels 300", "a step 500", "graphs 200"):
        assert figure in raised.value.message


def test_less_than_a_page() -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 15 is less than one page \(--page-size 16\)"):
        MEMORY.kv_tokens(None, PAGE - 1, PER_TOKEN, PAGE)


def test_a_model_that_is_too_large() -> None:
    large = DeviceMemory(1000 * MIB, 900 * MIB, 50 * MIB, 40 * MIB, 20 * MIB)
    with pytest.raises(ConfigError, match=r"the model does not fit.*leaves -10 MiB"):
        large.kv_tokens(None, None, PER_TOKEN, PAGE)
