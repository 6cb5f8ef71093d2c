"""Puts a scheduler together: sizes, device, slots, pool, planner, workload. Chooses implementations once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig, SchedulerOptions
from engine.errors import ConfigError, StartupError
from engine.model_files.progress import Progress
from engine.model_files.types import ModelFiles
from scheduler_proc.cache.events import EventBus, ZmqPublisher
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.cache.radix_tree import RadixTree
from scheduler_proc.numerics import Numerics, choose_numerics, refuse_without_a_model
from scheduler_proc.options import PlannerOptions
from scheduler_proc.plan import Device
from scheduler_proc.planner import Planner
from scheduler_proc.slots import Slots
from scheduler_proc.worker.null import NullDevice
from scheduler_proc.workload import GenerateWorkload

if TYPE_CHECKING:
    from kernels.dispatch import KernelSet
    from scheduler_proc.models.decoder import Decoder

log = logging.getLogger(__name__)

NULL_POOL_TOKENS = 1 << 20
KV_EVENTS_TOPIC = "kv-events"


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


def build(
    config: EngineConfig,
    model: ModelFiles,
    on_layer: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[GenerateWorkload, Device]:
    """Load the model, take the memory, return what the loop needs. `on_layer` is called amid long steps.

    clock: seconds, what pins end by.

    Raises EngineError when options, model files or memory do not allow it.
    """
    try:
        if config.device == "null":
            refuse_without_a_model(config)
            device: Device = NullDevice(model.config.vocab_size)
            num_tokens = config.scheduler.max_total_tokens or NULL_POOL_TOKENS
        else:
            device, num_tokens = _model_device(config, model, on_layer)
        return build_workload(config, model, num_tokens, device.pages_freed, clock), device
    except (MemoryError, OverflowError, RuntimeError, OSError) as error:
        raise StartupError(f"there is not enough memory for {model.name} and its KV: {error}") from error


def build_workload(
    config: EngineConfig,
    model: ModelFiles,
    num_tokens: int,
    pages_freed: Callable[[np.ndarray], None],
    clock: Callable[[], float] = time.monotonic,
) -> GenerateWorkload:
    """The host's part: slots, KV bookkeeping over `num_tokens` tokens, planner and workload."""
    options = config.scheduler
    num_pages = num_tokens // options.page_size
    if num_pages < 1:
        raise ConfigError(f"--max-total-tokens {num_tokens} is less than one page (--page-size {options.page_size}).")
    longest = min(context_length(config, model), num_pages * options.page_size)
    # A page id and its bookkeeping are 32-bit numbers.
    if num_pages >= 2**31:
        raise ConfigError(f"--max-total-tokens {num_tokens} is more than 2^31 pages of {options.page_size} tokens.")
    groups = (CacheGroup("full", "full"),)
    bus = EventBus()
    publisher = None
    if options.kv_events_endpoint is not None:
        publisher = ZmqPublisher(options.kv_events_endpoint, KV_EVENTS_TOPIC)
        bus.subscribe(publisher)
    cache = KvCache(
        groups,
        (num_pages,),
        options.page_size,
        options.max_running_requests,
        longest,
        None if options.disable_radix_cache else _tree_maker(options, groups, num_pages, clock, bus),
        pages_freed,
    )
    slots = Slots(options.max_running_requests, longest, len(model.config.eos_ids))
    planner = Planner(
        slots,
        cache,
        model.config.eos_ids,
        PlannerOptions(
            step_tokens=options.chunked_prefill_size,
            chunk_tokens=options.max_prefill_tokens,
            max_step_gap=options.max_step_gap,
            policy=options.schedule_policy,
            preemption_threshold=options.priority_preemption_threshold,
            conservativeness=options.schedule_conservativeness,
            seed=options.random_seed,
        ),
    )
    max_rows = planner.admission.max_rows
    if max_rows < options.max_running_requests:
        log.warning(
            "event=fewer_running_requests asked=%d most=%d reason=--chunked-prefill-size %d lets no more of them move "
            "within --max-step-gap %d",
            options.max_running_requests,
            max_rows,
            options.chunked_prefill_size,
            options.max_step_gap,
        )
    return GenerateWorkload(
        slots,
        cache,
        planner,
        vocab_size=model.config.vocab_size,
        context_length=context_length(config, model),
        max_queued=options.max_queued_requests,
        weights_version=model.name,
        end_turn=[] if publisher is None else [publisher.flush],
    )


def _tree_maker(
    options: SchedulerOptions,
    groups: tuple[CacheGroup, ...],
    num_pages: int,
    clock: Callable[[], float],
    bus: EventBus,
) -> Callable[[Callable[[int, np.ndarray, int], None]], RadixTree]:
    def make(on_evict: Callable[[int, np.ndarray, int], None]) -> RadixTree:
        return RadixTree(
            groups,
            options.page_size,
            policy=options.radix_eviction_policy,
            on_evict=on_evict,
            clock=clock,
            bus=bus,
            max_pinned_pages=[int(options.max_pinned_share * num_pages)] * len(groups),
        )

    return make


def _start_threads(config: EngineConfig, packed: bool) -> int:
    """Give torch, or the CPU kernels in its stead, their threads; returns how many. Raises StartupError."""
    import torch

    from scheduler_proc.cpus import usable_cores

    count = config.process.cpu_threads or min(usable_cores(), 1024)
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


def _load(config: EngineConfig, model: ModelFiles, numerics: Numerics) -> tuple[Decoder, KernelSet]:
    """The model with its weights, and its kernels. Raises ConfigError, ModelFileError, StartupError."""
    import torch

    from kernels.dispatch import knows_int8_pages, select
    from scheduler_proc.layers.linear import LinearMethod, Unquantised
    from scheduler_proc.layers.packed import Packed
    from scheduler_proc.models.decoder import Decoder
    from scheduler_proc.models.registry import spec_of
    from scheduler_proc.weights.load import load_weights

    threads = _start_threads(config, numerics.packed)
    place, dtype, begin = torch.device("cpu"), numerics.dtype, time.monotonic()
    spec, longest = spec_of(model.config), context_length(config, model)
    try:
        kernels = select(place.type, dtype, packed=numerics.packed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if numerics.kv_dtype == torch.int8 and not knows_int8_pages(kernels):
        raise ConfigError("ENGINE_KERNELS: --kv-cache-dtype int8 needs rope_store and paged_attention to be native.")
    method: LinearMethod = Packed(kernels) if numerics.packed else Unquantised(kernels)
    decoder = Decoder(spec, kernels, place, dtype, max_position=longest, method=method)
    counts = load_weights(decoder, model, _shown())
    log.info(
        "event=weights_loaded seconds=%.1f dtype=%s%s threads=%d",
        time.monotonic() - begin,
        dtype,
        _packing(counts) if numerics.packed else "",
        threads,
    )
    return decoder, kernels


def _packing(counts: Counter[str]) -> str:
    from kernels.cpu import native

    kinds = ",".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))
    return f" packing={kinds} isa={native.isa()}"


def _model_device(config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None]) -> tuple[Device, int]:
    from kernels.dispatch import can_record
    from scheduler_proc.cache.kv_pool import (
        KVPool,
        available_memory,
        bytes_per_token,
        default_tokens,
        fraction_tokens,
    )
    from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
    from scheduler_proc.worker.device_slots import DeviceSlots
    from scheduler_proc.worker.forward import EagerForward, Forward, ProgramForward
    from scheduler_proc.worker.model_runner import ModelRunner

    options = config.scheduler
    available = available_memory()
    numerics = choose_numerics(config, model)
    decoder, kernels = _load(config, model, numerics)
    decoder.on_layer = on_layer
    shape, kv_dtype, place = decoder.kv_shape, numerics.kv_dtype, decoder.device
    per_token = bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_dtype)
    num_tokens = options.max_total_tokens
    if num_tokens is None and options.mem_fraction_static is not None:
        weights = sum(tensor.nbytes for tensor in decoder.parameters().values())
        num_tokens = fraction_tokens(options.mem_fraction_static, available, weights, per_token, options.page_size)
    elif num_tokens is None:
        num_tokens = default_tokens(per_token, options.page_size)
    num_pages = num_tokens // options.page_size
    kv_pool = KVPool(
        shape.num_layers, num_pages, options.page_size, shape.num_kv_heads, shape.head_dim, kv_dtype, place
    )
    longest = min(context_length(config, model), num_pages * options.page_size)
    max_pages = -(-longest // options.page_size)
    slots = DeviceSlots(options.max_running_requests, max_pages, place)
    forward: Forward
    if numerics.packed and can_record(kernels):
        most_tokens = max(options.chunked_prefill_size, options.max_running_requests)
        forward = ProgramForward(decoder, kv_pool.layers, slots, options.page_size, most_tokens)
    else:
        forward = EagerForward(decoder, kv_pool.layers, slots, options.page_size)
    runner = ModelRunner(decoder, kernels, kv_pool, slots, forward, options.logprobs_mode)
    device: Device = DelayedDevice(runner) if config.device == "delayed" else CpuDevice(runner)
    log.info(
        "event=kv_pool tokens=%d pages=%d page_size=%d dtype=%s", num_tokens, num_pages, options.page_size, kv_dtype
    )
    return device, num_tokens


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
