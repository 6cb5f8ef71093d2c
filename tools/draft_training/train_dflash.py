"""Training a DFlash drafter on what its target has answered, and writing it as drafters are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from scheduler_proc.speculative.dflash import DFlashSpec
from scheduler_proc.speculative.dflash_files import ARCHITECTURE
from tools.draft_training.dflash_module import DFlashModule
from tools.draft_training.fit import Batch, Loss, Text, Training, fit, scales
from tools.draft_training.publish import publish
from tools.draft_training.target import Target

REACH = 4.0
"""A place of a block counts exp(-1 / REACH) of the one before: it matters only where that was right."""
SHORTER = 0.5
"""Share of the batches whose blocks are shorter than the longest: they are when little pays."""


def train(
    target: Target,
    texts: Sequence[Text],
    spec: DFlashSpec,
    how: Training,
    most_predictions: int,
    told: Callable[[str], None] = print,
) -> DFlashModule:
    """A drafter in float32 parameters on the target's device. most_predictions: tokens of a step that are drafted, over
    all its blocks."""
    device = target.decoder.device
    module = DFlashModule(spec, how.most_len + spec.block_size, how.seed).to(device)
    with torch.no_grad():
        module.scales.copy_(torch.tensor(scales(target, texts, spec.layers)).repeat_interleave(spec.hidden_size))
        module.norm.copy_(target.final_norm())
    head = target.output_rows().clone()
    mask = target.embed(torch.tensor([spec.mask_id], device=device)).float().clone()
    generator = torch.Generator(device).manual_seed(how.seed)

    def loss_of(batch: Batch) -> Loss:
        size = spec.block_size
        if float(torch.rand(1, generator=generator, device=device)) < SHORTER:
            size = int(torch.randint(2, size + 1, (1,), generator=generator, device=device))
        blocks = max(most_predictions // (size - 1) // len(batch.ids), 1)
        return _loss(target, module, batch, head, mask, size, blocks, generator)

    fit(module, target, texts, spec.layers, how, loss_of, told)
    return module


def _loss(
    target: Target,
    module: DFlashModule,
    batch: Batch,
    head: Tensor,
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
        logits = found[counted] @ head.T
    teacher = torch.zeros(num_texts, length, batch.last.shape[1], dtype=batch.last.dtype, device=device)
    teacher[batch.is_text] = batch.last
    # What the target says at the place before.
    wanted = target.logits(teacher[row, (inside - 1)][counted])
    token, share = came[counted], torch.exp(-(step - 1) / REACH).expand_as(counted)[counted]
    value = (_cross_entropy(logits, wanted, token) * share).sum() / share.sum().clamp(min=1e-6)
    hits = torch.zeros(counted.shape, device=device)
    hits[counted] = (logits.argmax(dim=-1) == token).float()
    summed = torch.zeros(2, module.spec.block_size - 1, device=device)
    summed[0, : size - 1], summed[1, : size - 1] = hits.sum(dim=(0, 1)), counted.float().sum(dim=(0, 1))
    return Loss(value, summed[0], summed[1])


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
