"""A drafter that learns: what it computes is what the engine computes with it, and it gets better."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import SpeculativeOptions
from engine.model_files.types import ModelFiles, RopeConfig
from scheduler_proc.speculative.dflash import DFlashSpec
from tests.support.matrix import config
from tests.support.scheduler import Harness
from tests.unit.tools.training import ANSWER, answered, drafts_seen, target_of
from tools.draft_training.dflash_module import DFlashModule
from tools.draft_training.fit import Training
from tools.draft_training.train_dflash import train, write

BLOCK = 5


def spec_of(num_layers: int) -> DFlashSpec:
    windows = (None,) * num_layers
    return DFlashSpec(64, 96, 4, 2, 16, 1e-5, RopeConfig(), windows, block_size=BLOCK, mask_id=2, layers=(1, 2))


def drafting(folder: Path, model: ModelFiles, drafter: Path) -> Harness:
    speculative = SpeculativeOptions(
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(drafter),
        speculative_dflash_block_size=BLOCK,
        speculative_adaptive=False,
    )
    return Harness.of_model(folder, msgspec.structs.replace(config(), speculative=speculative), model)


def test_it_computes_what_the_engine_does(model: ModelFiles, tmp_path: Path) -> None:
    plain = Harness.of_model(tmp_path, config(), model)
    (text, *_) = answered(plain, 3, seed=0)
    target = target_of(plain)
    module = DFlashModule(spec_of(2), 200, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.scales.copy_(torch.tensor([0.5, 4.0]).repeat_interleave(64))
        for parameter in module.parameters():
            # As it will be written; no vector is all ones.
            noise = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter * noise).half().float())
    write(module, target, tmp_path / "drafter")
    harness = drafting(tmp_path, model, tmp_path / "drafter")
    seen = drafts_seen(harness, text)
    head = target.output_rows()
    for known, drafts in seen[:12]:
        states, _ = target([text.ids[:known]], module.spec.layers)
        block = torch.full((BLOCK,), module.spec.mask_id)
        block[0] = int(text.ids[known - 1])
        with torch.no_grad():
            embeds = target.embed(block).clone().view(1, 1, BLOCK, -1)
            found = module(embeds, states.clone().unsqueeze(0), torch.tensor([[known - 1]]))
        assert (found[0, 0, 1:] @ head.T).argmax(dim=1).tolist() == drafts


@pytest.mark.slow
def test_it_learns(model: ModelFiles, tmp_path: Path) -> None:
    plain = Harness.of_model(tmp_path, config(), model)
    texts = answered(plain, 300, seed=1)
    target = target_of(plain)
    told: list[str] = []
    how = Training(rate=4e-3, batch_tokens=1024, epochs=12)
    train(target, texts, spec_of(1), how, 1024, tmp_path / "drafter", told.append)
    harness = drafting(tmp_path, model, tmp_path / "drafter")
    fresh = answered(plain, 12, seed=2)
    for number, text in enumerate(fresh, start=1):
        harness.add(number, text.ids[: text.prompt_len].tolist(), max_tokens=ANSWER)
    harness.run()
    assert [harness.tokens[n] for n in range(1, 13)] == [text.ids[text.prompt_len :].tolist() for text in fresh]
    workload = harness.workload
    length = 1 + workload.num_accepted / workload.num_verified
    print("\n".join(told), f"accept length {length:.2f}", sep="\n")
    # A model of random weights has little to learn; by chance it would be 1.02.
    assert length > 1.1
