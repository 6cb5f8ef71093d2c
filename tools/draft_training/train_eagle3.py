"""Training an EAGLE-3 head on what its target has answered, and writing it as heads are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scheduler_proc.speculative.eagle3 import Eagle3Spec
from scheduler_proc.speculative.eagle3_files import ARCHITECTURE
from tools.draft_training.eagle3_module import Eagle3Module
from tools.draft_training.fit import Batch, Loss, Text, Training, fit, scales
from tools.draft_training.publish import publish
from tools.draft_training.target import Target

DECAY = 0.8
"""What a step counts against the one before."""


def train(
    target: Target,
    texts: Sequence[Text],
    spec: Eagle3Spec,
    vocabulary: np.ndarray,
    how: Training,
    depth: int,
    directory: Path,
    told: Callable[[str], None] = print,
) -> None:
    """A head for spec (whose draft vocabulary is `vocabulary`), written into a directory. depth: steps that it is
    unrolled for."""
    device = target.decoder.device
    module = Eagle3Module(spec, how.most_len + depth, how.seed).to(device)
    kept = torch.from_numpy(vocabulary).to(device)
    with torch.no_grad():
        module.scales.copy_(torch.tensor(scales(target, texts, spec.layers)).repeat_interleave(spec.hidden_size))
        module.lm_head.copy_(target.output_rows()[kept])
        module.norm.copy_(target.final_norm())
    own_id = torch.full((target.decoder.spec.vocab_size,), -1, dtype=torch.int64, device=device)
    own_id[kept] = torch.arange(len(kept), device=device)

    def loss_of(batch: Batch) -> Loss:
        return _loss(target, module, batch, kept, own_id, depth)

    def save() -> None:
        write(module, vocabulary, target, directory)

    fit(module, target, texts, spec.layers, how, loss_of, told, save)


def _loss(target: Target, module: Eagle3Module, batch: Batch, kept: Tensor, own_id: Tensor, depth: int) -> Loss:
    device, ids, length = batch.ids.device, batch.ids, batch.ids.shape[1]
    wanted = torch.zeros(*ids.shape, len(kept), dtype=torch.bfloat16, device=device)
    wanted[batch.is_text] = target.logits(batch.last)[:, kept].to(torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        found = module(batch.embeds, batch.states, depth)
    loss = torch.zeros((), device=device)
    hits, counts = torch.zeros(depth, device=device), torch.zeros(depth, device=device)
    for ahead, logits in enumerate(found):
        # At place p it is the token at p + ahead + 1, of which the target's logits are those of p + ahead.
        logits = logits[:, : length - ahead - 1].float()
        came = ids[:, ahead + 1 :]
        counted = batch.is_answer[:, ahead + 1 :]
        teacher = wanted[:, ahead : length - 1].float()
        known = counted & (own_id[came] >= 0)
        soft = -(teacher.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)
        own = own_id[came].clamp(min=0).flatten()
        hard = F.cross_entropy(logits.flatten(0, 1), own, reduction="none").view_as(soft)
        loss = loss + DECAY**ahead * ((0.5 * soft + 0.5 * hard) * known).sum() / known.sum().clamp(min=1)
        hits[ahead] = ((kept[logits.argmax(dim=-1)] == came) & counted).sum()
        counts[ahead] = counted.sum()
    return Loss(loss, hits, counts)


def write(module: Eagle3Module, vocabulary: np.ndarray, target: Target, directory: Path) -> None:
    """config.json and model.safetensors, matrices in float16."""
    spec = module.spec
    config = {
        "architectures": [ARCHITECTURE],
        "hidden_size": spec.hidden_size,
        "target_hidden_size": target.decoder.spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": target.decoder.spec.max_position,
        "vocab_size": target.decoder.spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "num_aux_hidden_states": len(spec.layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in spec.layers]},
        "torch_dtype": "float16",
    }
    d2t = torch.from_numpy(vocabulary - np.arange(len(vocabulary)))
    publish(directory, config, module.published(d2t))
