"""What a CUDA device's memory is for: weights, kernels' buffers, a step, graphs, and KV with what is left."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import ConfigError

log = logging.getLogger(__name__)

MIB = 1 << 20
RESERVED_SHARE = 0.02
RESERVED_BYTES = 512 * MIB
"""Left alone unless --mem-fraction-static says otherwise: for what others take, and for gaps between tensors."""
FRAGMENTATION = 1.1
"""How much more than the tensors of a step the allocator holds for it."""
GRAPH_BYTES = 4 * MIB
"""What the driver keeps of a graph, at most."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes, measured before there is a KV pool."""

    available: int
    """Free at the start."""
    weights: int
    kernels: int
    """What kernels keep: workspaces, and the code that was loaded."""
    step: int
    """The largest step's tensors."""
    graphs: int

    @property
    def needed(self) -> int:
        """All but KV."""
        return self.weights + self.kernels + self.step + self.graphs

    def kv_tokens(
        self, fraction: float | None, max_total_tokens: int | None, bytes_per_token: int, page_size: int
    ) -> int:
        """Tokens of the KV pool, a whole number of pages; raises ConfigError, with the figures, where they do not fit.

        fraction: --mem-fraction-static; max_total_tokens: what was asked for, if it was.
        """
        page_bytes = bytes_per_token * page_size
        if max_total_tokens is not None and max_total_tokens < page_size:
            raise ConfigError(f"--max-total-tokens {max_total_tokens} is less than one page (--page-size {page_size}).")
        # One page more than there are: what nobody reads is written somewhere.
        left = self.available - self.needed - page_bytes
        if max_total_tokens is not None:
            wanted, asked = max_total_tokens // page_size * page_bytes, f"--max-total-tokens {max_total_tokens}"
            advice = "lower it, or --chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs"
        elif fraction is not None:
            wanted, asked = int(fraction * self.available) - self.weights, f"--mem-fraction-static {fraction:g}"
            advice = "raise it" if wanted < page_bytes else "lower it"
        else:
            wanted = left - max(RESERVED_BYTES, int(RESERVED_SHARE * self.available))
            asked, advice = "the model", "lower --chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs"
        if wanted < page_bytes or wanted > left:
            raise ConfigError(f"{asked} does not fit: {self._figures(wanted)}; {advice}.")
        return wanted // page_bytes * page_size

    def _figures(self, kv_bytes: int) -> str:
        return (
            f"of {_mib(self.available)} available, weights take {_mib(self.weights)}, kernels {_mib(self.kernels)}, "
            f"a step {_mib(self.step)}, graphs {_mib(self.graphs)}, which leaves {_mib(self.available - self.needed)} "
            f"for {_mib(max(kv_bytes, 0))} of KV"
        )

    def log(self) -> None:
        """One line with all of it."""
        log.info(
            "event=device_memory available_mib=%d weights_mib=%d kernels_mib=%d step_mib=%d graphs_mib=%d",
            *(size // MIB for size in (self.available, self.weights, self.kernels, self.step, self.graphs)),
        )


def free_bytes() -> int:
    """Of the current device, without what torch only keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def peak_bytes(step: Callable[[], object]) -> int:
    """How much more memory tensors take at most while `step` runs."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
