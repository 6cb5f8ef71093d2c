"""Prompts written by hand, unlike the generated ones: a last check of what was trained, never trained or tuned on."""

from __future__ import annotations

HAND_WRITTEN: tuple[str, ...] = (
    (
        "my sourdough came out flat again, it was bubbly at 7am but by the time i shaped it (around 2) it had "
        "collapsed. kitchen is about 26C. too long? too warm? both??"
    ),
    "what's the thing called when you see a word too many times and it stops looking like a word",
    "Can octopuses actually recognise individual humans or is that just something the internet made up?",
    "Need a birthday message for a coworker I barely know. She's turning 40, likes cats. Not cringe.",
    """why does this print None

def double(x):
    x * 2

print(double(4))""",
    (
        "My landlord wants to keep $350 of my $900 deposit for 'repainting'. We lived there six years. Is that normal "
        "wear and tear? I'm in Ohio if that matters. Also how would I word an email that's firm but doesn't burn "
        "bridges."
    ),
    "14 nights at 89 euros plus 3.50 tourist tax per night per person, two of us. total?",
    (
        'Someone told me "correlation is not causation" in a meeting today and everyone nodded. Give me an example I '
        "can use next time that isn't ice cream and drownings."
    ),
    "ELI5 why airplanes leave white lines sometimes and other times nothing at all",
    """groceries:
- milk
- 2 onions
- the good bread
- dishwasher tabs
- lemons
- cat litter
- spinach
group these by supermarket aisle please""",
    "tell me a bedtime story, my son wants a digger in it and also a ghost but NOT scary, he's 4",
    "I keep waking up at 3:30. Not stressed, no caffeine after noon, phone's in another room. Ideas?",
    "Difference between a fjord, an inlet and a bay - one line each.",
    "git says 'detached HEAD'. did i lose everything",
    (
        "In Hamlet, why doesn't he just kill Claudius when he finds him praying? My teacher says there's more than "
        "one answer."
    ),
    (
        'Make this less passive-aggressive: "As I already mentioned in my previous two emails, the invoice was '
        'attached both times."'
    ),
    "Pros and cons of getting a greyhound when you live on the fourth floor without a lift. Be honest.",
    "what would napoleon order at a drive-through",
    """Can this be done without the nested loop? There are ~200k users.

for u in users:
    for o in orders:
        if o.user_id == u.id:
            u.total += o.amount""",
    "How many litres in a bathtub that's roughly 150 x 60 cm and filled to 35 cm? ballpark is fine",
    (
        "I'm 52 and just got my first guitar. Which three chords should I learn this week, and how long before my "
        "fingers stop hurting?"
    ),
    (
        "Write four lines that rhyme for the back of a retirement cake. Her name is Dolores, she drove the school bus "
        "for 31 years."
    ),
    "Is it 'fewer calories' or 'less calories'? And why do menus get it wrong all the time?",
    (
        "Translate to German, informal: sorry I missed your call, I was on a train and the reception was awful. "
        "Tomorrow evening works."
    ),
    (
        "ok so three friends split a cabin, Jo paid 240 for the cabin, Min paid 66 for food, and Al paid nothing but "
        "drove. gas was 45 which he paid. who owes who what"
    ),
    "Explain inflation using only things that happen in a school cafeteria.",
    "What do I say to a friend whose dog died yesterday? She lives abroad so it has to be a text.",
    "regex for UK postcodes? doesn't have to be perfect, just catch obvious typos",
    "I have rice, one can of chickpeas, half a jar of pesto, a lime and some sad celery. Dinner for two, no oven.",
    "Describe the smell of rain to an alien whose species doesn't have noses.",
    (
        "Turn into a table with columns Name / Shift / Phone. Bea does mornings, 555-0142. Karl is on nights and his "
        "number is 555-0199. Ruth, afternoons, no phone yet."
    ),
    "I said 'you too' when the waiter told me to enjoy my meal. Rate how bad on a scale from 1 to 10 and comfort me",
    "Which planet has the shortest day and how long would my 8 hours of sleep be there, as a fraction?",
    "help me name a boat. it's small, green, leaks a bit. my last one was called Plan B",
    (
        "Our book club is split about whether the narrator in The Remains of the Day is lying to himself or to us. "
        "Could you give each side its best paragraph?"
    ),
    (
        "Summary in two sentences pls: The bridge on Route 9 will be closed from the 4th to the 19th while crews "
        "replace the expansion joints. Buses 12 and 14 are diverted via Orchard; expect ten extra minutes. Cyclists "
        "may use the footbridge but must dismount. Night work is limited to the first weekend."
    ),
    "Whats a polite way to tell my mother in law we're not coming for Christmas this year (we were there the last 5)",
    "You're a grumpy lighthouse keeper. I just knocked, it's storming, and I'm selling vacuum cleaners.",
    (
        "SELECT name FROM staff WHERE salary > AVG(salary) gives me an error about aggregate functions, what's the "
        "right way"
    ),
    (
        "Things a total beginner should never do in a chemistry lab? Maybe seven. I have to put them on a poster by "
        "tonight and the poster is A3 so keep 'em short."
    ),
)
