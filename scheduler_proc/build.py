"""Puts a scheduler together: sizes, device, slots, pool, planner, workload. Chooses implementations once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_files.progress import Progress
from engine.model_files.types import ModelFiles
from scheduler_proc.cache.page_pool import PagePool
from scheduler_proc.plan import Device
from scheduler_proc.planner import Planner
from scheduler_proc.slots import Slots
from scheduler_proc.worker.null import NullDevice
from scheduler_proc.workload import GenerateWorkload

if TYPE_CHECKING:
    from scheduler_proc.models.decoder import Decoder

log = logging.getLogger(__name__)

NULL_POOL_TOKENS = 1 << 20


def context_length(config: EngineConfig, model: ModelFiles) -> int:
    """Most tokens of one request; raises ConfigError if more is asked than the model can do."""
    asked = config.model.context_length
    if asked is None:
        return model.config.max_position
    if asked > model.config.max_position:
        raise ConfigError(
            f"--context-length is {asked}, but {model.name} handles at most {model.config.max_position} tokens."
        )
    return asked


def build(config: EngineConfig, model: ModelFiles) -> tuple[GenerateWorkload, Device]:
    """Load the model, take the memory, return what the loop needs."""
    options = config.scheduler
    if config.device == "null":
        device: Device = NullDevice(model.config.vocab_size)
        num_tokens = options.max_total_tokens or NULL_POOL_TOKENS
    else:
        device, num_tokens = _model_device(config, model)
    pool = PagePool(num_tokens // options.page_size, options.page_size, device.pages_freed)
    longest = min(context_length(config, model), pool.num_pages * pool.page_size)
    slots = Slots(options.max_running_requests, longest, options.page_size, len(model.config.eos_ids))
    planner = Planner(slots, pool, options.chunked_prefill_size, model.config.eos_ids)
    workload = GenerateWorkload(
        slots, pool, planner, vocab_size=model.config.vocab_size, context_length=context_length(config, model)
    )
    return workload, device


def _model_device(config: EngineConfig, model: ModelFiles) -> tuple[Device, int]:
    import torch

    from kernels.dispatch import select
    from scheduler_proc.cache.kv_pool import KVPool, default_tokens
    from scheduler_proc.models.decoder import Decoder
    from scheduler_proc.models.registry import spec_of
    from scheduler_proc.weights.load import load_weights
    from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
    from scheduler_proc.worker.device_slots import DeviceSlots
    from scheduler_proc.worker.model_runner import ModelRunner

    torch.set_num_threads(config.process.cpu_threads or len(os.sched_getaffinity(0)))
    options = config.scheduler
    place = torch.device("cpu")
    dtype = torch.float32 if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    kernels = select(place.type, dtype)
    begin = time.monotonic()
    decoder = Decoder(spec_of(model.config), kernels, place, dtype, max_position=context_length(config, model))
    load_weights(decoder, model, _shown())
    log.info("event=weights_loaded seconds=%.1f dtype=%s", time.monotonic() - begin, dtype)
    num_tokens = options.max_total_tokens or default_tokens(_kv_bytes_per_token(decoder), options.page_size)
    num_pages = num_tokens // options.page_size
    shape = decoder.kv_shape
    kv_pool = KVPool(shape.num_layers, num_pages, options.page_size, shape.num_kv_heads, shape.head_dim, dtype, place)
    longest = min(context_length(config, model), num_pages * options.page_size)
    max_pages = -(-longest // options.page_size)
    slots = DeviceSlots(options.max_running_requests, max_pages, place)
    runner = ModelRunner(decoder, kernels, kv_pool, slots, options.page_size)
    device: Device = DelayedDevice(runner) if config.device == "delayed" else CpuDevice(runner)
    log.info("event=kv_pool tokens=%d pages=%d page_size=%d", num_tokens, num_pages, options.page_size)
    return device, num_tokens


def _kv_bytes_per_token(decoder: Decoder) -> int:
    shape = decoder.kv_shape
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * decoder.dtype.itemsize


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
