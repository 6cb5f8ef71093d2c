"""Two ranks compute what one computes, each with half of the weights and of the keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kernels.cpu import native
from tests.support.tiny_models import write_tiny_model
from tests.unit.parallel.ranks import loaded_decoder, run_ranks
from tests.unit.parallel.share import files_of, logits_of, sizes_of

# Three query heads for each key head; each rank has one key head.
THREES = MappingProxyType({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96})
CASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-tied-odd-vocabulary": {**THREES, "tie_word_embeddings": True, "vocab_size": 403},
        "llama-biases": {**THREES, "attention_bias": True, "mlp_bias": True, "vocab_size": 403},
        "qwen2-one-key-head": {"num_key_value_heads": 1},
        "qwen3": THREES,
        "llama-dummy": {},
        "llama-packed": {"vocab_size": 407},
    }
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, options in CASES.items():
        if "packed" not in name or native.library() is not None:
            write_tiny_model(folder / name, name.split("-")[0], tokenizer=False, **options)
    return folder


@pytest.fixture(scope="module")
def shares(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left."""
    out = tmp_path_factory.mktemp("shares")
    run_ranks("tests.unit.parallel.share", 2, str(out / "meeting"), str(models), str(out))
    return out


def _share(shares: Path, name: str, rank: int) -> dict[str, np.ndarray]:
    with np.load(shares / f"{name}-{rank}.npz") as found:
        return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_logits_of_one(models: Path, shares: Path, name: str) -> None:
    if not (models / name).exists():
        pytest.skip("the CPU kernels are not built")
    files, packed = files_of(models / name)
    alone = loaded_decoder(files, packed=packed)
    expected = logits_of(alone)
    # Activations are rounded to 8 bits by what a rank sees of their row.
    tolerance = 0.02 if packed else 1e-5
    for rank in range(2):
        share = _share(shares, name, rank)
        worst = np.abs(share["logits"] - expected).max() / np.abs(expected).max()
        assert worst <= tolerance, f"rank {rank}: off by {worst:.1e} of the largest logit"
    assert np.array_equal(_share(shares, name, 0)["logits"], _share(shares, name, 1)["logits"])


@pytest.mark.parametrize("name", ["qwen3", "qwen2-one-key-head"])
def test_each_rank_holds_half(models: Path, shares: Path, name: str) -> None:
    alone = sizes_of(loaded_decoder(files_of(models / name)[0]))
    for rank in range(2):
        share = _share(shares, name, rank)
        for parameter, size in alone.items():
            own = int(share[parameter])
            if "norm" in parameter:
                assert own == size, parameter
            elif "qkv" in parameter and name == "qwen2-one-key-head":
                # Two of four query heads, and the one key and value head whole.
                assert own == size * 4 // 6, parameter
            elif parameter == "kv" and name == "qwen2-one-key-head":
                assert own == size
            else:
                assert own == size // 2, parameter
