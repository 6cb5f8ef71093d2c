"""Passages of 40 to 200 words to work on, composed sentence by sentence."""

from __future__ import annotations

from tools.draft_training.genres_private import PRIVATE_GENRES
from tools.draft_training.genres_public import PUBLIC_GENRES
from tools.draft_training.scene import Scene

GENRES = (*PUBLIC_GENRES, *PRIVATE_GENRES)
MIN_WORDS, MAX_WORDS = 40, 200


def passage(scene: Scene) -> str:
    """A text of MIN_WORDS to MAX_WORDS words, short ones as likely as long ones."""
    rng = scene.rng
    genre = GENRES[int(rng.random() * len(GENRES))]
    wanted = MIN_WORDS + (MAX_WORDS - MIN_WORDS) * rng.random()
    order = sorted(range(len(genre.body)), key=lambda _: rng.random())
    sentences = {-1: scene.fill(scene.pick(genre.start)), len(genre.body): scene.fill(scene.pick(genre.end))}
    for idx in order:
        sentence = scene.fill(genre.body[idx])
        num_words = sum(text.count(" ") + 1 for text in sentences.values())
        if num_words >= MIN_WORDS and num_words + sentence.count(" ") + 1 > wanted:
            break
        sentences[idx] = sentence
    texts = [text[0].upper() + text[1:] for _, text in sorted(sentences.items())]
    breaks = rng.random() < 0.25
    return "".join(text + ("\n\n" if breaks and rng.random() < 0.3 else " ") for text in texts).strip()


def sentence_of(scene: Scene) -> str:
    """One sentence of a passage."""
    genre = GENRES[int(scene.rng.random() * len(GENRES))]
    text = scene.fill(scene.pick(genre.body))
    return text[0].upper() + text[1:]
