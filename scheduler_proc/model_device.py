"""The device that runs a model: weights, kernels, memory for KV, and how its steps run; chosen once, at the start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.model_files.types import ModelFiles
from kernels.dispatch import can_record, knows_int8_pages, select
from scheduler_proc.cache.kv_pool import available_memory, default_tokens, fraction_tokens
from scheduler_proc.model_parts import (
    kv_bytes_per_token,
    load_decoder,
    log_pool,
    make_memory,
    num_threads,
    weight_bytes,
)
from scheduler_proc.numerics import choose_numerics
from scheduler_proc.parallel.group import Alone, Group
from scheduler_proc.plan import Device
from scheduler_proc.speculative.make import Drafting
from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
from scheduler_proc.worker.forward import EagerForward, Forward
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.program_forward import ProgramForward


def model_device(
    config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group | None = None
) -> tuple[Device, int]:
    """The device, ready to run, and how many tokens its KV pool holds. `on_layer` is called amid long steps.

    group: who shares the model. Raises EngineError for what options, files or memory do not allow, RuntimeError or
    MemoryError where memory runs out.
    """
    group = group or Alone()
    if config.device == "cuda":
        from scheduler_proc.cuda_device import CudaBuild

        return CudaBuild(config, model, on_layer, group).device()
    return _cpu_device(config, model, on_layer, group)


def _cpu_device(
    config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group
) -> tuple[Device, int]:
    options, page_size = config.scheduler, config.page_size
    # All ranks are on this machine.
    available = available_memory() // group.size
    numerics = choose_numerics(config, model)
    threads = _start_threads(config, numerics.packed, group.size)
    try:
        kernels = select("cpu", numerics.dtype, packed=numerics.packed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if numerics.kv_dtype == torch.int8 and not knows_int8_pages(kernels):
        raise ConfigError("ENGINE_KERNELS: --kv-cache-dtype int8 needs rope_store and paged_attention to be native.")
    decoder = load_decoder(config, model, numerics, kernels, torch.device("cpu"), group, f" threads={threads}")
    decoder.on_layer = on_layer
    drafting = Drafting(config, model, decoder, numerics.kv_dtype)
    per_token = kv_bytes_per_token(decoder, numerics.kv_dtype) + drafting.bytes_per_token
    num_tokens = options.max_total_tokens
    if num_tokens is None and options.mem_fraction_static is not None:
        weights = weight_bytes(decoder)
        num_tokens = fraction_tokens(options.mem_fraction_static, available, weights, per_token, page_size)
    elif num_tokens is None:
        num_tokens = default_tokens(per_token * group.size, page_size)
    num_tokens = group.least(num_tokens)
    memory = make_memory(config, model, decoder, num_tokens, numerics.kv_dtype)
    verifier = drafting.verifier(memory)
    forward: Forward = EagerForward(decoder, memory.slots, memory.pages, knows_lengths=verifier is None)
    if numerics.packed and group.size == 1 and can_record(kernels):
        most_tokens = max(config.chunked_prefill_size, config.max_running_requests)
        forward = ProgramForward(decoder, memory.slots, memory.pages, most_tokens, forward)
    runner = ModelRunner(decoder, kernels, memory.kv_pool, memory.slots, forward, options.logprobs_mode, verifier)
    log_pool(memory, numerics.kv_dtype)
    return DelayedDevice(runner) if config.device == "delayed" else CpuDevice(runner), num_tokens


def _start_threads(config: EngineConfig, packed: bool, num_ranks: int) -> int:
    """Give torch, or the CPU kernels in its stead, their threads; returns how many. Raises StartupError.

    num_ranks: processes that share the cores.
    """
    count = num_threads(config, num_ranks)
    if not packed:
        torch.set_num_threads(count)
        return count
    from kernels.cpu import native

    # What is left to torch are small tensors: a second set of threads would only get in the way of the kernels'.
    torch.set_num_threads(1)
    try:
        native.set_threads(count)
    except OSError as error:
        raise StartupError(f"--cpu-threads {count}: {error.strerror}") from error
    return count
