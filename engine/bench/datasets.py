"""Prompts to measure with, the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from engine.bench.job import Ask, BenchError

Dataset = Literal["random", "random-ids", "shared-prefix", "sharegpt-file"]

TOKEN_IDS = 10_000
"""Random ids are below this: plain tokens in every vocabulary in use."""
_CHARACTERS_PER_TOKEN = 4
"""Of English, about: there is no tokenizer here."""
_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
"""Longer conversations of a file are passed over, as peers' benchmarks do."""

# With a space before them, one token each in the vocabularies in use.
_TEXT = (
    "the and for that with this from have they not but what all were when your can said there use each which she how"
    " their will other about out many then them these some her would make like him into time has look two more write go"
    " see number no way could people my than first water been call who its now find long down day did get come made may"
    " part over new sound take only little work know place year live me back give most very after thing our just name"
    " good sentence man think say great where help through much before line right too mean old any same tell boy follow"
    " came want show also around form three small set put end does another well large must big even such because turn"
    " here why ask went men read need land different home us move try kind hand picture again change off play spell air"
    " away animal house point page letter mother answer found study still learn should world high every near add food"
)
_WORDS = _TEXT.split()


class Lengths(NamedTuple):
    """Uniform in low..high, both included; in tokens."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high + 1, count).tolist()


Prompt: TypeAlias = str | list[int]


def parse_lengths(text: str) -> Lengths:
    """`A` or `A:B`. Raises ValueError for anything but 1 <= A <= B."""
    low, _, high = text.partition(":")
    lengths = Lengths(int(low), int(high or low))
    if not 1 <= lengths.low <= lengths.high:
        raise ValueError(f"lengths {text!r} are not 1 <= A <= B")
    return lengths


def random_prompts(rng: np.random.Generator, lengths: Sequence[int], *, ids: bool) -> list[Prompt]:
    """Token ids, or words of about as many tokens."""
    return [_random(rng, length, ids=ids) for length in lengths]


def shared_prefix_prompts(
    rng: np.random.Generator, prefix: Prompt, lengths: Sequence[int], *, ids: bool
) -> list[Prompt]:
    """`prefix`, then something of its own of each length."""
    own = random_prompts(rng, lengths, ids=ids)
    return [_joined(prefix, prompt) for prompt in own]


def random_prefix(seed: int, length: int, *, ids: bool) -> Prompt:
    """The same for every call with this seed."""
    return _random(np.random.default_rng([seed, 1]), length, ids=ids)


def _random(rng: np.random.Generator, length: int, *, ids: bool) -> Prompt:
    if ids:
        return rng.integers(0, TOKEN_IDS, length).tolist()
    return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), length))


def _joined(prefix: Prompt, prompt: Prompt) -> Prompt:
    if isinstance(prefix, list) and isinstance(prompt, list):
        return prefix + prompt
    return f"{prefix} {prompt}"


def read_sharegpt(path: Path, rng: np.random.Generator, count: int) -> list[tuple[str, int]]:
    """First questions of `count` random conversations, and about how many tokens their answers have.

    The file is a JSON list of {"conversations": [{"from": "human", "value": text}, {"from": "gpt", ...}, ...]}.
    Raises BenchError if it is not, or holds too few conversations of a usual length.
    """
    try:
        found = json.loads(path.read_bytes())
        pairs = [_first_turns(entry) for entry in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path} is no file of ShareGPT conversations: {type(error).__name__}: {error}") from error
    fitting = [pair for pair in pairs if pair is not None]
    if len(fitting) < count:
        raise BenchError(f"{path} has {len(fitting)} conversations of a usual length; {count} were asked for")
    return [fitting[index] for index in rng.permutation(len(fitting))[:count]]


def _first_turns(entry: dict) -> tuple[str, int] | None:
    turns = entry.get("conversations") or []
    if len(turns) < 2 or turns[0]["from"] not in ("human", "user"):
        return None
    prompt, answer = turns[0]["value"], turns[1]["value"]
    prompt_len, answer_len = len(prompt) // _CHARACTERS_PER_TOKEN, len(answer) // _CHARACTERS_PER_TOKEN
    usual = (
        min(prompt_len, answer_len) >= _LEAST_TOKENS
        and prompt_len <= _MOST_PROMPT_TOKENS
        and prompt_len + answer_len <= _MOST_TOKENS
    )
    return (prompt, answer_len) if usual else None


def arrivals(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Seconds at which requests come, in a Poisson process of `rate` a second from 0 on; all at 0 if that is inf."""
    if rate == float("inf"):
        return [0.0] * count
    gaps = rng.exponential(1 / rate, count)
    gaps[:1] = 0.0
    return np.cumsum(gaps).tolist()


class Workload(NamedTuple):
    """Which requests are made."""

    dataset: Dataset
    num_prompts: int
    input_lens: Lengths
    """Of shared-prefix: of what comes after the prefix."""
    output_lens: Lengths | None
    """None: 128, and of sharegpt-file the answers' own."""
    shared_prefix_len: int
    path: Path | None
    rate: float
    """Requests a second; inf: all at once."""
    seed: int
    ids: bool
    """Prompts of shared-prefix are token ids."""


DEFAULT_OUTPUT = Lengths(128, 128)


def make_asks(workload: Workload, *, warmup: bool = False) -> list[Ask]:
    """The requests of a run. Those for its warm-up differ, but share the prefix. Raises BenchError as read_sharegpt."""
    rng = np.random.default_rng([workload.seed, 2 if warmup else 0])
    count = workload.num_prompts
    output_lens = (workload.output_lens or DEFAULT_OUTPUT).draw(rng, count)
    if workload.dataset == "sharegpt-file":
        assert workload.path is not None
        pairs = read_sharegpt(workload.path, rng, count)
        prompts: list[Prompt] = [prompt for prompt, _ in pairs]
        if workload.output_lens is None:
            output_lens = [length for _, length in pairs]
    else:
        input_lens = workload.input_lens.draw(rng, count)
        if workload.dataset == "shared-prefix":
            prefix = random_prefix(workload.seed, workload.shared_prefix_len, ids=workload.ids)
            prompts = shared_prefix_prompts(rng, prefix, input_lens, ids=workload.ids)
        else:
            prompts = random_prompts(rng, input_lens, ids=workload.dataset == "random-ids")
    times = arrivals(rng, count, workload.rate)
    return [Ask(index, *one) for index, one in enumerate(zip(prompts, output_lens, times, strict=True))]
