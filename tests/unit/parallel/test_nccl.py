"""Two CUDA devices compute what one CPU does, and their collectives can be captured in graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny_models import write_tiny_model
from tests.unit.parallel.ranks import loaded_decoder, run_ranks
from tests.unit.parallel.share import files_of, logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_two_devices_give_the_logits_of_one(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192, "head_dim": 64}
    for name in ("qwen3", "llama-odd-vocabulary"):
        family, vocab_size = name.split("-")[0], 403 if "odd" in name else 400
        write_tiny_model(models / name, family, tokenizer=False, vocab_size=vocab_size, **shape)
    run_ranks("tests.unit.parallel.share", 2, str(tmp_path / "meeting"), str(models), str(tmp_path), "cuda")
    for directory in models.iterdir():
        expected = torch.from_numpy(logits_of(loaded_decoder(files_of(directory)[0]))).log_softmax(-1)
        for rank in range(2):
            with np.load(tmp_path / f"{directory.name}-{rank}.npz") as share:
                got = torch.from_numpy(share["logits"]).log_softmax(-1)
            assert float((expected.exp() * (expected - got)).sum(-1).max()) < 1e-6
