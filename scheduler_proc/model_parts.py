"""What every device that runs a model is put together from: weights, slots, KV pages."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.model_files.progress import Progress
from engine.model_files.types import ModelFiles
from engine.sampling import MAX_STOP_IDS
from kernels.dispatch import KernelSet
from scheduler_proc.cache.kv_pool import KVPool, bytes_per_token
from scheduler_proc.cpus import usable_cores
from scheduler_proc.layers.linear import LinearMethod, Unquantised
from scheduler_proc.layers.packed import Packed
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.numerics import Numerics
from scheduler_proc.parallel.group import Group
from scheduler_proc.settle import context_length
from scheduler_proc.weights.load import load_weights
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages
from scheduler_proc.worker.transfer import Transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """The device's share of the batch: KV, and the slots that point into it."""

    kv_pool: KVPool
    slots: DeviceSlots
    pages: Pages
    num_pages: int
    """Without the one that belongs to nobody."""
    max_len: int
    """Tokens of a request at most."""


def make_memory(
    config: EngineConfig, model: ModelFiles, decoder: Decoder, num_tokens: int, kv_dtype: torch.dtype
) -> Memory:
    """For `num_tokens` tokens of KV."""
    page_size, shape = config.page_size, decoder.kv_shape
    num_pages = num_tokens // page_size
    kv_pool = KVPool(
        shape.num_layers, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim, kv_dtype, decoder.device
    )
    longest = min(context_length(config, model), num_pages * page_size)
    num_stop_ids = MAX_STOP_IDS + len(model.config.eos_ids)
    # Drafts may lie behind the end of the longest text; nothing is written there.
    most_pages = -(-(longest + config.draft_places) // page_size)
    slots = DeviceSlots(config.max_running_requests, most_pages, Transfer(decoder.device), num_stop_ids)
    return Memory(kv_pool, slots, Pages(kv_pool.layers, page_size, num_pages), num_pages, longest)


def load_decoder(
    config: EngineConfig,
    model: ModelFiles,
    numerics: Numerics,
    kernels: KernelSet,
    place: torch.device,
    group: Group,
    told: str = "",
) -> Decoder:
    """The model with its weights. told: for the log. Raises ConfigError, ModelFileError."""
    begin = time.monotonic()
    method: LinearMethod = Packed(kernels) if numerics.packed else Unquantised(kernels)
    decoder = Decoder(
        spec_of(model.config),
        kernels,
        place,
        numerics.dtype,
        max_position=context_length(config, model),
        method=method,
        group=group,
    )
    counts = load_weights(decoder, model, _shown() if group.rank == 0 else None)
    log.info(
        "event=weights_loaded seconds=%.1f dtype=%s%s%s",
        time.monotonic() - begin,
        numerics.dtype,
        _packing(counts) if numerics.packed else "",
        told,
    )
    return decoder


def weight_bytes(decoder: Decoder) -> int:
    """Of all parameters."""
    return sum(tensor.nbytes for tensor in decoder.parameters().values())


def kv_bytes_per_token(decoder: Decoder, kv_dtype: torch.dtype) -> int:
    """Of a token in a KV pool."""
    shape = decoder.kv_shape
    return bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_dtype)


def num_threads(config: EngineConfig, num_ranks: int) -> int:
    """Threads of computation of a process; num_ranks: processes that share the cores."""
    return config.process.cpu_threads or min(max(usable_cores() // num_ranks, 1), 1024)


def log_pool(memory: Memory, kv_dtype: torch.dtype) -> None:
    """One line about the KV pool."""
    num_pages, page_size = memory.num_pages, memory.pages.page_size
    log.info(
        "event=kv_pool tokens=%d pages=%d page_size=%d dtype=%s", num_pages * page_size, num_pages, page_size, kv_dtype
    )


def _packing(counts: Counter[str]) -> str:
    from kernels.cpu import native

    kinds = ",".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))
    return f" packing={kinds} isa={native.isa()}"


def _shown() -> Callable[[str, int, int], None]:
    """A progress callback for load_weights that shows itself on stderr."""
    bar: Progress | None = None

    def update(file: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal bar
        if bar is None:
            bar = Progress("weights", total_bytes)
        bar.set(done_bytes)
        if done_bytes >= total_bytes:
            bar.close()

    return update
