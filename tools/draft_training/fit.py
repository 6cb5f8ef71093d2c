"""What all training has in common: texts in batches, a rate that rises and falls, and what is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from tools.draft_training.target import Target

SAVED_S = 60.0
SHARE_KEPT = 0.4
"""Of the memory that is free, for what the target makes of texts."""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    ids: np.ndarray
    """int32"""
    prompt_len: int


@dataclass(frozen=True)
class Training:
    """How to train."""

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


@dataclass(frozen=True)
class Batch:
    """Texts side by side, [num_texts, length], with what the target makes of them."""

    ids: Tensor
    """int64"""
    is_text: Tensor
    """bool: not filled up"""
    is_answer: Tensor
    """bool"""
    embeds: Tensor
    """[..., hidden] in the target's dtype"""
    states: Tensor
    """The same, [..., layers * hidden], before the layers asked for"""
    last: Tensor
    """[num_tokens, hidden] of all that is text, what the target's logits are made of."""


@dataclass(frozen=True)
class Loss:
    """Of a batch; of each step or place ahead, float32 [depth]: drafts, and those that were what came."""

    value: Tensor
    hits: Tensor
    counts: Tensor


def fit(
    module: nn.Module,
    target: Target,
    texts: Sequence[Text],
    layers: tuple[int, ...],
    how: Training,
    loss_of: Callable[[Batch], Loss],
    told: Callable[[str], None],
    save: Callable[[], None],
) -> None:
    """Train the module's parameters. layers: of the target, before which hidden states are wanted; save: called every
    SAVED_S seconds and at the end."""
    batches = batches_of(texts, how)
    total = len(batches) * how.epochs
    kept: dict[int, Batch] | None = {} if _have_room(target, batches, layers) else None
    optimiser = torch.optim.AdamW(module.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng, begin, shown = np.random.default_rng(how.seed), time.monotonic(), 0.0
    saved = begin
    sums: Tensor | None = None
    order = (index for _ in range(how.epochs) for index in rng.permutation(len(batches)).tolist())
    for step, index in enumerate(order):
        share = step / total
        if how.most_seconds is not None:
            share = max(share, (time.monotonic() - begin) / how.most_seconds)
        if share >= 1.0:
            break
        for group in optimiser.param_groups:
            group["lr"] = how.rate * _rate(share, how.warm_up)
        batch = None if kept is None else kept.get(index)
        if batch is None:
            batch = _batch(target, batches[index], layers)
        if kept is not None:
            kept[index] = batch
        loss = loss_of(batch)
        optimiser.zero_grad(set_to_none=True)
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        both = torch.stack((loss.hits, loss.counts))
        sums = both if sums is None else sums + both
        if share >= shown or step + 1 == total:
            shown += 0.05
            rates = " ".join(f"{one:.3f}" for one in (sums[0] / sums[1].clamp(min=1)).tolist())
            seconds = time.monotonic() - begin
            told(f"step {step + 1}/{total} loss {loss.value.item():.3f} hits {rates} {seconds:.0f} s")
            sums = None
        if time.monotonic() - saved > SAVED_S:
            saved = time.monotonic()
            save()
    save()


def scales(target: Target, texts: Sequence[Text], layers: tuple[int, ...]) -> list[float]:
    """How large hidden states before these layers are: their root mean squares, but for texts' first tokens, which may
    be of another order."""
    found, _ = target([text.ids[:256] for text in texts[:64]], layers)
    starts = np.cumsum([0, *(min(len(text.ids), 256) for text in texts[:64])])[:-1]
    keep = torch.ones(len(found), dtype=torch.bool, device=found.device)
    keep[torch.from_numpy(starts).to(found.device)] = False
    parts = found[keep].float().chunk(len(layers), dim=-1)
    return [float(part.square().mean().sqrt().clamp(min=1e-6)) for part in parts]


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> np.ndarray:
    """The most frequent tokens of answers, ascending: int64 [size]."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text.ids[text.prompt_len :], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def batches_of(texts: Sequence[Text], how: Training) -> list[list[Text]]:
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


def _have_room(target: Target, batches: list[list[Text]], layers: tuple[int, ...]) -> bool:
    """Whether what the target makes of all texts can stay where it is: it is the same in every epoch."""
    decoder = target.decoder
    num_tokens = sum(len(batch) * max(len(text.ids) for text in batch) for batch in batches)
    size = num_tokens * (len(layers) + 2) * decoder.spec.hidden_size * decoder.dtype.itemsize
    is_cuda = decoder.device.type == "cuda"
    room = torch.cuda.mem_get_info()[0] if is_cuda else psutil.virtual_memory().available
    return size < SHARE_KEPT * room


def _rate(share: float, warm_up: float) -> float:
    """Of the highest: rises in a line, falls as a cosine."""
    rate = min(share / warm_up, 1.0) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * share)))
    return float(max(rate, 1e-3))


def _batch(target: Target, texts: list[Text], layers: tuple[int, ...]) -> Batch:
    device = target.decoder.device
    states, last = target([text.ids for text in texts], layers)
    length = max(len(text.ids) for text in texts)
    ids = np.zeros((len(texts), length), np.int64)
    is_text, is_answer = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
    for row, text in enumerate(texts):
        size = len(text.ids)
        ids[row, :size] = text.ids
        is_text[row, :size] = True
        is_answer[row, text.prompt_len : size] = True
    where, all_ids = torch.from_numpy(is_text).to(device), torch.from_numpy(ids).to(device)
    embeds = target.embed(all_ids.flatten()).view(*ids.shape, -1).clone()
    all_states = torch.zeros(*ids.shape, states.shape[1], dtype=states.dtype, device=device)
    all_states[where] = states.clone()
    return Batch(all_ids, where, torch.from_numpy(is_answer).to(device), embeds, all_states, last.clone())
