"""Puts a scheduler together: sizes, device, slots, pool, planner, workload. Chooses implementations once."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, StartupError
from engine.model_files.types import ModelFiles
from scheduler_proc.cache.events import EventBus, ZmqPublisher
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.cache.radix_tree import RadixTree
from scheduler_proc.common_prefix import LEAST_SAVED, most_common_rows
from scheduler_proc.numerics import refuse_without_a_model
from scheduler_proc.options import PlannerOptions
from scheduler_proc.plan import Device
from scheduler_proc.planner import Planner
from scheduler_proc.settle import context_length, mixed_chunk_size
from scheduler_proc.slots import Slots
from scheduler_proc.speculative.budget import MOST_CUDA_ROWS, DraftBudget
from scheduler_proc.worker.null import NullDevice
from scheduler_proc.workload import GenerateWorkload

if TYPE_CHECKING:
    from scheduler_proc.parallel.group import Group

log = logging.getLogger(__name__)

NULL_POOL_TOKENS = 1 << 20
KV_EVENTS_TOPIC = "kv-events"


def build(
    config: EngineConfig,
    model: ModelFiles,
    on_layer: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    group: Group | None = None,
) -> tuple[GenerateWorkload, Device]:
    """Load the model, take the memory, return what the loop needs. `on_layer` is called amid long steps.

    clock: seconds, what pins end by; group: who shares the model, this process being rank 0.

    Raises EngineError when options, model files or memory do not allow it.
    """
    device, num_tokens = build_device(config, model, on_layer, group)
    with _memory_for(model):
        return build_workload(config, model, num_tokens, device.pages_freed, clock), device


def build_device(
    config: EngineConfig, model: ModelFiles, on_layer: Callable[[], None], group: Group | None = None
) -> tuple[Device, int]:
    """The device, and how many tokens of KV it has room for. Raises EngineError, as `build` does."""
    with _memory_for(model):
        if config.device == "null":
            refuse_without_a_model(config)
            return NullDevice(model.config.vocab_size), config.scheduler.max_total_tokens or NULL_POOL_TOKENS
        # What follows needs torch, which null does without.
        from scheduler_proc.model_device import model_device

        return model_device(config, model, on_layer, group)


@contextmanager
def _memory_for(model: ModelFiles) -> Generator[None]:
    """What runs out of memory, or cannot be done on this machine, raises StartupError."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if _is_lack_of_memory(error):
            raise StartupError(f"there is not enough memory for {model.name} and its KV: {error}") from error
        log.exception("event=build_failed", exc_info=error)
        kind = type(error).__name__
        raise StartupError(f"{model.name} cannot be run here: {kind}: {error}") from error


def _is_lack_of_memory(error: Exception) -> bool:
    """torch has no class of its own for the host's memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    names = {kind.__name__ for kind in type(error).__mro__}
    is_torch = isinstance(error, RuntimeError) and "not enough memory" in str(error)
    return isinstance(error, MemoryError | OverflowError) or "OutOfMemoryError" in names or is_torch


def build_workload(
    config: EngineConfig,
    model: ModelFiles,
    num_tokens: int,
    pages_freed: Callable[[np.ndarray], None],
    clock: Callable[[], float] = time.monotonic,
) -> GenerateWorkload:
    """The host's part: slots, KV bookkeeping over `num_tokens` tokens, planner and workload."""
    options = config.scheduler
    num_pages = num_tokens // config.page_size
    if num_pages < 1:
        raise ConfigError(f"--max-total-tokens {num_tokens} is less than one page (--page-size {config.page_size}).")
    longest = min(context_length(config, model), num_pages * config.page_size)
    # A page id and its bookkeeping are 32-bit numbers.
    if num_pages >= 2**31:
        raise ConfigError(f"--max-total-tokens {num_tokens} is more than 2^31 pages of {config.page_size} tokens.")
    groups = (CacheGroup("full", "full"),)
    bus = EventBus()
    publisher = None
    if options.kv_events_endpoint is not None:
        publisher = ZmqPublisher(options.kv_events_endpoint, KV_EVENTS_TOPIC)
        bus.subscribe(publisher)
    cache = KvCache(
        groups,
        (num_pages,),
        config.page_size,
        config.max_running_requests,
        longest,
        None if options.disable_radix_cache else _tree_maker(config, groups, num_pages, clock, bus),
        pages_freed,
    )
    slots = Slots(config.max_running_requests, longest, len(model.config.eos_ids), config.max_drafts)
    planner = Planner(
        slots,
        cache,
        model.config.eos_ids,
        PlannerOptions(
            step_tokens=config.chunked_prefill_size,
            mixed_tokens=mixed_chunk_size(config, model),
            chunk_tokens=options.max_prefill_tokens,
            max_step_gap=options.max_step_gap,
            policy=options.schedule_policy,
            preemption_threshold=options.priority_preemption_threshold,
            conservativeness=options.schedule_conservativeness,
            seed=options.random_seed,
            most_common_rows=most_common_rows(config),
            least_common=LEAST_SAVED,
            draft_places=config.draft_places,
            most_drafting_rows=MOST_CUDA_ROWS if config.device == "cuda" else 1 << 30,
        ),
        DraftBudget(config.max_drafts, clock, is_fixed=not config.speculative.speculative_adaptive)
        if config.max_drafts
        else None,
    )
    max_rows = planner.admission.max_rows
    if max_rows < config.max_running_requests:
        log.warning(
            "event=fewer_running_requests asked=%d most=%d reason=--chunked-prefill-size %d lets no more of them move "
            "within --max-step-gap %d",
            config.max_running_requests,
            max_rows,
            config.chunked_prefill_size,
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
        settled={
            "device": config.device,
            "max_running_requests": min(max_rows, config.max_running_requests),
            "max_total_tokens": num_pages * config.page_size,
            "chunked_prefill_size": config.chunked_prefill_size,
            "mixed_chunk_size": planner.options.most_tokens(1),
            "page_size": config.page_size,
            "overlap_depth": config.overlap_depth,
            "cuda_graph_max_bs": config.cuda_graph_max_bs,
        },
    )


def _tree_maker(
    config: EngineConfig,
    groups: tuple[CacheGroup, ...],
    num_pages: int,
    clock: Callable[[], float],
    bus: EventBus,
) -> Callable[[Callable[[int, np.ndarray, int], None]], RadixTree]:
    options = config.scheduler

    def make(on_evict: Callable[[int, np.ndarray, int], None]) -> RadixTree:
        return RadixTree(
            groups,
            config.page_size,
            policy=options.radix_eviction_policy,
            on_evict=on_evict,
            clock=clock,
            bus=bus,
            max_pinned_pages=[int(options.max_pinned_share * num_pages)] * len(groups),
        )

    return make
