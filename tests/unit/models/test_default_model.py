"""The real default model against transformers reading the same GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_files.resolve import resolve
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.weights.load import load_weights
from tests.unit.models.paging import PagedRunner, cpu_kernels, run_one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, DECODED = 64, 16
TEXT = (
    "The lighthouse keeper wrote in his log every evening: the wind, the tide, the ships that passed and the birds "
    "that rested on the railing. One night in November the lamp went out, and for the first time in thirty years he "
    "heard nothing but the sea. He climbed the stairs with a candle, counted the steps aloud as his father had taught "
    "him, and found that the glass was covered with moths."
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a brick.",
    "Translate to German: Good morning, my friend.",
)


@dataclass(frozen=True)
class Models:
    ours: Decoder
    theirs: Any
    tokenizer: Any


def _transformers_model(path: Path) -> Any:
    """The model as transformers reads it from the file, in float32.

    from_pretrained would do the same but wants a further package for GGUF.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def models() -> Models:
    from transformers import AutoTokenizer

    files = resolve(None)
    decoder = Decoder(spec_of(files.config), cpu_kernels(), "cpu", torch.float32)
    load_weights(decoder, files)
    path = Path(files.weight_files[0])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return Models(decoder, _transformers_model(path), tokenizer)


@pytest.fixture(scope="module")
def ids(models: Models) -> Tensor:
    found = models.tokenizer(TEXT, return_tensors="pt").input_ids[0][: PROMPT + DECODED]
    assert len(found) == PROMPT + DECODED
    return found


@pytest.fixture(scope="module")
def logits(models: Models, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return models.theirs(ids[None]).logits[0].float()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits(models: Models, ids: Tensor, logits: Tensor, chunk: int, page_size: int) -> None:
    got = run_one(models.ours, ids, chunk=chunk, decode_from=PROMPT, page_size=page_size)
    assert float((got - logits).abs().max()) < 1e-3


def _prompts(models: Models) -> list[Tensor]:
    render = models.tokenizer.apply_chat_template
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [torch.tensor(render(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]


@pytest.mark.timeout(300)
def test_greedy_text_of_five_chats_in_one_batch(models: Models) -> None:
    prompts = _prompts(models)
    runner = PagedRunner(models.ours, 16, 200)
    contexts = [runner.context(len(prompt) + 64) for prompt in prompts]
    rows = list(zip(contexts, prompts, strict=True))
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(64):
        tokens = [models.ours.kernels.argmax_rows(logits[-1:]).long() for logits in runner.step(rows)]
        rows = list(zip(contexts, tokens, strict=True))
        for text, token in zip(texts, tokens, strict=True):
            text.append(int(token))
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            out = models.theirs.generate(
                prompt[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert text == out[0, len(prompt) :].tolist()
