"""What an EAGLE head drafts in the engine is what its definition gives, worked out densely over whole texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from engine.model_files.types import ModelFiles
from kernels.speculative import Drafts
from scheduler_proc.worker.cpu import CpuDevice
from tests.support.eagle_heads import DIM, HEADS, KV_HEADS, write_eagle_head
from tests.support.matrix import config, drafting_with
from tests.support.scheduler import Harness
from tests.support.tiny_models import tiny_config, write_tiny_model
from tests.unit.weights.files import hf_files
from tools.draft_training.target import Target

PROMPT = [7, 3, 90, 41, 5, 5, 17, 300, 22]
ANSWER = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return hf_files(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False))


def turned(x: Tensor) -> Tensor:
    """[length, heads, DIM], each place turned by its number (Su et al., 2021; base 10000, halves paired)."""
    angles = torch.arange(len(x)).double()[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., : DIM // 2].double(), x[..., DIM // 2 :].double()) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1).float()


def layer(tensors: dict[str, Tensor], embeds: Tensor, features: Tensor) -> Tensor:
    """[length, hidden]: what EAGLE makes of the tokens of a text, and of the features of who came before each."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"layers.0.{name}_proj.weight"].T

    x = torch.cat((embeds, features), dim=-1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    q, k, v = (linear(x, f"self_attn.{part}").view(len(x), -1, DIM) for part in "qkv")
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (turned(k), v))
    out = F.scaled_dot_product_attention(
        turned(q).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    x = x + linear(out.transpose(0, 1).flatten(1), "self_attn.o")
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = normed * tensors["layers.0.post_attention_layernorm.weight"]
    return x + linear(F.silu(linear(normed, "mlp.gate")) * linear(normed, "mlp.up"), "mlp.down")


def test_it_drafts_as_published(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_eagle_head(tmp_path / "head", tiny_config(), seed=1)
    harness = Harness.of_model(tmp_path, drafting_with("EAGLE", str(folder), 1), model)
    assert isinstance(harness.device, CpuDevice)
    verifier = harness.device._runner.verifier
    assert verifier is not None
    seen: list[tuple[int, list[int]]] = []
    draft = verifier.drafter.draft

    def spy(*arguments: object) -> Drafts:
        drafts = draft(*arguments)  # type: ignore[arg-type]
        seen.append((int(harness.slots.num_known[0]), drafts.tokens[0].tolist()))
        return drafts

    verifier.drafter.draft = spy  # type: ignore[method-assign, assignment]
    harness.add(1, PROMPT, max_tokens=ANSWER)
    harness.run()

    plain = Harness.of_model(tmp_path, config(), model)
    plain.add(1, PROMPT, max_tokens=ANSWER)
    plain.run()
    assert harness.tokens[1] == plain.tokens[1] and len(seen) > 10
    assert isinstance(plain.device, CpuDevice)
    target = Target(plain.device._runner.decoder)
    tensors = load_file(folder / "model.safetensors")
    for known, drafts in seen[:12]:
        text = np.array([*PROMPT, *plain.tokens[1]][:known], np.int32)
        # What the target's output projection reads.
        _, last = target([text], (0,))
        features = torch.cat((torch.zeros_like(last[:1]), last[:-1]))
        for token in drafts:
            hidden = layer(tensors, target.embed(torch.from_numpy(text.astype(np.int64))), features)[-1:]
            assert int(target.logits(hidden).argmax()) == token
            text, features = np.append(text, np.int32(token)), torch.cat((features, hidden))
