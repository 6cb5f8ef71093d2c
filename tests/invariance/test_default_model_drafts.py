"""Every way to draft, on the default model: the answers without drafts, in runs whose drafts are good.

Pages, chunks, depths and caches vary together, so that any two of their values meet in some run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions, SpeculativeOptions
from engine.model_files.default_model import NAME
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from scheduler_proc.settle import settle
from tests.invariance.test_ngram import Watched
from tests.invariance.test_speculative import runner_of
from tests.support.packed import needs_kernels
from tests.support.scheduler import Harness
from tools.draft_training.completions import Chats

pytestmark = [pytest.mark.slow, needs_kernels, pytest.mark.timeout(600)]

TOKENS = 64
TEXTS = (
    "Repeat this list twice, exactly: apple, banana, cherry, dragonfruit, elderberry, fig, grape.",
    "Say 'the quick brown fox jumps over the lazy dog' three times.",
    "What is the capital of France?",
    "Write one paragraph about the sea. Then write the same paragraph again.",
    "Here is a function:\ndef add(first, second):\n    return first + second\nWrite it again, with a comment.",
    "Count from 1 to 30.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a brick.",
)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "NGRAM": {"speculative_ngram_min_match_window_size": 1},
    "NGRAM trees": {"speculative_ngram_min_match_window_size": 1, "speculative_ngram_max_bfs_breadth": 4},
    "EAGLE3": {},
    "EAGLE3 chains": {"speculative_eagle_topk": 1},
    "STANDALONE": {"speculative_draft_model_path": "default", "speculative_eagle_topk": 3},
}
RUNS = (
    # Algorithm, page size, chunk, depth, and whether the cache is warm or rows are retracted.
    ("NGRAM", 1, 64, 0, "warm"),
    ("NGRAM", 16, 512, 2, "retracted"),
    ("NGRAM trees", 16, 64, 1, "retracted"),
    ("NGRAM trees", 1, 512, 2, "warm"),
    ("EAGLE3", 16, 512, 0, "warm"),
    ("EAGLE3", 1, 64, 1, "retracted"),
    ("EAGLE3", 16, 64, 2, "cold"),
    ("EAGLE3 chains", 1, 512, 2, "warm"),
    ("EAGLE3 chains", 16, 64, 0, "retracted"),
    ("STANDALONE", 16, 64, 1, "warm"),
)


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    return resolve(None)


@pytest.fixture(scope="module")
def prompts(model: ModelFiles) -> list[list[int]]:
    return [ids.tolist() for ids in Chats(model).of(TEXTS)]


def configured(speculative: SpeculativeOptions, **options: Any) -> EngineConfig:
    scheduler = SchedulerOptions(device="cpu", **{"max_total_tokens": 4096, "max_running_requests": 8, **options})
    process = ProcessOptions(cpu_threads=2)
    return settle(EngineConfig(model=ModelOptions(), scheduler=scheduler, process=process, speculative=speculative))


def ask(harness: Harness, prompts: list[list[int]], first: int) -> list[list[int]]:
    """Half of them greedy, half at random with a seed."""
    for number, prompt in enumerate(prompts, start=first):
        sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": number - first} if number % 4 == 3 else {}
        harness.add(number, prompt, max_tokens=TOKENS, **sampling)
    harness.run()
    assert not harness.errors
    return [harness.tokens[number] for number in range(first, first + len(prompts))]


@pytest.fixture(scope="module")
def alone(model: ModelFiles, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    harness = Harness.of_model(tmp_path_factory.mktemp("alone"), configured(SpeculativeOptions()), model)
    return ask(harness, prompts, 101)


@pytest.mark.parametrize(("name", "page_size", "chunk", "depth", "cache"), RUNS)
def test_answers(
    model: ModelFiles,
    prompts: list[list[int]],
    alone: list[list[int]],
    tmp_path: Path,
    name: str,
    page_size: int,
    chunk: int,
    depth: int,
    cache: str,
) -> None:
    speculative = msgspec.convert(
        {"speculative_algorithm": name.split()[0], "speculative_adaptive": False, **ALGORITHMS[name]},
        SpeculativeOptions,
    )
    few: dict[str, Any] = {"max_total_tokens": 560, "schedule_conservativeness": 0.01} if cache == "retracted" else {}
    options = {"page_size": page_size, "chunked_prefill_size": chunk, "overlap_depth": depth, **few}
    harness = Harness.of_model(tmp_path, configured(speculative, **options), model)
    if cache == "warm":
        ask(harness, prompts, 101)
    runner, workload = runner_of(harness), harness.workload
    assert runner.verifier is not None
    watched = Watched(runner.verifier.drafter)
    runner.verifier.drafter = watched
    before = workload.num_verified, workload.num_accepted
    assert ask(harness, prompts, 101 if cache != "warm" else 201) == alone
    verified, accepted = workload.num_verified - before[0], workload.num_accepted - before[1]
    print(f"{NAME}, {name}: accept length {1 + accepted / verified:.2f}, later children {watched.later_children}")
    assert 1 + accepted / verified > 1.3
    assert cache != "retracted" or harness.planner.num_retractions > 0
    assert cache != "warm" or harness.cached[201] > 0
    is_tree = name in ("NGRAM trees", "EAGLE3", "STANDALONE")
    assert not is_tree or watched.later_children > 0
