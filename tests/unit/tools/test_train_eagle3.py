"""A head that learns: what it computes is what the engine computes with it, and it gets better."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.config import SpeculativeOptions
from engine.model_files.types import ModelFiles, RopeConfig
from scheduler_proc.speculative.eagle3 import Eagle3Spec
from tests.support.matrix import config
from tests.support.scheduler import Harness
from tests.unit.tools.training import ANSWER, answered, drafts_seen, target_of
from tools.draft_training.eagle3_module import Eagle3Module
from tools.draft_training.fit import Text, Training, draft_vocabulary
from tools.draft_training.train_eagle3 import train, write


def spec_of(vocab: int) -> Eagle3Spec:
    return Eagle3Spec(64, 96, 4, 2, 16, 1e-5, RopeConfig(), vocab, (1, 2))


def drafting(folder: Path, model: ModelFiles, head: Path) -> Harness:
    speculative = SpeculativeOptions(
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(head),
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        speculative_adaptive=False,
    )
    return Harness.of_model(folder, msgspec.structs.replace(config(), speculative=speculative), model)


def test_it_computes_what_the_engine_does(model: ModelFiles, tmp_path: Path) -> None:
    plain = Harness.of_model(tmp_path, config(), model)
    (text, *_) = answered(plain, 3, seed=0)
    target, vocabulary = target_of(plain), np.arange(5, 55)
    module = Eagle3Module(spec_of(len(vocabulary)), 200, seed=3)
    with torch.no_grad():
        module.scales.copy_(torch.tensor([0.5, 4.0]).repeat_interleave(64))
        # As it will be written.
        for parameter in module.parameters():
            parameter.copy_(parameter.half().float())
    write(module, vocabulary, target, tmp_path / "head")
    harness = drafting(tmp_path, model, tmp_path / "head")
    seen = drafts_seen(harness, text)
    kept = torch.from_numpy(vocabulary)
    for known, drafts in seen[:12]:
        ids = np.concatenate((text.ids[:known], np.array(drafts, np.int32)))
        states, _ = target([ids], module.spec.layers)
        embeds = target.embed(torch.from_numpy(ids.astype(np.int64)))
        with torch.no_grad():
            found = module(embeds.clone().unsqueeze(0), states.clone().unsqueeze(0), len(drafts))
        assert [int(kept[logits[0, known - 1].argmax()]) for logits in found] == drafts


@pytest.mark.slow
def test_it_learns(model: ModelFiles, tmp_path: Path) -> None:
    plain = Harness.of_model(tmp_path, config(), model)
    texts = answered(plain, 300, seed=1)
    target = target_of(plain)
    vocabulary = draft_vocabulary(texts, 50, 60)
    told: list[str] = []
    how = Training(rate=4e-3, batch_tokens=1024, epochs=12)
    train(target, texts, spec_of(50), vocabulary, how, 3, tmp_path / "head", told.append)
    harness = drafting(tmp_path, model, tmp_path / "head")
    fresh = answered(plain, 12, seed=2)
    for number, text in enumerate(fresh, start=1):
        harness.add(number, text.ids[: text.prompt_len].tolist(), max_tokens=ANSWER)
    harness.run()
    assert [harness.tokens[n] for n in range(1, 13)] == [text.ids[text.prompt_len :].tolist() for text in fresh]
    workload = harness.workload
    length = 1 + workload.num_accepted / workload.num_verified
    print("\n".join(told), f"accept length {length:.2f}", sep="\n")
    # A model of random weights has little to learn.
    assert length > 1.15


def test_the_vocabulary_is_that_of_answers() -> None:
    texts = [Text(np.array([9, 9, 9, 4, 4, 2], np.int32), 3), Text(np.array([7, 4, 1], np.int32), 1)]
    assert draft_vocabulary(texts, 3, 10).tolist() in ([1, 2, 4],)
