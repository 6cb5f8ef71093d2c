"""One request inside the scheduler: what is fixed about it; what changes every step lives in slots."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.ipc.messages import Logprobs, Stamps
from engine.sampling import SamplingParams


class Request(msgspec.Struct, eq=False):
    """A waiting or running request."""

    request: int
    attempt: int
    front: int
    label: str
    prompt_ids: np.ndarray
    """int32 [prompt_len]"""
    output_ids: np.ndarray
    """int32: output known before it (re)joined the batch: from a resumed request or from retraction."""
    sampling: SamplingParams
    stream: bool
    max_output: int
    """Output tokens after which it ends by length."""
    stamps: Stamps
    namespace: bytes
    """Root of the prefix cache it may share pages with."""
    priority: int
    arrival: int
    """Rank in the order of arrival at this scheduler."""
    keys: np.ndarray
    """int64 [num_known]: cache keys of prompt and known output."""
    first_page: bytes
    """Namespace and first keys: requests that differ here share nothing."""
    slot: int = -1
    """Index into slots while running, else -1."""
    num_retractions: int = 0
    num_drafted: int = 0
    """Drafted tokens that were verified for it before it was retracted."""
    num_accepted: int = 0
    ahead: int = 0
    """Admissions by then if all that waited before it are admitted first: what ageing counts from."""
    cached_tokens: int = -1
    """Prompt tokens found in the cache when it was first admitted; -1 before."""
    started: bool = False
    """Its first token of this attempt was reported."""
    echo: bool = False
    """The prompt's text is wanted back."""
    score_from: int = -1
    """First prompt token whose logprob is wanted and was not reported; -1: none is."""
    num_known_at_first: int = 0
    """Output tokens it came with: `logprobs` begin after them."""
    logprobs: list[Logprobs] = []
    """Of the output tokens since, if wanted, as the steps brought them; kept for a resend."""

    @property
    def num_known(self) -> int:
        """Tokens to prefill before the next one can be sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_cached(self) -> int:
        """Tokens it may take from the prefix cache: what samples or is scored must be computed."""
        if 0 <= self.score_from < len(self.prompt_ids):
            return max(self.score_from, 1) - 1
        return self.num_known - 1
