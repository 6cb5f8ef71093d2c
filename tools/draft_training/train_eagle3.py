"""Training an EAGLE-3 head on what its target has answered, and writing it as heads are published."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scheduler_proc.speculative.eagle3 import Eagle3Spec
from scheduler_proc.speculative.eagle3_files import ARCHITECTURE
from tools.draft_training.eagle3_module import Eagle3Module
from tools.draft_training.target import Target


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    ids: np.ndarray
    """int32"""
    prompt_len: int


@dataclass(frozen=True)
class Training:
    """How to train."""

    depth: int = 5
    """Steps that the head is unrolled for."""
    decay: float = 0.8
    """What a step counts against the one before."""
    rate: float = 1e-3
    warm_up: float = 0.05
    """Share of the steps in which the rate grows."""
    batch_tokens: int = 8192
    epochs: int = 2
    most_seconds: float | None = None
    """Fewer steps are made, and the rate falls accordingly, where all would take longer."""
    most_len: int = 640
    """Tokens of a text that are looked at."""
    seed: int = 0


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> np.ndarray:
    """The most frequent tokens of answers, ascending: int64 [size]."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.ids[text.prompt_len :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def train(
    target: Target,
    texts: Sequence[Text],
    spec: Eagle3Spec,
    vocabulary: np.ndarray,
    how: Training,
    told: Callable[[str], None] = print,
) -> Eagle3Module:
    """A head for spec (whose draft vocabulary is `vocabulary`), in float32 parameters on the target's device."""
    device = target.decoder.device
    module = Eagle3Module(spec, how.most_len + how.depth, how.seed).to(device)
    kept = torch.from_numpy(vocabulary).to(device)
    own_id = torch.full((target.decoder.spec.vocab_size,), -1, dtype=torch.int64, device=device)
    own_id[kept] = torch.arange(len(kept), device=device)
    batches = list(_batches(texts, how))
    total = len(batches) * how.epochs
    optimiser = torch.optim.AdamW(module.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng, begin, step = np.random.default_rng(how.seed), time.monotonic(), 0
    sums = torch.zeros(2, how.depth, device=device)
    for _ in range(how.epochs):
        for index in rng.permutation(len(batches)).tolist():
            share = step / total
            if how.most_seconds is not None:
                share = max(share, (time.monotonic() - begin) / how.most_seconds)
            if share >= 1.0:
                break
            rate = min(share / how.warm_up, 1.0) * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * share)))
            for group in optimiser.param_groups:
                group["lr"] = how.rate * max(rate, 1e-3)
            loss, hits, counts = _loss(target, module, batches[index], kept, own_id, how)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimiser.step()
            sums += torch.stack((hits, counts))
            step += 1
            if step % max(total // 20, 1) == 0 or step == total:
                rates = (sums[0] / sums[1].clamp(min=1)).tolist()
                shown = " ".join(f"{one:.3f}" for one in rates)
                told(f"step {step}/{total} loss {loss.item():.3f} hits {shown} {time.monotonic() - begin:.0f} s")
                sums.zero_()
    return module


def _batches(texts: Sequence[Text], how: Training) -> list[list[Text]]:
    """Texts of similar lengths together, so that little is filled up."""
    batches: list[list[Text]] = []
    longest = 0
    for text in sorted(texts, key=lambda text: len(text.ids)):
        length = min(len(text.ids), how.most_len)
        if length < 2 or text.prompt_len >= length:
            continue
        longest = max(longest, length) if batches and batches[-1] else length
        if not batches or longest * (len(batches[-1]) + 1) > how.batch_tokens:
            batches.append([])
            longest = length
        batches[-1].append(Text(text.ids[:length], text.prompt_len))
    return batches


def _loss(
    target: Target, module: Eagle3Module, texts: list[Text], kept: Tensor, own_id: Tensor, how: Training
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch; and by depth, how often the most likely draft was what came, and of how many."""
    device = target.decoder.device
    states, last = target([text.ids for text in texts], module.spec.layers)
    length = max(len(text.ids) for text in texts)
    mask = torch.zeros(len(texts), length, dtype=torch.bool, device=device)
    ids = torch.zeros(len(texts), length, dtype=torch.int64, device=device)
    is_answer = torch.zeros_like(mask)
    for row, text in enumerate(texts):
        size = len(text.ids)
        mask[row, :size] = True
        ids[row, :size] = torch.from_numpy(text.ids.astype(np.int64)).to(device)
        is_answer[row, text.prompt_len : size] = True
    embeds = target.embed(ids.flatten()).view(*ids.shape, -1).float().clone()
    all_states = torch.zeros(*ids.shape, states.shape[1], device=device)
    all_states[mask] = states.float().clone()
    wanted = torch.zeros(*ids.shape, len(kept), dtype=torch.bfloat16, device=device)
    wanted[mask] = target.logits(last)[:, kept].to(torch.bfloat16)
    use = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with use:
        found = module(embeds, all_states, how.depth)
    loss = torch.zeros((), device=device)
    hits, counts = torch.zeros(how.depth, device=device), torch.zeros(how.depth, device=device)
    for ahead, logits in enumerate(found):
        # At place p it is the token at p + ahead + 1, of which the target's logits are those of p + ahead.
        logits = logits[:, : length - ahead - 1].float()
        came = ids[:, ahead + 1 :]
        counted = is_answer[:, ahead + 1 :]
        teacher = wanted[:, ahead : length - 1].float()
        known = counted & (own_id[came] >= 0)
        soft = -(teacher.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)
        hard = F.cross_entropy(logits.flatten(0, 1), own_id[came].clamp(min=0).flatten(), reduction="none").view_as(
            soft
        )
        loss = loss + how.decay**ahead * ((0.5 * soft + 0.5 * hard) * known).sum() / known.sum().clamp(min=1)
        hits[ahead] = ((kept[logits.argmax(dim=-1)] == came) & counted).sum()
        counts[ahead] = counted.sum()
    return loss, hits, counts


def write(module: Eagle3Module, vocabulary: np.ndarray, target: Target, directory: Path) -> None:
    """config.json and model.safetensors, matrices in float16."""
    from safetensors.torch import save_file

    spec = module.spec
    directory.mkdir(parents=True, exist_ok=True)
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
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    d2t = torch.from_numpy(vocabulary - np.arange(len(vocabulary)))
    tensors = {
        name: (value if value.dtype == torch.int64 else value.detach().half()).cpu().contiguous()
        for name, value in module.published(d2t).items()
    }
    save_file(tensors, directory / "model.safetensors")
