"""The default model on the device says what it says in float32 on the CPU; where its file is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import ModelOptions
from engine.model_files.default_model import FILE_NAME, cache_dir
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from engine.tokenizer.chat import encode_chat
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.load import load_tokenizer
from tests.support.device_matrix import CLOSE_ULPS, Run, bfloat16_ulp, configured, cpu_decoder
from tests.support.scheduler import Harness
from tests.unit.models.paging import run_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not (cache_dir() / FILE_NAME).is_file(), reason="needs the default model's file"),
    pytest.mark.timeout(600),
]

DEVICE = "cuda"
TOKENS = 64
CHATS = (
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "Explain to a child why the sky is blue.",
    "List five animals that live in Africa, with one fact about each of them.",
    "def fibonacci(n):\n    # Finish this function and say what it costs.",
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve(None)


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = load_tokenizer(files)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return [encode_chat(tokenizer, template, [{"role": "user", "content": chat}]) for chat in CHATS]


def _harness(folder: Path, files: ModelFiles, device: str, dtype: str) -> Harness:
    run = Run(company=True, cache="cold", page_size=64, depth=1 if device == DEVICE else 0, graphs=True)
    return Harness.of_model(folder, configured(device, run, model=ModelOptions(dtype=dtype)), files)


def _texts(harness: Harness, prompts: list[list[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts, start=1):
        harness.add(number, prompt, max_tokens=TOKENS, ignore_eos=False)
    harness.run()
    harness.device.close()
    assert not harness.errors
    return [harness.tokens[number] for number in range(1, len(prompts) + 1)]


@pytest.fixture(scope="module")
def on_cpu(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return _harness(tmp_path_factory.mktemp("cpu"), files, "cpu", "float32")


@pytest.fixture(scope="module")
def expected(on_cpu: Harness, prompts: list[list[int]]) -> list[list[int]]:
    return _texts(on_cpu, prompts)


def test_float32_says_the_same(
    files: ModelFiles, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    assert _texts(_harness(tmp_path, files, DEVICE, "float32"), prompts) == expected


def test_bfloat16_differs_at_near_ties_only(
    files: ModelFiles, prompts: list[list[int]], expected: list[list[int]], on_cpu: Harness, tmp_path: Path
) -> None:
    found = _texts(_harness(tmp_path, files, DEVICE, "bfloat16"), prompts)
    for prompt, one, other in zip(prompts, expected, found, strict=True):
        at = next((i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
        if at is None:
            assert len(one) == len(other)
            continue
        with torch.inference_mode():
            logits = run_one(cpu_decoder(on_cpu), torch.tensor([*prompt, *one[:at]]))[-1]
        best = logits.max()
        behind = float(best - logits[other[at]])
        print(f"differs at token {at}, where its choice is {behind:.3f} behind the best logit {float(best):.2f}")
        assert behind <= CLOSE_ULPS * float(bfloat16_ulp(best))
