"""Before the first request: kernels are compiled and chosen, and graphs captured, so that none waits for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from engine.config import EngineConfig
from engine.model_files.progress import Progress
from scheduler_proc.common_prefix import most_common_rows
from scheduler_proc.model_parts import Memory
from scheduler_proc.speculative.budget import draft_sizes
from scheduler_proc.speculative.verifier import Verifier
from scheduler_proc.worker.capture import Capture
from scheduler_proc.worker.forward import Forward
from scheduler_proc.worker.graph_forward import GraphForward, graph_sizes
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.prompt_graphs import PromptGraphs
from scheduler_proc.worker.rehearsal import CONTEXT, Rehearsal
from scheduler_proc.worker.verify_graphs import VerifyGraphs

log = logging.getLogger(__name__)

FEW_ROWS = 8
"""Decoding rows beside a rehearsed prompt."""
FEW_TOKENS = 5
"""Of a row that is neither decoding nor a prompt for the attention kernel."""


class WarmUp:
    """Of one runner over memory that holds nothing yet; leaves it as it was."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        memory: Memory,
        end_choosing: Callable[[], None],
        on_layer: Callable[[], None],
        is_shown: bool,
    ) -> None:
        """end_choosing: called when what kernels are chosen by has run; on_layer: a sign of life; is_shown: with bars
        on stderr.
        """
        self._config = config
        self._runner = runner
        self._memory = memory
        self._end_choosing = end_choosing
        self._on_layer = on_layer
        self._is_shown = is_shown
        self._rehearsal = Rehearsal(runner, memory.num_pages, config.page_size, memory.max_len)

    def run(self, capture: Capture | None) -> None:
        """capture: how graphs are captured; None: there are none."""
        if capture is not None:
            self._capture(capture)
        self._rehearse(0 if capture is None else self._config.cuda_graph_max_bs)
        self._rehearsal.clear()

    def _capture(self, capture: Capture) -> None:
        config, runner, memory = self._config, self._runner, self._memory
        decoder, slots, pages = runner.decoder, memory.slots, memory.pages
        prompts = PromptGraphs(decoder, slots, pages, config.chunked_prefill_size, memory.max_len, runner.forward)
        with self._shown("prompt graphs", prompts.most_graphs) as progress:
            prompts.capture(capture, self._rehearsal.seat, progress)
        forward = GraphForward(
            decoder,
            slots,
            pages,
            config.cuda_graph_max_bs,
            prompts,
            minds_common=most_common_rows(config) > 0,
            took=None if runner.verifier is None else runner.verifier.drafter.took,
        )
        with self._shown("decode graphs", len(forward.sizes) + len(forward.common_sizes)) as progress:
            forward.capture(capture, self._rehearsal.seat, progress)
        if runner.verifier is not None:
            self._capture_verifying(capture, runner.verifier, prompts)
        runner.forward = forward
        log.info("event=captured decode_graphs=%d prompt_graphs=%d", forward.num_graphs, prompts.num_graphs)

    def _capture_verifying(self, capture: Capture, verifier: Verifier, forward: Forward) -> None:
        config, runner, memory = self._config, self._runner, self._memory
        sizes = draft_sizes(config.max_drafts)
        graphs = VerifyGraphs(
            runner.decoder, memory.slots, verifier, forward, config.cuda_graph_max_bs, sizes, memory.max_len
        )

        def prepare(num_rows: int) -> None:
            self._rehearsal.seat(num_rows)
            verifier.seat(num_rows, memory.max_len)

        with self._shown("graphs of drafts", graphs.num_steps) as progress:
            graphs.capture(capture, prepare, progress)
        verifier.clear()
        runner.verify_graphs = graphs

    def _rehearse(self, max_graph_rows: int) -> None:
        """Every kind of step once: most of what is replayed has run already, but not what is launched."""
        config, rehearsal = self._config, self._rehearsal
        most_rows = min(config.max_running_requests, config.chunked_prefill_size)
        chunks = rehearsal.chunks(config.chunked_prefill_size)
        beside = [1] * min(FEW_ROWS, most_rows - 1)
        many = [1] * (most_rows // 2)
        steps: list[Callable[[], None]] = [
            *(partial(rehearsal.decode, rows) for rows in graph_sizes(most_rows) if rows > max_graph_rows),
            *(partial(rehearsal.prompts, [chunk]) for chunk in chunks),
            # From here on kernels are compiled only: what they are chosen by is above.
            self._end_choosing,
            *(partial(rehearsal.prompts, [*beside, chunk], CONTEXT, len(beside)) for chunk in chunks),
            # Where rows are many, contexts are not divided among programs.
            *(partial(rehearsal.prompts, [chunk] * self._rows_of(chunk)) for chunk in chunks),
            *(
                partial(rehearsal.prompts, [*rows, chunks[-1] - sum(rows)], CONTEXT, rows.count(1))
                for rows in (many, [*beside, *[FEW_TOKENS] * len(beside)], [FEW_TOKENS] * (len(many) // 2))
                if sum(rows) < chunks[-1] and len(rows) < most_rows
            ),
            *(partial(rehearsal.extras, rows) for rows in sorted({1, min(FEW_ROWS, most_rows)})),
        ]
        with self._shown("kernels", len(steps)) as progress:
            for done, step in enumerate(steps):
                progress(done)
                step()

    def _rows_of(self, length: int) -> int:
        """How many rows of so many tokens a step may have."""
        return max(min(self._config.chunked_prefill_size // length, self._config.max_running_requests), 1)

    @contextmanager
    def _shown(self, what: str, total: int) -> Generator[Callable[[int], None]]:
        """A callback that takes how much is done."""
        bar = Progress(what, total, is_bytes=False) if self._is_shown else None

        def progress(done: int) -> None:
            self._on_layer()
            if bar is not None:
                bar.set(done)

        yield progress
        if bar is not None:
            bar.close()
