"""Material that is not prose: programs, some with a bug, records, and short phrases. Names come from the scene."""

from __future__ import annotations

import json

from tools.draft_training.scene import Scene

# THINGS, THING: names after one of the topic's things. LIMIT, SMALL: numbers.
PYTHON = (
    """def count_THINGS(rows):
    total = 0
    for row in rows:
        if row["kind"] == "THING" and row["size"] > LIMIT:
            total += 1
    return total""",
    """from collections import Counter

def most_common_THINGS(names, n=SMALL):
    counts = Counter(name.strip().lower() for name in names)
    return [name for name, _ in counts.most_common(n)]""",
    """class THINGBox:
    def __init__(self, capacity=LIMIT):
        self.capacity = capacity
        self.THINGS = []

    def add(self, item):
        if len(self.THINGS) >= self.capacity:
            raise ValueError("full")
        self.THINGS.append(item)

    def __len__(self):
        return len(self.THINGS)""",
    """def group_by_first_letter(THINGS):
    groups = {}
    for name in THINGS:
        groups.setdefault(name[0].upper(), []).append(name)
    return dict(sorted(groups.items()))""",
    """import csv

def load_THINGS(path):
    with open(path, newline="") as f:
        return [row for row in csv.DictReader(f) if int(row["count"]) >= SMALL]""",
    """def price_of(THING, discount=0.SMALL):
    full = THING["price"] * THING["amount"]
    return round(full * (1 - discount), 2)

print(price_of({"price": LIMIT, "amount": 3}))""",
    """def chunks(THINGS, size=SMALL):
    for start in range(0, len(THINGS), size):
        yield THINGS[start:start + size]

for part in chunks(list(range(LIMIT))):
    print(sum(part))""",
    """def steps(n, seen=None):
    seen = seen or {}
    if n <= 1:
        return 1
    if n not in seen:
        seen[n] = steps(n - 1, seen) + steps(n - 2, seen)
    return seen[n]

THING_steps = [steps(n) for n in range(SMALL)]""",
)
OTHER_CODE = (
    """function totalWeight(THINGS) {
  return THINGS
    .filter((item) => item.weight > SMALL)
    .reduce((sum, item) => sum + item.weight, 0);
}""",
    """const THINGS = await fetch("/api/THINGS?limit=LIMIT").then((r) => r.json());
for (const { name, price } of THINGS) {
  console.log(`${name}: ${price.toFixed(2)}`);
}""",
    """document.querySelector("#add-THING").addEventListener("click", () => {
  const item = document.createElement("li");
  item.textContent = `THING ${document.querySelectorAll("li").length + 1}`;
  document.querySelector("#THINGS").append(item);
});""",
    """for file in THINGS_*.txt; do
  lines=$(wc -l < "$file")
  if [ "$lines" -gt LIMIT ]; then
    mv "$file" archive/
  fi
done""",
    """public static int countLong(List<String> THINGS) {
    int n = 0;
    for (String s : THINGS) {
        if (s.length() > SMALL) n++;
    }
    return n;
}""",
    """<ul class="THINGS">
  <li>First THING</li>
  <li>Second THING</li>
</ul>
<style>
  .THINGS li:nth-child(odd) { background: #eee; padding: SMALLpx; }
</style>""",
)
QUERIES = (
    "SELECT name, COUNT(*) AS n\nFROM THINGS\nWHERE price > LIMIT\nGROUP BY name\nORDER BY n DESC\nLIMIT SMALL;",
    (
        "SELECT o.id, c.name\nFROM orders o JOIN customers c ON c.id = o.customer_id\nWHERE o.item = 'THING' AND "
        "o.total < LIMIT;"
    ),
    "UPDATE THINGS SET stock = stock - SMALL WHERE id = LIMIT;",
)
BUGGY = (
    """def average_size(THINGS):
    total = 0
    for item in THINGS:
        total = item["size"]
    return total / len(THINGS)""",
    """def longest_name(THINGS):
    best = ""
    for name in THINGS:
        if len(name) < len(best):
            best = name
    return best""",
    """def add_THING(name, THINGS=[]):
    THINGS.append(name)
    return THINGS

print(add_THING("a"))
print(add_THING("b"))  # I expect only b""",
    """i = 0
while i < SMALL:
    print("THING number", i)""",
    """def last_THINGS(THINGS, n):
    return THINGS[len(THINGS) - n - 1:]""",
    """prices = {"small": SMALL, "large": LIMIT}
total = 0
for name in prices:
    total += name
print("all THINGS cost", total)""",
    """def remove_short(THINGS):
    for name in THINGS:
        if len(name) < SMALL:
            THINGS.remove(name)
    return THINGS""",
    """def is_full(THINGS)
    return len(THINGS) >= LIMIT""",
    """age = input("How old is the THING? ")
if age > SMALL:
    print("old")
else:
    print("young")""",
    """function lastThing(THINGS) {
  return THINGS[THINGS.length];
}""",
    """let count = LIMIT;
if (count = SMALL) {
  console.log("exactly SMALL THINGS");
}""",
    """const names = THINGS.map((item) => {
  item.name.toUpperCase();
});
console.log(names);  // prints undefined""",
    """def find_THING(THINGS, wanted):
    low, high = 0, len(THINGS)
    while low < high:
        mid = (low + high) // 2
        if THINGS[mid] < wanted:
            low = mid
        else:
            high = mid
    return low""",
)


def singular(plural: str) -> str:
    """A plural's singular, as far as names in programs need it."""
    if plural.endswith("ies"):
        return plural[:-3] + "y"
    if plural.endswith(("sses", "shes", "ches", "xes", "buses")):
        return plural[:-2]
    return plural[:-1] if plural.endswith("s") and not plural.endswith("ss") else plural


def named(scene: Scene, snippet: str) -> str:
    """A snippet with the scene's names and numbers."""
    things = scene.slot("thing").lower().replace("'", "").replace("-", " ")
    identifier, one = things.replace(" ", "_"), singular(things).replace(" ", "_")
    small, limit = scene.pick(("3", "4", "5", "6", "7", "8")), scene.pick(("10", "20", "25", "40", "50", "75", "100"))
    snippet = snippet.replace("THINGS", identifier).replace("class THING", "class " + one.title().replace("_", ""))
    return snippet.replace("THING", one).replace("LIMIT", limit).replace("SMALL", small)


def fenced(scene: Scene, language: str, snippet: str) -> str:
    """A snippet as people paste it: between fences, or bare."""
    return f"```{language}\n{snippet}\n```" if scene.rng.random() < 0.6 else snippet


def python_code(scene: Scene) -> str:
    """A short Python program."""
    return fenced(scene, "python", named(scene, scene.pick(PYTHON)))


def any_code(scene: Scene) -> str:
    """A short program in one of several languages, without a bug that we know of."""
    return fenced(scene, "", named(scene, scene.pick((*PYTHON, *OTHER_CODE))))


def query(scene: Scene) -> str:
    """An SQL statement."""
    return fenced(scene, "sql", named(scene, scene.pick(QUERIES)))


def buggy_code(scene: Scene) -> str:
    """A short program with a bug."""
    return fenced(scene, "", named(scene, scene.pick(BUGGY)))


def records(scene: Scene) -> list[dict[str, str | int]]:
    """Rows about people and things."""
    rng = scene.rng
    return [
        {
            "name": scene.slot(f"name{idx}"),
            "city": scene.slot(f"city{idx}"),
            "item": scene.slot(f"thing{rng.randint(1, 4)}"),
            "amount": rng.randint(2, 95),
        }
        for idx in range(1, rng.randint(4, 7))
    ]


def data_lines(scene: Scene) -> str:
    """Records in one of several notations."""
    rows = records(scene)
    keys = list(rows[0])
    notation = scene.rng.randrange(4)
    if notation == 0:
        return "\n".join([",".join(keys), *(",".join(str(row[key]) for key in keys) for row in rows)])
    if notation == 1:
        return json.dumps(rows)
    if notation == 2:
        return "\n".join(f"- {row['name']} from {row['city']}: {row['amount']} {row['item']}" for row in rows)
    return " ".join(f"{row['name']} ({row['city']}) took {row['amount']} {row['item']}." for row in rows)


def things_in_disorder(scene: Scene) -> str:
    """A list of words from this topic and the scene."""
    words = [*scene.topic.things, scene.slot("animal"), scene.slot("object"), scene.slot("role"), scene.slot("city")]
    scene.rng.shuffle(words)
    return ", ".join(words[: scene.rng.randint(5, 9)])


def phrases(scene: Scene) -> str:
    """A few simple sentences to translate or say otherwise."""
    templates = (
        "Where is the {place}?",
        "I would like {few} tickets, please.",
        "My sister works as a(n) {role}.",
        "We are interested in {thing}.",
        "How much does this {object} cost?",
        "It is {hour} and I am {feeling}.",
        "The {animal} is bigger than I thought.",
        "See you on {day}!",
        "Do you have anything in {colour}?",
        "We have lived in {city} since {year}.",
        "Could you speak more slowly?",
        "I have never seen so many {thing2}.",
        "Turn left at the {place2} and then go straight ahead.",
        "In {month} it gets dark early.",
    )
    chosen = scene.rng.sample(templates, scene.rng.randint(1, 5))
    return scene.fill("\n".join(chosen) if scene.rng.random() < 0.5 else " ".join(chosen))


def flawed_text(scene: Scene) -> str:
    """Sentences with mistakes of grammar and spelling."""
    templates = (
        "Me and {name} was at the {place} yesterday and we seen alot of {thing}.",
        "Their are {small} {thing2} in the box but noone have counted them.",
        "She dont like {thing}, because she have never try it.",
        "Last {month} I go to {city} and buyed a(n) {colour} {object} for {price}.",
        "If i would of known about the {thing}, I would came more early.",
        "The {role} said us that its to late for change the plan.",
        "Everyone of the {thing2} need to be cleaned carefull before {day}.",
        "He has been working here since {small2} years and know all the {thing}.",
        "Between you and I, the {place} could of been more cleaner.",
        "I am looking forward to hear from you about the informations you promised to me.",
        "Your going to definately enjoy the {thing}, there realy good.",
    )
    return scene.fill(" ".join(scene.rng.sample(templates, scene.rng.randint(2, 5))))


def story_opening(scene: Scene) -> str:
    """The first sentences of a story that wants to go on."""
    templates = (
        "{name} had promised never to open the {object}. On {day}, at {hour}, {he} opened it.",
        'The {animal} spoke first. "You are standing on my {thing}," it said, and {name} stepped aside.',
        (
            "It was the last week of {month}, and the {place} was full of {thing}. Nobody noticed the {role} who "
            "had not paid."
        ),
        '"There are {small} rules in this house," said {name}, "and the first is about {thing}."',
        (
            "In the year {year}, when {city} still had no electric light, a(n) {role} named {name} {surname} lost "
            "a(n) {object}."
        ),
        "Nobody believed {name}. That was the trouble with {thing}: you had to see them with your own eyes.",
        "They met in the {place}, both soaked, both {feeling}, both looking for the same {object}.",
        "On the morning of the big day, every clock in {city} stopped except one, and it belonged to {name}.",
    )
    return scene.fill(scene.pick(templates))


def draft_text(scene: Scene) -> str:
    """Something that a person wrote and wants an opinion on."""
    templates = (
        "Dear team, as you all know {topic} is very very important. We did many things this year and they were good. "
        "{^thing} were good too. I hope next year will also be good. {name}",
        "My name is {name} and I would like the job as a(n) {role}. I am motivated, flexible and a team player. I once "
        "visited a(n) {place}. In {year} I sold {small} {thing}. Please call me after {hour}.",
        "{^thing} are like {thing2}: you never know. The {season} comes, the {season} goes, and I, {feeling}, count "
        "them all. O {city}! O {object}!",
        "In this essay I will talk about {topic}. First I will talk about {thing}. Then I will talk about {thing2}. "
        "Webster has a definition of it. In conclusion, I have talked about {topic}, and everyone should care.",
        "Tired of bad {thing}? Then come to {firm}! We have the best {thing} in {city} since {year}. Only {price}. "
        "Do not think about it. Just come. We are open, mostly.",
        "Hey everybody, so this is my first post about {topic}. I am no {role} lol. Yesterday my {thing} arrived "
        "and OMG. More tomorrow, maybe. What do you think? Leave a comment!",
    )
    return scene.fill(scene.pick(templates))


def claims(scene: Scene) -> str:
    """A few numbered sentences."""
    templates = (
        "I bought {small} {thing} and every single one was perfect.",
        "The {place} opens at {hour} on {day}s.",
        "After {small2} weeks of waiting, the {object} arrived broken.",
        "A(n) {role} explained {thing2} to us, it was fine.",
        "Never again, I am {feeling} and want my {price} back!",
        "What a lovely afternoon, even the children forgot their phones.",
        "{name} moved from {city} to {city2} in {year}.",
        "The instructions for the {thing3} were neither good nor bad.",
        "Could somebody tell me where to find {thing}?",
        "Please close the door of the {place2} when you leave.",
    )
    chosen = scene.rng.sample(templates, scene.rng.randint(3, 6))
    return scene.fill("\n".join(f"{idx}. {text}" for idx, text in enumerate(chosen, 1)))
