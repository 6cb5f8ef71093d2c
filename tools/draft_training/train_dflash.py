"""Training a DFlash drafter on what its target has answered, and writing it as drafters are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scheduler_proc.speculative.budget import draft_sizes
from scheduler_proc.speculative.dflash import DFlashSpec
from scheduler_proc.speculative.dflash_files import ARCHITECTURE
from tools.draft_training.dflash_module import DFlashModule
from tools.draft_training.fit import Batch, Loss, Text, Training, draft_vocabulary, fit, scales
from tools.draft_training.publish import publish
from tools.draft_training.target import Target

REACH = 4.0
"""A place of a block counts exp(-1 / REACH) of the one before: it matters only where that was right."""
MOST_FREQUENT, OTHERS = 8192, 4096
"""Tokens that drafts are told apart from: those that answers have most, and each time some of all others."""


def train(
    target: Target,
    texts: Sequence[Text],
    spec: DFlashSpec,
    how: Training,
    most_tokens: int,
    directory: Path,
    told: Callable[[str], None] = print,
) -> None:
    """A drafter, written into a directory. most_tokens: of a step's blocks together. Blocks are as long as they may be
    when a step drafts less."""
    device = target.decoder.device
    module = DFlashModule(spec, how.most_len + spec.block_size, how.seed).to(device)
    with torch.no_grad():
        module.scales.copy_(torch.tensor(scales(target, texts, spec.layers)).repeat_interleave(spec.hidden_size))
        module.norm.copy_(target.final_norm())
    vocabulary = _Vocabulary(target, draft_vocabulary(texts, MOST_FREQUENT, target.decoder.spec.vocab_size))
    sizes = [num_drafts + 1 for num_drafts in draft_sizes(spec.block_size - 1)]
    mask = target.embed(torch.tensor([spec.mask_id], device=device)).clone()
    generator, rng = torch.Generator(device).manual_seed(how.seed), np.random.default_rng(how.seed)

    def loss_of(batch: Batch) -> Loss:
        size = int(rng.choice(sizes))
        blocks = min(max(most_tokens // size // len(batch.ids), 1), batch.ids.shape[1])
        return _loss(target, module, batch, vocabulary, mask, size, blocks, generator)

    def save() -> None:
        write(module, target, directory)

    fit(module, target, texts, spec.layers, how, loss_of, told, save)


def _loss(
    target: Target,
    module: DFlashModule,
    batch: Batch,
    vocabulary: _Vocabulary,
    mask: Tensor,
    size: int,
    blocks: int,
    generator: torch.Generator,
) -> Loss:
    """Of `blocks` blocks of `size` tokens at random places of each answer."""
    device, (num_texts, length) = batch.ids.device, batch.ids.shape
    # Blocks begin with a token of the answer that another follows.
    begins = batch.is_answer & batch.is_text.roll(-1, dims=1)
    begins[:, -1] = False
    has_any = begins.any(dim=1)
    weights = torch.where(has_any.unsqueeze(1), begins.float(), 1.0)
    anchors = torch.multinomial(weights, blocks, replacement=True, generator=generator)
    step = torch.arange(1, size, device=device)
    places = anchors.unsqueeze(2) + step
    inside = places.clamp(max=length - 1)
    row = torch.arange(num_texts, device=device).view(-1, 1, 1)
    counted = (places < length) & batch.is_text[row, inside] & has_any.view(-1, 1, 1)
    came = batch.ids[row, inside]
    first = batch.embeds[row.squeeze(2), anchors].unsqueeze(2)
    embeds = torch.cat((first, mask.expand(num_texts, blocks, size - 1, -1)), dim=2)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        found = module(embeds, batch.states, anchors)[:, :, 1:]
        rows = vocabulary.rows(generator)
        logits = found[counted] @ rows.T
    teacher = torch.zeros(num_texts, length, batch.last.shape[1], dtype=batch.last.dtype, device=device)
    teacher[batch.is_text] = batch.last
    # What the target says at the place before.
    with torch.no_grad():
        wanted = teacher[row, (inside - 1)][counted] @ rows.T.to(teacher.dtype)
    token = vocabulary.own[came[counted]]
    share = torch.exp(-(step - 1) / REACH).expand_as(counted)[counted] * (token >= 0)
    value = (_cross_entropy(logits, wanted, token.clamp(min=0)) * share).sum() / share.sum().clamp(min=1e-6)
    hits = torch.zeros(counted.shape, device=device)
    hits[counted] = (logits.argmax(dim=-1) == token).float()
    summed = torch.zeros(2, module.spec.block_size - 1, device=device)
    summed[0, : size - 1], summed[1, : size - 1] = hits.sum(dim=(0, 1)), counted.float().sum(dim=(0, 1))
    return Loss(value, summed[0], summed[1])


class _Vocabulary:
    """Rows of the target's output projection that a step looks at."""

    def __init__(self, target: Target, frequent: np.ndarray) -> None:
        """frequent: int64, the tokens that every step has."""
        device = target.decoder.device
        all_rows = target.output_rows().clone()
        kept = torch.from_numpy(frequent).to(device)
        self.own = torch.full((len(all_rows),), -1, dtype=torch.int64, device=device)
        """int64 [vocab]: the row of each token, -1 of those that a step may lack."""
        self.own[kept] = torch.arange(len(kept), device=device)
        self._kept, self._others = all_rows[kept], all_rows[self.own < 0]

    def rows(self, generator: torch.Generator) -> Tensor:
        """float32 [n, hidden]: the frequent ones first."""
        if not len(self._others):
            return self._kept
        chosen = torch.randint(len(self._others), (OTHERS,), generator=generator, device=self._kept.device)
        return torch.cat((self._kept, self._others[chosen]))


def _cross_entropy(logits: Tensor, teacher: Tensor, token: Tensor) -> Tensor:
    """Half by the teacher's logits [n, vocab], half by the tokens that came, int64 [n]: float32 [n]."""
    logs = logits.float().log_softmax(dim=-1)
    hard = logs.gather(1, token.unsqueeze(1)).squeeze(1)
    soft = (teacher.float().softmax(dim=-1) * logs).sum(dim=-1)
    return -0.5 * (hard + soft)


def write(module: DFlashModule, target: Target, directory: Path) -> None:
    """config.json and model.safetensors, matrices in float16."""
    spec = module.spec
    config = {
        "architectures": [ARCHITECTURE],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": target.decoder.spec.max_position,
        "vocab_size": target.decoder.spec.vocab_size,
        "block_size": spec.block_size,
        "num_target_layers": target.decoder.spec.num_layers,
        "dflash_config": {"mask_token_id": spec.mask_id, "target_layer_ids": [layer - 1 for layer in spec.layers]},
        "layer_types": ["full_attention"] * spec.num_layers,
        "torch_dtype": "float16",
    }
    publish(directory, config, module.published())
