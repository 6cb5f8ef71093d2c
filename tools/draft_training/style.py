"""How people type: greetings, background, extra wishes, lower case, typos; and what an operator puts before it all."""

from __future__ import annotations

import re
from random import Random

from tools.draft_training.scene import MATERIAL_END, MATERIAL_START, Scene

OPENERS = (
    "Hi[!|,|, quick question:]",
    "Hello, I hope you can help me.",
    "Hey there!",
    "Quick question.",
    "I work as a(n) {role5} in {city5}.",
    "I am preparing a lesson on {topic}.",
    "My daughter is {age} and asks me about {topic} all the time.",
    "For a poster at our {place5}:",
    "Sorry if this is a silly question.",
    "I am {feeling5} and need your help.",
    "This is for a small magazine about {topic}.",
    "You are good at this, so:",
    "Good morning.",
    "I have a meeting with {person5} at {hour5}.",
    "Let's talk about {topic}.",
)
BACKGROUNDS = (
    (
        "I have been a(n) {role5} at a(n) {place5} in {city5} for {small5} years, and lately {person5} keeps asking "
        "me about {topic}."
    ),
    "Last {month5} we moved from {city6} to {city5}, and my old notes on {thing5} got lost on the way.",
    "A friend recommended you to me, because you once helped {him5} with something similar and it only took a minute.",
    "I am writing this on my phone in the bus, so please forgive the typing.",
    "We are a group of {small5} volunteers, none of us has any training, and the money is nearly gone.",
    (
        "I tried two other ways already: first I asked a(n) {role6}, then I read half a book from {recent5}, and both "
        "left me {feeling5}."
    ),
    "The deadline is {day5} at {hour5}, and I would like to have a first version well before that.",
    "English is not my first language, so short sentences would be kind.",
    "My {age5}-year-old nephew will be there too, and he gets bored easily.",
    "In case it matters: I live in {country5}, I am not allowed to spend more than {cost5}, and I do not own a car.",
    "{^person5} thinks that the whole thing is a waste of time, which makes me want to do it even more.",
    "I know a little about {thing5}, but next to nothing about the rest.",
    (
        "It started as a joke between me and {name5}, and now [half the street|the whole office|my family] is "
        "waiting for a result."
    ),
    "Money is not a problem, time is: I work nights until {month5}.",
    "Please bear in mind that the {place5} has no heating and that most of us are older than {medium5}.",
    "Somebody told me that {thing5} are the key to all this, but he had been drinking.",
    "I will read your answer aloud at the {place5}, so it should sound natural.",
    "We had a(n) {role5} who took care of such things, but she left for {country5} in {season5}.",
    "My last attempt was in {recent5}, and people still tease me about it.",
    "[Two|Three] teachers have explained it to me and [each|every one] said something different.",
    "I would ask {person6}, only we are not on speaking terms since the affair with the {object5}.",
)
CLOSERS = (
    "Thanks!",
    "Thank you.",
    "thanks in advance",
    "Please hurry.",
    "No rush.",
    "I appreciate it.",
    "pls",
    "Cheers, {name6}",
)
LIMITS = {
    "prose": (
        "Keep it under {words5} words.",
        "Answer in {few5} sentences.",
        "Use [simple|plain] words.",
        "Write for {readers5}.",
        "Give [one|an] example.",
        "No lists, please.",
        "Use bullet points.",
        "Use short headings.",
        "Start with the most important point.",
        "Be brief.",
        "Go into detail.",
        "Think step by step.",
        "End with a question to the reader.",
        "Mention {thing5}.",
        "Say so if you are not sure.",
        "Avoid technical terms.",
        "One paragraph only.",
    ),
    "list": (
        "One line each.",
        "No explanations.",
        "Number them.",
        "Add a short reason to each.",
        "Put the [easiest|cheapest|most important] first.",
        "Not more than {small5} words per point.",
        "Write for {readers5}.",
        "Put the key word of each in bold.",
        "Mention {thing5} at least once.",
        "Use dashes, no numbers.",
        "Finish with a one-line summary.",
    ),
    "story": (
        "Make it {tone5}.",
        "About {words5} words.",
        "Include a(n) {animal5} and a(n) {object5}.",
        "End with a surprise.",
        "Set it in {city5}.",
        "Write in the first person.",
        "It is for {readers5}.",
        "Do not use the word {topic}.",
        "Give it a title.",
        "Start with a question.",
        "Mention {thing5}.",
        "Keep it short.",
    ),
    "letter": (
        "Keep it [short|polite|friendly|warm but short].",
        "Not more than {words5} words.",
        "Make it sound {tone5}.",
        "Mention {thing5} and {price5}.",
        "Sign it with {name5} {surname5}.",
        "Leave a blank for the date.",
        "Add a subject line.",
        "End with a clear request.",
    ),
    "short": (
        "Not more than {small5} words.",
        "Make it {tone5}.",
        "No emojis.",
        "Use two emojis.",
        "Give {few5} versions.",
    ),
    "text": (
        "Do not add anything new.",
        "Answer with the result only.",
        "Keep all names.",
        "Explain your answer briefly.",
        "Use a numbered list.",
        "If something is unclear, say so.",
        "Keep the order of the text.",
    ),
    "number": (
        "Show your work.",
        "Just the result.",
        "Think step by step.",
        "Explain it to a child of {age5}.",
        "Check your answer at the end.",
        "Give the formula first.",
    ),
    "code": (
        "Keep it short.",
        "Explain it in {few5} sentences afterwards.",
        "Output only, no explanation.",
        "Add comments.",
        "Use clear names.",
        "Include a small example.",
    ),
    "none": (),
}
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a [friendly|patient|concise|careful|cheerful] assistant.",
    "You are a(n) {role7} who answers questions about {field}.",
    "You are the chat assistant of a(n) {place7} in {city7}. Be polite and stay on topic.",
    "Answer in at most {few7} sentences.",
    "Always answer in plain text without lists or headings.",
    "Use Markdown with headings and lists where they help.",
    "You talk to {readers7}. Choose your words accordingly.",
    "You are an expert in {field} with {small7} years of practice. Give exact and complete answers.",
    "Reply in a(n) {tone7} voice.",
    "First think about the question, then give a short final answer.",
    "You are a teacher. Explain your reasoning and end with a short question that checks understanding.",
    "You write for the website of {firm7}. Avoid exaggeration.",
    "If you do not know something, say that you do not know it.",
    "You are a coding and writing assistant. Prefer short examples to long explanations.",
    "Today is {day7}, {month7} {small7}. The user lives in {city7}.",
    "You are {name7}, a(n) {role7}. Stay in character.",
)
NEIGHBOURS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqrewyutipasfdhgkjlxzvcnbm", strict=True))
SHORTHANDS = {
    "you": "u",
    "your": "ur",
    "are": "r",
    "please": "pls",
    "because": "cuz",
    "and": "&",
    "for": "4",
    "about": "abt",
    "what is": "whats",
    "do not": "dont",
    "I am": "im",
    "cannot": "cant",
    "with": "w/",
    "people": "ppl",
}


def typed(scene: Scene, request: str, limits: str) -> str:
    """A request as a person might type it. What stands between material marks stays as it is; the marks go."""
    rng = scene.rng
    to_complete = request.endswith(("Answer:", " always"))
    wish_share = 0.2 if MATERIAL_START in request else 0.4
    if rng.random() < wish_share and LIMITS[limits] and not to_complete:
        wish = scene.fill(scene.pick(LIMITS[limits]))
        request = f"{wish} {request}" if request.endswith(MATERIAL_END) else f"{ended(request)} {wish}"
    gap = "\n\n" if request.startswith(MATERIAL_START) else " "
    dice = rng.random()
    if dice < 0.12:
        request = f"{scene.fill(scene.pick(OPENERS))}{gap}{request}"
    elif dice < 0.2:
        told = rng.sample(BACKGROUNDS, rng.randint(1, 4))
        request = f"{capital(scene.fill(' '.join(told)))}{gap}{capital(request)}"
    elif not request.startswith("how ") or rng.random() < 0.5:
        request = capital(request) if rng.random() < 0.8 else request
    if rng.random() < 0.06 and not request.endswith(MATERIAL_END) and not to_complete:
        request = f"{ended(request)} {scene.fill(scene.pick(CLOSERS))}"
    parts = re.split(f"({MATERIAL_START}[^{MATERIAL_END}]*{MATERIAL_END})", request)
    carelessness = rng.random()
    parts = [part[1:-1] if part.startswith(MATERIAL_START) else careless(part, carelessness, rng) for part in parts]
    return "".join(parts).strip()


def ended(text: str) -> str:
    """A text that something can follow: with a stop."""
    return text if text.endswith((".", "?", "!", ":", MATERIAL_END)) else text + "."


def capital(text: str) -> str:
    """A text with a capital first letter."""
    return text[:1].upper() + text[1:]


def careless(text: str, carelessness: float, rng: Random) -> str:
    """A text without capitals, with shorthands, with typos or as it is: by `carelessness`, 0 to 1."""
    if carelessness < 0.78:
        return text
    if carelessness < 0.88 or carelessness >= 0.96:
        text = text.lower()
    if carelessness >= 0.93:
        text = re.sub(
            r"\b(what is|do not|I am|[a-z]+)\b",
            lambda word: SHORTHANDS.get(word[0], word[0]) if rng.random() < 0.5 else word[0],
            text,
        )
    if carelessness >= 0.86:
        text = mistyped(text, rng)
    if carelessness >= 0.83:
        text = re.sub(r"[.?!]+$", "", text)
    return text


def mistyped(text: str, rng: Random) -> str:
    """A text with one to four slips of the finger in longer words."""
    spots = [match.start() for match in re.finditer(r"(?<=[A-Za-z])[a-z](?=[a-z]{2})", text)]
    for spot in sorted(rng.sample(spots, min(len(spots), rng.randint(1, 4))), reverse=True):
        kind = rng.randrange(4)
        here, after = text[spot], text[spot + 1]
        slip = (after + here, after, here + here + after, NEIGHBOURS[here] + after)[kind]
        text = text[:spot] + slip + text[spot + 2 :]
    return text


def system_message(scene: Scene) -> str:
    """What an operator might put before the request."""
    return scene.fill(scene.pick(SYSTEMS))
