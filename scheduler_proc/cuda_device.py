"""Puts the device `cuda` together: weights and kernels, memory in order, kernels warmed up, graphs captured."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_files.default_model import cache_dir
from engine.model_files.types import ModelFiles
from kernels.cuda.context import make_context
from kernels.cuda.pdl import can, dependent_launch
from kernels.cuda.tuning import Tuner
from kernels.dispatch import KernelSet, select
from scheduler_proc.model_parts import (
    Memory,
    kv_bytes_per_token,
    load_decoder,
    log_pool,
    make_memory,
    num_threads,
    weight_bytes,
)
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.numerics import choose_numerics
from scheduler_proc.parallel.group import Group
from scheduler_proc.plan import Device
from scheduler_proc.settle import context_length
from scheduler_proc.speculative.budget import MOST_CUDA_ROWS, draft_sizes
from scheduler_proc.speculative.make import Drafting
from scheduler_proc.worker.capture import CudaCapture
from scheduler_proc.worker.cuda import CudaDevice
from scheduler_proc.worker.device_memory import FRAGMENTATION, GRAPH_BYTES, DeviceMemory, free_bytes, peak_bytes
from scheduler_proc.worker.forward import EagerForward
from scheduler_proc.worker.graph_forward import Drawing, common_sizes, graph_sizes
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.prompt_graphs import token_sizes
from scheduler_proc.worker.rehearsal import Rehearsal
from scheduler_proc.worker.scores import DEVICE_PIECE_ROWS
from scheduler_proc.worker.warm_up import WarmUp

log = logging.getLogger(__name__)

FIXED_KERNELS = "linear=fixed,gated_linear=fixed,paged_attention=fixed"
"""What --deterministic means on CUDA: sums in one order, whatever else is in a step."""


class CudaBuild:
    """Takes the memory of the current device: weights, what a step and the graphs need, and KV with the rest."""

    def __init__(self, config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group) -> None:
        self._config = config
        self._model = model
        self._on_layer = on_layer
        self._group = group
        # A graph cannot be captured on the default stream, and what shares counters must share a stream.
        torch.cuda.set_stream(torch.cuda.Stream())
        self._place = torch.device("cuda", torch.cuda.current_device())
        # What is left to the host: weights that are unpacked or cut up.
        torch.set_num_threads(num_threads(config, group.size))
        self._tuner = Tuner(self._place, cache_dir() / "kernel-choices")

    def device(self) -> tuple[Device, int]:
        """The device, ready to run, and the tokens of its KV pool. Raises as `model_device` does."""
        config, options = self._config, self._config.scheduler
        available = free_bytes()
        numerics = choose_numerics(config, self._model)
        kernels = self._kernels(numerics.dtype)
        decoder = load_decoder(config, self._model, numerics, kernels, self._place, self._group)
        decoder.on_layer = self._on_layer
        decoder.widens_logits = options.deterministic
        drafting = Drafting(config, self._model, decoder, numerics.kv_dtype)
        sizes = self._measured(available, decoder, drafting, numerics.kv_dtype)
        sizes.log()
        per_token = kv_bytes_per_token(decoder, numerics.kv_dtype) + drafting.bytes_per_token
        num_tokens = self._group.least(
            sizes.kv_tokens(options.mem_fraction_static, options.max_total_tokens, per_token, config.page_size)
        )
        memory = make_memory(config, self._model, decoder, num_tokens, numerics.kv_dtype)
        log_pool(memory, numerics.kv_dtype)
        runner = self._runner(decoder, memory, drafting)
        self._warm_up(runner, memory)
        return CudaDevice(runner), num_tokens

    def _warm_up(self, runner: ModelRunner, memory: Memory) -> None:
        begin, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        capture = None
        if self._config.cuda_graph_max_bs:
            # Between a communicator's kernels it was never tried.
            may_depend = self._group.size == 1 and can(self._place)
            capture = CudaCapture((nullcontext, dependent_launch) if may_depend else (nullcontext,))
        WarmUp(self._config, runner, memory, self._tuner.freeze, self._on_layer, self._group.rank == 0).run(capture)
        log.info(
            "event=warmed_up seconds=%.1f memory_mib=%d",
            time.monotonic() - begin,
            (free - torch.cuda.mem_get_info()[0]) >> 20,
        )

    def _kernels(self, dtype: torch.dtype) -> KernelSet:
        overrides = os.environ.get("ENGINE_KERNELS", "")
        if self._config.scheduler.deterministic:
            if overrides:
                log.warning("event=kernels_overridden ENGINE_KERNELS=%s effect=--deterministic may not hold", overrides)
            # What the user says comes last, and counts.
            overrides = f"{FIXED_KERNELS},{overrides}"
        try:
            return select("cuda", dtype, overrides, context=make_context(self._place, self._tuner))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _runner(self, decoder: Decoder, memory: Memory, drafting: Drafting) -> ModelRunner:
        """One that launches kernel by kernel."""
        verifier = drafting.verifier(memory)
        forward = EagerForward(decoder, memory.slots, memory.pages, knows_lengths=verifier is None)
        mode = self._config.scheduler.logprobs_mode
        return ModelRunner(decoder, decoder.kernels, memory.kv_pool, memory.slots, forward, mode, verifier)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _measured(self, available: int, decoder: Decoder, drafting: Drafting, kv_dtype: torch.dtype) -> DeviceMemory:
        step = self._step_bytes(decoder, drafting, kv_dtype)
        weights = weight_bytes(decoder)
        kernels = max(available - free_bytes() - weights, 0)
        graphs, max_rows = 0, self._config.cuda_graph_max_bs
        if max_rows:
            sizes = [*graph_sizes(max_rows), *common_sizes(max_rows)]
            num_graphs = len(sizes) * (1 + len(Drawing))
            num_graphs += 2 * len(token_sizes(self._config.chunked_prefill_size))
            verified = graph_sizes(min(max_rows, MOST_CUDA_ROWS))
            num_graphs += len(verified) * len(draft_sizes(self._config.max_drafts)) * len(Drawing)
            # They share the memory of the largest, which needs no more than a step that is launched.
            graphs = step + num_graphs * GRAPH_BYTES
        return DeviceMemory(available, weights, kernels, step, graphs)

    def _step_bytes(self, decoder: Decoder, drafting: Drafting, kv_dtype: torch.dtype) -> int:
        """By a step as large as any, over a small pool."""
        config = self._config
        step_tokens = config.chunked_prefill_size
        rows = min(config.max_running_requests, step_tokens)
        each, rest = divmod(step_tokens, rows)
        # One token more than a row adds: a request is never longer than the pool.
        num_tokens = rows * (-(-(each + 2) // config.page_size)) * config.page_size
        memory = make_memory(config, self._model, decoder, num_tokens, kv_dtype)
        rehearsal = Rehearsal(
            self._runner(decoder, memory, drafting), memory.num_pages, config.page_size, memory.max_len
        )
        q_lens = [min(each + (row < rest), memory.max_len) for row in range(rows)]
        # Kernels are not chosen by this step, which is like none in earnest.
        self._tuner.freeze()
        rehearsal.prompts(q_lens)
        size = peak_bytes(lambda: rehearsal.prompts(q_lens))
        self._tuner.thaw()
        return int(size * FRAGMENTATION) + self._rare_bytes(decoder, rows)

    def _rare_bytes(self, decoder: Decoder, rows: int) -> int:
        """What few steps need, and tables that grow with the pool: none of it is there when a step is measured."""
        config, vocab = self._config, decoder.spec.vocab_size
        float32 = torch.float32.itemsize
        # A batch's logits widened, a piece of a prompt's, and the counts of all rows while their table grows.
        nodes = min(rows, MOST_CUDA_ROWS) * (config.max_drafts + 1) if config.max_drafts else 0
        widened = max(rows, nodes, DEVICE_PIECE_ROWS) * vocab * (float32 + decoder.dtype.itemsize)
        # What has been said, at each node; texts of slots.
        widened += nodes * vocab * (torch.int32.itemsize + torch.bool.itemsize)
        if config.max_drafts:
            widened += (config.max_running_requests + 1) * context_length(config, self._model) * torch.int32.itemsize
        counts = config.max_running_requests * vocab * (torch.int32.itemsize + torch.bool.itemsize) * 3 // 2
        max_pages = -(-context_length(config, self._model) // config.page_size)
        # Of the slots, of a step, and of both kinds of graphs.
        tables = 4 * (config.max_running_requests + 1) * max_pages * torch.int32.itemsize
        return widened + counts + tables
