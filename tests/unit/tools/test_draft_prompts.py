"""Prompts for draft heads: the same by seed, all different, of three splits that share nothing, and varied."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from random import Random

import pytest

from tools.draft_training.hand_written import HAND_WRITTEN
from tools.draft_training.passages import MAX_WORDS, MIN_WORDS, passage
from tools.draft_training.prompts import MATERIALS, SPLITS, TASKS, Prompt, prompts
from tools.draft_training.scene import Scene, parsed
from tools.draft_training.topics import TOPICS

NUM_TRAIN = 20_000


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return prompts(NUM_TRAIN, seed=1)


def runs(texts: Iterable[str], length: int) -> list[tuple[str, ...]]:
    """Every run of so many words in the texts, without case and punctuation."""
    found: list[tuple[str, ...]] = []
    for text in texts:
        words = re.findall(r"[a-z0-9']+", text.lower())
        found.extend(tuple(words[start : start + length]) for start in range(len(words) - length + 1))
    return found


def test_a_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    once = prompts(300, seed=5)
    assert prompts(300, seed=5) == once
    assert prompts(100, seed=5) == once[:100]
    assert len({prompt.text for prompt in once} & {prompt.text for prompt in prompts(300, seed=6)}) < 15


def test_no_text_comes_twice(train: list[Prompt]) -> None:
    assert len(train) == NUM_TRAIN
    assert len({prompt.text for prompt in train}) == NUM_TRAIN


def test_there_are_many_topics_and_tasks_and_a_part_of_both_is_held_out() -> None:
    assert len({topic.name for topic in TOPICS}) == len(TOPICS) >= 160
    assert len({task.name for task in TASKS}) == len(TASKS) >= 40
    assert 0.12 < sum(topic.held for topic in TOPICS) / len(TOPICS) < 0.18
    assert 0.12 < sum(task.held for task in TASKS) / len(TASKS) < 0.18
    assert all(len(task.phrasings) >= 3 for task in TASKS)


def test_splits_share_neither_held_topics_nor_held_tasks(train: list[Prompt]) -> None:
    of = {"train": train, "held_topic": prompts(2000, seed=1, split="held_topic")}
    of["held_task"] = prompts(2000, seed=1, split="held_task")
    assert of.keys() == SPLITS.keys()
    assert all(prompt.split == split for split, made in of.items() for prompt in made)
    topics = {split: {prompt.topic for prompt in made} for split, made in of.items()}
    tasks = {split: {prompt.task for prompt in made} for split, made in of.items()}
    assert topics["held_topic"] == {topic.name for topic in TOPICS if topic.held}
    assert topics["train"] == topics["held_task"] == {topic.name for topic in TOPICS if not topic.held}
    assert tasks["held_task"] == {task.name for task in TASKS if task.held}
    assert tasks["train"] == tasks["held_topic"] == {task.name for task in TASKS if not task.held}


def test_training_never_names_a_held_topic(train: list[Prompt]) -> None:
    names = "|".join(re.escape(topic.name) for topic in TOPICS if topic.held)
    held = re.compile(rf"\b({names})\b", re.IGNORECASE)
    assert [prompt.text for prompt in train[:4000] if held.search(f"{prompt.text} {prompt.system}")] == []


def test_lengths_go_from_three_words_to_three_hundred(train: list[Prompt]) -> None:
    lengths = sorted(len(prompt.text.split()) for prompt in train)
    assert lengths[0] >= 3
    assert lengths[-1] <= 300
    assert sum(length < 6 for length in lengths) > 0.03 * NUM_TRAIN
    assert sum(length > 120 for length in lengths) > 0.05 * NUM_TRAIN
    assert 12 < lengths[NUM_TRAIN // 2] < 30


def test_some_have_a_system_message_and_some_are_typed_carelessly(train: list[Prompt]) -> None:
    systems = [prompt.system for prompt in train if prompt.system is not None]
    assert 0.1 < len(systems) / NUM_TRAIN < 0.2
    assert len(set(systems)) > 500
    assert 0.1 < sum(prompt.text == prompt.text.lower() for prompt in train) / NUM_TRAIN < 0.4


def test_passages_are_of_the_length_they_promise_and_differ() -> None:
    rng = Random(3)
    texts = [passage(Scene(rng.choice(TOPICS), rng, MATERIALS)) for _ in range(300)]
    lengths = sorted(len(text.split()) for text in texts)
    assert MIN_WORDS <= lengths[0] < 60 < 160 < lengths[-1] <= MAX_WORDS
    shingles = runs(texts, 8)
    assert len(set(shingles)) > 0.6 * len(shingles)


def test_prompts_do_not_repeat_one_another(train: list[Prompt]) -> None:
    shingles = runs((prompt.text for prompt in train[:500]), 8)
    assert len(shingles) > 10_000
    assert len(set(shingles)) > 0.8 * len(shingles)


def test_texts_are_clean(train: list[Prompt]) -> None:
    for prompt in train:
        text = f"{prompt.system or ''}{prompt.text}"
        assert text.isascii(), text
        assert all(char == "\n" or unicodedata.category(char) != "Cc" for char in text), text
        assert "(n)" not in re.sub(r"\w{2,}\(n\)", "", text), text
        assert prompt.text == prompt.text.strip()


def test_every_phrasing_can_be_filled_for_every_topic() -> None:
    for idx, topic in enumerate(TOPICS):
        for task in TASKS[idx % 9 :: 9]:
            for phrasing in task.phrasings:
                assert "{^" not in Scene(topic, Random(idx), MATERIALS).fill(phrasing)


def test_brackets_that_do_not_match_are_an_error() -> None:
    assert parsed("a [b|c [d|e]] f") == ("a ", ("b", "c [d|e]"), " f")
    with pytest.raises(ValueError, match="brackets"):
        parsed("a [b|c")


def test_an_unknown_split_and_a_count_that_cannot_be_had_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="held_task"):
        prompts(1, seed=1, split="test")
    monkeypatch.setattr("tools.draft_training.prompts.typed", lambda scene, *_: f"Say {scene.topic.name} twice")
    with pytest.raises(ValueError, match="different"):
        prompts(len(TOPICS), seed=1)


def test_hand_written_prompts_are_unlike_the_generated_ones() -> None:
    assert len(HAND_WRITTEN) == len(set(HAND_WRITTEN)) == 40
    generated = [prompt.text for split in SPLITS for prompt in prompts(2000, seed=2, split=split)]
    assert not set(runs(HAND_WRITTEN, 6)) & set(runs(generated, 6))
