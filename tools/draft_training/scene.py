"""One prompt's people, places, things and numbers, and the templates that they fill.

A template has alternatives `[one|other|]`, which nest, and slots `{name}`. A slot keeps its value through a prompt;
`{name2}` is another of the same kind. `{^name}` is capitalised, and `a(n)` becomes the article that fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

from tools.draft_training.topics import Topic
from tools.draft_training.words import POOLS

MATERIAL_START, MATERIAL_END = "\x02", "\x03"  # around what a prompt quotes, which no typing style changes

# Views of a topic that suit all topics: they follow "explain", "a talk on", "a text about".
ASPECTS = (
    "the history of {topic}",
    "the basics of {topic}",
    "{topic}",
    "{topic}",
    "{thing}",
    "{thing} and {thing2}",
    "the role of {thing} in {topic}",
    "how {thing} and {thing2} are connected",
    "common myths about {topic}",
    "what a(n) {role} needs to know about {thing}",
    "why {thing} matter to people who care about {topic}",
    "how our view of {topic} has changed over the last [century|fifty years|decade]",
    "the most important ideas behind {topic}",
    "the main kinds of {thing}",
    "the least understood part of {topic}",
    "what children find exciting about {topic}",
    "how {topic} may look in [twenty|fifty|a hundred] years",
    "what most people get wrong about {thing}",
    "the work of a(n) {role}",
    "a typical day at a(n) {place}",
    "{topic} in {country}",
    "the link between {topic} and everyday life",
    "the vocabulary of {topic}",
)


@cache
def parsed(template: str) -> tuple[str | tuple[str, ...], ...]:
    """A template's top level: plain text, and for every bracket the tuple of its alternatives."""
    parts: list[str | tuple[str, ...]] = []
    depth, start, options = 0, 0, [""]
    for idx, char in enumerate(template):
        if char == "[":
            if depth == 0:
                parts.append(template[start:idx])
                start, options = idx + 1, []
            depth += 1
        elif char == "|" and depth == 1:
            options.append(template[start:idx])
            start = idx + 1
        elif char == "]":
            depth -= 1
            if depth == 0:
                parts.append((*options, template[start:idx]))
                start = idx + 1
    if depth:
        raise ValueError(f"brackets do not match: {template}")
    return (*parts, template[start:])


class Scene:
    """What one prompt is about. Slots are drawn when first asked for."""

    def __init__(self, topic: Topic, rng: Random, materials: dict[str, Callable[[Scene], str]]) -> None:
        self.topic = topic
        self.rng = rng
        self.materials = materials
        self.values: dict[str, str] = {"topic": topic.name, "field": topic.field}
        self.women: dict[str, bool] = {}

    def pick(self, options: tuple[str, ...]) -> str:
        """One of the options, each as likely."""
        return options[int(self.rng.random() * len(options))]

    def fill(self, template: str) -> str:
        """The text of a template."""
        text = self.chosen(template)
        text = re.sub(r"\{(\^?)(\w+)\}", lambda match: self.slot(match[2], capital=bool(match[1])), text)
        return re.sub(r"\b([Aa])\(n\) (\W?)(\w\w?\w?)", article, text)

    def chosen(self, template: str) -> str:
        """A template after its alternatives are taken."""
        if "[" not in template:
            return template
        return "".join(part if isinstance(part, str) else self.chosen(self.pick(part)) for part in parsed(template))

    def slot(self, name: str, capital: bool = False) -> str:
        """A slot's value: the one it has, or a new one that no other slot of its kind has."""
        if name not in self.values:
            self.values[name] = self.draw(name)
        value = self.values[name]
        return value[:1].upper() + value[1:] if capital else value

    def draw(self, name: str) -> str:
        """A fresh value for a slot."""
        kind = name.rstrip("0123456789")
        number = name.removeprefix(kind)
        if kind in ("he", "his", "him"):
            self.slot("name" + number)
            woman = self.women["name" + number]
            return {"he": ("he", "she"), "his": ("his", "her"), "him": ("him", "her")}[kind][woman]
        if kind in self.materials:
            return MATERIAL_START + self.materials[kind](self) + MATERIAL_END
        if kind == "name":
            self.women[name] = self.rng.random() < 0.5
            options = POOLS["girl" if self.women[name] else "boy"]
        elif kind in ("aspect", "goal"):
            return self.fill(self.pick(ASPECTS if kind == "aspect" else self.topic.goals))
        else:
            options = getattr(self.topic, kind + "s") if kind in ("thing", "role", "place") else POOLS[kind]
        taken = {value for key, value in self.values.items() if key.startswith(kind)}
        free = tuple(option for option in options if option not in taken)
        if not free:
            raise ValueError(f"no value is left for {{{name}}}")
        return self.pick(free)


def article(match: re.Match[str]) -> str:
    """`a` or `an`, by the letters that follow."""
    next_letters = match[3].lower()
    vowel = next_letters[0] in "aeiou8" and next_letters not in ("uni", "one", "use", "eur", "usu")
    vowel = vowel or next_letters in ("11", "18")
    return f"{match[1]}{'n' if vowel else ''} {match[2]}{match[3]}"
