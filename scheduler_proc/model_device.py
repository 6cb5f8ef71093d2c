"""The device that runs a model: weights, kernels, memory for KV, and how its steps run; chosen once, at the start."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.model_files.default_model import cache_dir
from engine.model_files.progress import Progress
from engine.model_files.types import ModelFiles
from engine.sampling import MAX_STOP_IDS
from kernels.dispatch import KernelSet, can_record, knows_int8_pages, select
from scheduler_proc.cache.kv_pool import KVPool, available_memory, bytes_per_token, default_tokens, fraction_tokens
from scheduler_proc.cpus import usable_cores
from scheduler_proc.layers.linear import LinearMethod, Unquantised
from scheduler_proc.layers.packed import Packed
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.numerics import Numerics, choose_numerics
from scheduler_proc.parallel.group import Alone, Group
from scheduler_proc.plan import Device
from scheduler_proc.settle import context_length
from scheduler_proc.weights.load import load_weights
from scheduler_proc.worker.capture import CudaCapture
from scheduler_proc.worker.cpu import CpuDevice, DelayedDevice
from scheduler_proc.worker.cuda import CudaDevice
from scheduler_proc.worker.device_memory import FRAGMENTATION, GRAPH_BYTES, DeviceMemory, free_bytes, peak_bytes
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import EagerForward, Forward
from scheduler_proc.worker.graph_forward import Drawing, GraphForward, graph_sizes
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.program_forward import ProgramForward
from scheduler_proc.worker.rehearsal import Rehearsal
from scheduler_proc.worker.transfer import Transfer

if TYPE_CHECKING:
    from kernels.cuda.tuning import Tuner

log = logging.getLogger(__name__)

FIXED_KERNELS = "linear=fixed,gated_linear=fixed,paged_attention=fixed"
"""What --deterministic means on CUDA: sums in one order, whatever else is in a step."""


def model_device(
    config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group | None = None
) -> tuple[Device, int]:
    """The device, ready to run, and how many tokens its KV pool holds. `on_layer` is called amid long steps.

    group: who shares the model. Raises EngineError for what options, files or memory do not allow, RuntimeError or
    MemoryError where memory runs out.
    """
    group = group or Alone()
    if config.device == "cuda":
        return _CudaBuild(config, model, on_layer, group).device()
    return _cpu_device(config, model, on_layer, group)


@dataclass(frozen=True)
class _Sizes:
    """Of the KV pool and of the slots."""

    num_pages: int
    page_size: int
    max_pages: int
    """Of one request."""

    @property
    def scratch_page(self) -> int:
        return self.num_pages


def _sizes(config: EngineConfig, model: ModelFiles, num_tokens: int) -> _Sizes:
    page_size = config.page_size
    num_pages = num_tokens // page_size
    longest = min(context_length(config, model), num_pages * page_size)
    return _Sizes(num_pages, page_size, -(-longest // page_size))


def _kv_pool(decoder: Decoder, num_pages: int, page_size: int, dtype: torch.dtype) -> KVPool:
    """With a page that belongs to nobody, behind the others."""
    shape = decoder.kv_shape
    return KVPool(shape.num_layers, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim, dtype, decoder.device)


def _slots(config: EngineConfig, model: ModelFiles, sizes: _Sizes, place: torch.device) -> DeviceSlots:
    num_stop_ids = MAX_STOP_IDS + len(model.config.eos_ids)
    return DeviceSlots(config.max_running_requests, sizes.max_pages, Transfer(place), num_stop_ids)


def _log_pool(num_tokens: int, sizes: _Sizes, dtype: torch.dtype) -> None:
    log.info(
        "event=kv_pool tokens=%d pages=%d page_size=%d dtype=%s", num_tokens, sizes.num_pages, sizes.page_size, dtype
    )


# -- on the CPU -------------------------------------------------------------------------------------------------------


def _cpu_device(
    config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group
) -> tuple[Device, int]:
    options, page_size = config.scheduler, config.page_size
    available = available_memory()
    numerics = choose_numerics(config, model)
    threads = _start_threads(config, numerics.packed)
    try:
        kernels = select("cpu", numerics.dtype, packed=numerics.packed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if numerics.kv_dtype == torch.int8 and not knows_int8_pages(kernels):
        raise ConfigError("ENGINE_KERNELS: --kv-cache-dtype int8 needs rope_store and paged_attention to be native.")
    decoder = _load(config, model, numerics, kernels, torch.device("cpu"), group, f" threads={threads}")
    decoder.on_layer = on_layer
    shape, kv_dtype = decoder.kv_shape, numerics.kv_dtype
    per_token = bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_dtype)
    num_tokens = options.max_total_tokens
    if num_tokens is None and options.mem_fraction_static is not None:
        weights = sum(tensor.nbytes for tensor in decoder.parameters().values())
        num_tokens = fraction_tokens(options.mem_fraction_static, available, weights, per_token, page_size)
    elif num_tokens is None:
        num_tokens = default_tokens(per_token, page_size)
    num_tokens = group.least(num_tokens)
    sizes = _sizes(config, model, num_tokens)
    kv_pool = _kv_pool(decoder, sizes.num_pages, page_size, kv_dtype)
    slots = _slots(config, model, sizes, decoder.device)
    forward: Forward = EagerForward(decoder, kv_pool.layers, slots, page_size, sizes.scratch_page)
    if numerics.packed and group.size == 1 and can_record(kernels):
        most_tokens = max(config.chunked_prefill_size, config.max_running_requests)
        forward = ProgramForward(decoder, kv_pool.layers, slots, page_size, most_tokens, forward)
    runner = ModelRunner(decoder, kernels, kv_pool, slots, forward, options.logprobs_mode)
    _log_pool(num_tokens, sizes, kv_dtype)
    return DelayedDevice(runner) if config.device == "delayed" else CpuDevice(runner), num_tokens


def _start_threads(config: EngineConfig, packed: bool) -> int:
    """Give torch, or the CPU kernels in its stead, their threads; returns how many. Raises StartupError."""
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


# -- on CUDA ----------------------------------------------------------------------------------------------------------


class _CudaBuild:
    """Takes the memory of a device in order: weights, what a step and the graphs need, and KV with the rest."""

    def __init__(self, config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group) -> None:
        self._config = config
        self._model = model
        self._on_layer = on_layer
        self._group = group
        # A graph cannot be captured on the default stream, and what shares counters must share a stream.
        torch.cuda.set_stream(torch.cuda.Stream())
        self._place = torch.device("cuda", torch.cuda.current_device())

    def device(self) -> tuple[Device, int]:
        config = self._config
        available = free_bytes()
        numerics = choose_numerics(config, self._model)
        kernels, self._tuner = _cuda_kernels(config, numerics.dtype, self._place)
        decoder = _load(config, self._model, numerics, kernels, self._place, self._group)
        decoder.on_layer = self._on_layer
        memory = self._measured(available, decoder, numerics.kv_dtype)
        memory.log()
        shape = decoder.kv_shape
        per_token = bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, numerics.kv_dtype)
        options = config.scheduler
        num_tokens = self._group.least(
            memory.kv_tokens(options.mem_fraction_static, options.max_total_tokens, per_token, config.page_size)
        )
        runner, sizes = self._runner(decoder, num_tokens, numerics.kv_dtype)
        _log_pool(num_tokens, sizes, numerics.kv_dtype)
        self._warm_up(runner, sizes)
        return CudaDevice(runner), num_tokens

    def _runner(self, decoder: Decoder, num_tokens: int, kv_dtype: torch.dtype) -> tuple[ModelRunner, _Sizes]:
        config = self._config
        sizes = _sizes(config, self._model, num_tokens)
        kv_pool = _kv_pool(decoder, sizes.num_pages, sizes.page_size, kv_dtype)
        slots = _slots(config, self._model, sizes, self._place)
        forward = EagerForward(decoder, kv_pool.layers, slots, sizes.page_size, sizes.scratch_page)
        mode = config.scheduler.logprobs_mode
        return ModelRunner(decoder, decoder.kernels, kv_pool, slots, forward, mode), sizes

    def _measured(self, available: int, decoder: Decoder, kv_dtype: torch.dtype) -> DeviceMemory:
        step = self._step_bytes(decoder, kv_dtype)
        weights = sum(tensor.nbytes for tensor in decoder.parameters().values())
        kernels = max(available - free_bytes() - weights, 0)
        graphs, max_rows = 0, self._config.cuda_graph_max_bs
        if max_rows:
            # A step of decode rows needs no more than one with prompts.
            graphs = step + len(graph_sizes(max_rows)) * (1 + len(Drawing)) * GRAPH_BYTES
        return DeviceMemory(available, weights, kernels, step, graphs)

    def _step_bytes(self, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        """By a step as large as any, over a small pool."""
        config = self._config
        rows = config.max_running_requests
        chunk = max(1, config.chunked_prefill_size // rows)
        num_pages = rows * -(-chunk // config.page_size)
        runner, sizes = self._runner(decoder, num_pages * config.page_size, kv_dtype)
        rehearsal = Rehearsal(runner, sizes.num_pages, sizes.page_size)
        q_lens = [min(chunk, sizes.max_pages * sizes.page_size - 1)] * rows
        # Kernels are not chosen by this step, which is like none in earnest.
        self._tuner.freeze()
        rehearsal.run(q_lens)
        size = peak_bytes(lambda: rehearsal.run(q_lens))
        self._tuner.thaw()
        return int(size * FRAGMENTATION)

    def _warm_up(self, runner: ModelRunner, sizes: _Sizes) -> None:
        """Compile and choose kernels, and capture the graphs, so that no request waits for that."""
        config, begin = self._config, time.monotonic()
        rehearsal = Rehearsal(runner, sizes.num_pages, sizes.page_size)
        chunks = rehearsal.chunks(config.chunked_prefill_size)
        bar = Progress("kernels", len(chunks), is_bytes=False)
        for done, chunk in enumerate(chunks):
            bar.set(done)
            rehearsal.run([chunk])
            self._on_layer()
        bar.set(len(chunks))
        bar.close()
        max_rows = config.cuda_graph_max_bs
        if max_rows:
            self._capture(runner, rehearsal, sizes, max_rows)
        rehearsal.clear()
        self._tuner.freeze()
        log.info("event=warmed_up seconds=%.1f graphs=%d", time.monotonic() - begin, len(graph_sizes(max_rows)))

    def _capture(self, runner: ModelRunner, rehearsal: Rehearsal, sizes: _Sizes, max_rows: int) -> None:
        before = torch.cuda.mem_get_info()[0]
        forward = GraphForward(
            runner.decoder,
            runner.kv_pool.layers,
            runner.slots,
            sizes.page_size,
            sizes.scratch_page,
            max_rows,
            runner.forward,
        )
        bar = Progress("graphs", len(forward.sizes), is_bytes=False)

        def progress(done: int) -> None:
            bar.set(done)
            self._on_layer()

        forward.capture(CudaCapture(), rehearsal.seat, progress)
        bar.set(len(forward.sizes))
        bar.close()
        runner.forward = forward
        log.info("event=graphs_captured memory_mib=%d", (before - torch.cuda.mem_get_info()[0]) >> 20)


def _cuda_kernels(config: EngineConfig, dtype: torch.dtype, place: torch.device) -> tuple[KernelSet, Tuner]:
    """The kernels, and what chooses among their variants; the choices are kept in the user's cache directory."""
    from kernels.cuda.context import make_context
    from kernels.cuda.tuning import Tuner

    tuner = Tuner(place, cache_dir() / "kernel-choices")
    overrides = os.environ.get("ENGINE_KERNELS", "")
    if config.scheduler.deterministic:
        # What the user says comes last, and counts.
        overrides = f"{FIXED_KERNELS},{overrides}"
    try:
        return select("cuda", dtype, overrides, context=make_context(place, tuner)), tuner
    except ValueError as error:
        raise ConfigError(str(error)) from error


# -- on both ----------------------------------------------------------------------------------------------------------


def _load(
    config: EngineConfig,
    model: ModelFiles,
    numerics: Numerics,
    kernels: KernelSet,
    place: torch.device,
    group: Group,
    told: str = "",
) -> Decoder:
    """The model with its weights. Raises ConfigError, ModelFileError."""
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
    counts = load_weights(decoder, model, _shown())
    log.info(
        "event=weights_loaded seconds=%.1f dtype=%s%s%s",
        time.monotonic() - begin,
        numerics.dtype,
        _packing(counts) if numerics.packed else "",
        told,
    )
    return decoder


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
