"""Answers of a model to prompts: what a draft head learns from, and what it is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams
from engine.tokenizer.chat import encode_chat
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.load import load_tokenizer
from tools.decode_bench.driver import Driver
from tools.draft_training.fit import Text
from tools.draft_training.prompts import Prompt


class Chats:
    """Prompts as the model's chat template writes them."""

    def __init__(self, model: ModelFiles) -> None:
        """Raises ValueError for a model without a template."""
        self._tokenizer = load_tokenizer(model)
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{model.name} has no chat template")
        self._template = ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_tokens)

    def ids(self, text: str, system: str | None = None) -> np.ndarray:
        """int32"""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return np.array(
            encode_chat(self._tokenizer, self._template, [*messages, {"role": "user", "content": text}]), np.int32
        )

    def of(self, prompts: Sequence[Prompt | str]) -> list[np.ndarray]:
        """Of generated prompts, or of plain texts."""
        return [
            self.ids(prompt) if isinstance(prompt, str) else self.ids(prompt.text, prompt.system) for prompt in prompts
        ]


def complete(
    driver: Driver, prompts: Sequence[np.ndarray], max_tokens: int, temperatures: Sequence[float], seed: int = 0
) -> list[Text]:
    """An answer to each prompt (int32 ids), with its own end or max_tokens; temperatures take turns."""
    driver.outlet.answers = answers = {}
    numbers = []
    for index, prompt in enumerate(prompts):
        temperature = temperatures[index % len(temperatures)]
        sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=max_tokens, seed=seed + index)
        numbers.append(driver.request(prompt, sampling))
    driver.finish()
    driver.outlet.answers = None
    return [
        Text(np.concatenate((prompt, np.array(answers[number], np.int32))), len(prompt))
        for number, prompt in zip(numbers, prompts, strict=True)
    ]


@dataclass(frozen=True)
class Acceptance:
    """Of drafts, over some answers."""

    accept_len: float
    """Tokens of a verified row."""
    share: float
    """Of the drafted tokens, those that were accepted."""
    num_tokens: int


def acceptance(driver: Driver, prompts: Sequence[np.ndarray], max_tokens: int) -> Acceptance:
    """Of a driver that drafts, answering greedily."""
    workload = driver.scheduler.workload
    before = (workload.num_verified, workload.num_accepted, workload.num_drafted, workload.num_output_tokens)
    complete(driver, prompts, max_tokens, (0.0,))
    after = (workload.num_verified, workload.num_accepted, workload.num_drafted, workload.num_output_tokens)
    verified, accepted, drafted, tokens = (b - a for a, b in zip(before, after, strict=True))
    return Acceptance(1 + accepted / max(verified, 1), accepted / max(drafted, 1), tokens)


def save(texts: Sequence[Text], path: Path) -> None:
    """Texts in one file."""
    np.savez_compressed(
        path,
        ids=np.concatenate([text.ids for text in texts]),
        lens=np.array([len(text.ids) for text in texts], np.int32),
        prompts=np.array([text.prompt_len for text in texts], np.int32),
    )


def load(path: Path) -> list[Text]:
    """What `save` has written."""
    with np.load(path) as file:
        pieces = np.split(file["ids"], np.cumsum(file["lens"])[:-1])
        return [Text(ids, int(length)) for ids, length in zip(pieces, file["prompts"], strict=True)]
