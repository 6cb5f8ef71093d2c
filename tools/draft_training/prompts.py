"""Instructions of many kinds on many topics, for a model to answer and a draft head to learn from.

A prompt is a topic and a task put into one of the task's phrasings, with the people, numbers and texts that it takes,
and typed as people type: the same ones by seed. Some topics and some tasks never occur in training; each of both kinds
has a split of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.draft_training.passages import passage, sentence_of
from tools.draft_training.scene import Scene
from tools.draft_training.snippets import (
    any_code,
    buggy_code,
    claims,
    data_lines,
    draft_text,
    flawed_text,
    phrases,
    python_code,
    query,
    story_opening,
    things_in_disorder,
)
from tools.draft_training.style import system_message, typed
from tools.draft_training.task import Task
from tools.draft_training.tasks_exact import EXACT_TASKS
from tools.draft_training.tasks_knowledge import KNOWLEDGE_TASKS
from tools.draft_training.tasks_text import TEXT_TASKS
from tools.draft_training.tasks_writing import WRITING_TASKS
from tools.draft_training.topics import TOPICS, Topic

TASKS: tuple[Task, ...] = (*KNOWLEDGE_TASKS, *WRITING_TASKS, *TEXT_TASKS, *EXACT_TASKS)
# By split: does it take the topics, and the tasks, that training never sees?
SPLITS = {"train": (False, False), "held_topic": (True, False), "held_task": (False, True)}
MATERIALS: dict[str, Callable[[Scene], str]] = {
    "passage": passage,
    "sentence": sentence_of,
    "code": any_code,
    "python": python_code,
    "query": query,
    "buggy": buggy_code,
    "data": data_lines,
    "jumble": things_in_disorder,
    "phrases": phrases,
    "flawed": flawed_text,
    "opening": story_opening,
    "draft": draft_text,
    "claims": claims,
}
MIN_WORDS, MAX_WORDS = 3, 300
SYSTEM_SHARE = 0.15
MAX_MISSES = 2000  # so many texts in a row that were there before: no more are left


@dataclass(frozen=True)
class Prompt:
    """An instruction, perhaps with a system message, and what it was made from."""

    text: str
    system: str | None
    topic: str
    task: str
    split: str


def prompts(count: int, seed: int, split: str = "train") -> list[Prompt]:
    """`count` prompts of a split, no text twice. More of them begin with the same ones. Raises ValueError."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split}")
    held_topics, held_tasks = SPLITS[split]
    topics = [topic for topic in TOPICS if topic.held == held_topics]
    tasks = [task for task in TASKS if task.held == held_tasks]
    rng = Random(f"{split} {seed}")
    made: dict[str, Prompt] = {}
    misses = 0
    while len(made) < count:
        prompt = make(rng.choice(topics), rng.choice(tasks), split, rng)
        if prompt.text not in made and MIN_WORDS <= len(prompt.text.split()) <= MAX_WORDS:
            made[prompt.text] = prompt
            misses = 0
        else:
            misses += 1
        if misses == MAX_MISSES:
            raise ValueError(f"{split} has no {count} different prompts, only about {len(made)}")
    return list(made.values())


def make(topic: Topic, task: Task, split: str, rng: Random) -> Prompt:
    """One prompt."""
    scene = Scene(topic, rng, MATERIALS)
    text = typed(scene, scene.fill(scene.pick(task.phrasings)), task.limits)
    system = system_message(scene) if rng.random() < SYSTEM_SHARE else None
    return Prompt(text, system, topic.name, task.name, split)
