"""Greedy and seeded output does not depend on chunking, neighbours, page size, overlap depth, device or retraction."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from engine.ipc.messages import Abort, Finish
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from tests.support.matrix import TOKENS, Case, Reference, assert_same, cases, config, references, run_together
from tests.support.scheduler import Harness

FULL = list(itertools.product(["cpu", "delayed"], [0, 1, 2], [1, 16], [1, 7, 64, 4096]))


@pytest.mark.parametrize(("device", "depth", "page_size", "chunk"), FULL)
def test_full_matrix_on_a_tiny_model(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
) -> None:
    options = config(device=device, overlap_depth=depth, page_size=page_size, chunked_prefill_size=chunk)
    harness = Harness.of_model(tmp_path, options, tiny)
    assert_same(f"{device} {depth} {page_size} {chunk}", alone, run_together(harness, made, stagger=1))


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("delayed", 1), ("delayed", 2)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_cache_cold_warm_and_off_give_the_same(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
) -> None:
    base = {"device": device, "overlap_depth": depth, "page_size": page_size, "chunked_prefill_size": chunk}
    off = Harness.of_model(tmp_path, config(disable_radix_cache=True, **base), tiny)
    assert_same("cache off", alone, run_together(off, made))
    assert set(off.cached.values()) == {0}
    harness = Harness.of_model(tmp_path, config(**base), tiny)
    for number, case in enumerate(made, start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
    harness.run()
    first = len(made)
    for number, case in enumerate(made, start=first + 1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
    harness.run()
    # Conversations: the answer so far is part of the next prompt.
    for number, (case, reference) in enumerate(zip(made, alone, strict=True), start=2 * first + 1):
        prompt = [*case.prompt, *reference.tokens[: TOKENS // 2]]
        harness.add(number, prompt, max_tokens=TOKENS - TOKENS // 2, **case.sampling)
    harness.run()
    harness.device.close()
    assert_same("cold", alone, [harness.tokens[number] for number in range(1, first + 1)])
    assert_same("warm", alone, [harness.tokens[number] for number in range(first + 1, 2 * first + 1)])
    rest = [Reference(r.tokens[TOKENS // 2 :], r.gaps[TOKENS // 2 :]) for r in alone]
    assert_same("continued", rest, [harness.tokens[number] for number in range(2 * first + 1, 3 * first + 1)])
    warm = [harness.cached[number] for number in range(first + 1, 3 * first + 1)]
    assert sum(warm) > 0.5 * sum(len(case.prompt) for case in made)


@pytest.mark.parametrize(
    ("policy", "depth"),
    [
        ("fcfs", 2),
        *(
            pytest.param(policy, depth, marks=pytest.mark.slow)
            for policy, depth in (("fcfs", 0), ("fcfs", 1), ("lpm", 0), ("lpm", 1), ("lpm", 2))
        ),
    ],
)
def test_a_storm_of_cancels_and_retries_changes_no_neighbour(
    tiny: ModelFiles, tmp_path: Path, depth: int, policy: str
) -> None:
    """500 requests over shared prefixes in a pool too small for them; a third is cancelled at random and retried."""
    rng = random.Random(depth)
    trunks = [[rng.randint(3, 399) for _ in range(40)] for _ in range(4)]
    prompts = [
        [*trunks[rng.randint(0, 3)], *(rng.randint(3, 399) for _ in range(rng.randint(1, 12)))] for _ in range(25)
    ]
    expected = references(tmp_path, tiny, [Case(prompt, 28) for prompt in prompts])
    options = config(
        device="delayed" if depth else "cpu",
        overlap_depth=depth,
        page_size=4,
        chunked_prefill_size=32,
        max_total_tokens=224,
        max_running_requests=8,
        schedule_policy=policy,
        schedule_conservativeness=0.01,
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    which: dict[int, int] = {}
    alive: list[int] = []
    for number in range(1, 501):
        which[number] = rng.randrange(len(prompts))
        harness.add(number, prompts[which[number]], max_tokens=28)
        alive.append(number)
        if rng.random() < 0.34:
            victim = alive.pop(rng.randrange(len(alive)))
            harness.inbox.messages.append(Abort(victim, 0))
            which[1000 + victim] = which.get(victim, 0)
            harness.add(1000 + victim, prompts[which[victim]], max_tokens=28)
        harness.turn(rng.randint(0, 2))
    harness.run()
    harness.device.close()
    assert harness.planner.num_retractions > 0
    finished = [number for number, finish in harness.finish.items() if finish is not Finish.ABORT]
    assert len(finished) >= 500
    assert_same("storm", [expected[which[n]] for n in finished], [harness.tokens[n] for n in finished])


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("delayed", 1), ("delayed", 2)])
def test_retraction_changes_nothing(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
) -> None:

    options = config(
        device=device,
        overlap_depth=depth,
        max_total_tokens=160,
        chunked_prefill_size=32,
        schedule_conservativeness=0.01,
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    assert_same(f"retracted {device} {depth}", alone, run_together(harness, made))
    assert harness.planner.num_retractions > 0


def test_the_matrix_sees_a_page_that_is_freed_too_early(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness.of_model(tmp_path, config(device="delayed", overlap_depth=2), tiny)
    release = harness.planner.release

    def too_much(slot: int, *rest: object, **more: object) -> None:
        for other in harness.slots.decode().rows.tolist():
            harness.device.pages_freed(harness.cache.tables[0].pages[other, :1])
        release(slot, *rest, **more)

    monkeypatch.setattr(harness.planner, "release", too_much)
    with pytest.raises(AssertionError, match="differs"):
        assert_same("freed too early", alone, run_together(harness, made, stagger=1))


def test_resumed_requests_go_on_as_if_never_stopped(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path
) -> None:
    harness = Harness.of_model(tmp_path, config(), tiny)
    for number, (case, reference) in enumerate(zip(made, alone, strict=True), start=1):
        known = tuple(reference.tokens[: number % TOKENS])
        harness.tokens[number] = list(known)
        harness.add(number, case.prompt, attempt=1, output=known, max_tokens=TOKENS, **case.sampling)
    harness.run()
    assert_same("resumed", alone, [harness.tokens[number] for number in range(1, len(made) + 1)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairwise_matrix_on_the_real_model(tmp_path: Path) -> None:
    model = resolve(None)
    made = cases(model.config.vocab_size, [3, 17, 64, 130], TOKENS, seed=1)
    alone = references(tmp_path, model, made, threads=2)
    pairwise = [
        ("cpu", 0, 16, 7),
        ("cpu", 1, 1, 64),
        ("cpu", 2, 16, 256),
        ("delayed", 0, 1, 256),
        ("delayed", 1, 16, 64),
        ("delayed", 2, 1, 7),
        ("delayed", 2, 16, 33),
    ]
    for device, depth, page_size, chunk in pairwise:
        options = config(
            threads=2,
            device=device,
            overlap_depth=depth,
            page_size=page_size,
            chunked_prefill_size=chunk,
            max_total_tokens=1024,
        )
        harness = Harness.of_model(tmp_path, options, model)
        assert_same(f"real {device} {depth} {page_size} {chunk}", alone, run_together(harness, made))
