"""Tasks with numbers, programs, tables and other forms that leave little freedom."""

from __future__ import annotations

from tools.draft_training.task import Task

EXACT_TASKS = (
    Task(
        "word_problem",
        "number",
        (
            "{name} has {medium} {thing} and gives {small} of them to {name2}. How many are left?",
            "A(n) {place} sells {thing} at {price} each. What do {small} cost?",
            (
                "A(n) {role} packs {large} {thing} into boxes of {small}. How many boxes are full, and how many "
                "{thing} remain?"
            ),
            (
                "{name} counted {medium} {thing} on {day}, twice as many on {day2} and {small} fewer on {day3} than "
                "on {day2}. How many in all?"
            ),
            "It takes {few} people {small} hours to sort the {thing} at a(n) {place}. How long would one person need?",
            "In a group of {medium} visitors, every third one asks about {thing}. How many is that?",
            "{name} is {small} years older than {name2}. Together they are {medium}. How old is each?",
            (
                "The {place} opens at 9:00 and a new group enters every {small} minutes. When does group number "
                "{small2} enter?"
            ),
            "{small} {thing} cost {price}. What does one cost, roughly?",
        ),
    ),
    Task(
        "units",
        "number",
        (
            (
                "Convert {medium} [miles to kilometres|inches to centimetres|pounds to kilograms|gallons to litres] "
                "for my notes on {topic}."
            ),
            "A box of {thing} weighs {small} [pounds|ounces|kilograms]. What is that in grams?",
            "How many [minutes|seconds] are {small} hours and {minutes} minutes at the {place}?",
            "The {place} is {large} [metres|feet] long. Give that in [yards|kilometres|inches].",
            "{medium} degrees Fahrenheit in Celsius: too warm for {thing}?",
            "{medium} cups of {thing} in litres",
        ),
    ),
    Task(
        "percentages",
        "number",
        (
            "What is {percent} percent of {large}? It is about {thing}.",
            "The {place} raises its price from {price} by {percent} percent. What is the new price?",
            "{medium} of {large} visitors liked the {thing}. What percentage is that?",
            "{firm} gives {percent} percent off {thing}, then another {percent2} percent. What is the total discount?",
            "{percent}% of {large} {thing}",
            "I put {cost} aside for {topic} and get {small} percent a year. How much is it after {few} years?",
        ),
    ),
    Task(
        "dates",
        "number",
        (
            "If today is {day}, what day is it in {medium} days? I want to go to the {place}.",
            (
                "How many days are there between {month} {small} and {month2} {small2}? My course on {topic} runs "
                "that long."
            ),
            "The talk on {thing} starts at {hour} and takes {minutes} minutes. When is it over?",
            "{name} became a(n) {role} in {year} and stopped after {small} years. Which year was that?",
            "A train to the {place} leaves {city} at {hour} and arrives {few} hours and {minutes} minutes later. When?",
        ),
        held=True,
    ),
    Task(
        "sequence",
        "number",
        (
            (
                "A(n) {role} writes down {small}, {medium}, {large}, and so on for {thing}. Invent a rule for such "
                "a sequence and give five more."
            ),
            "Every day the number of {thing} doubles, beginning with {small}. How many are there on day {few}?",
            "Count from {medium} down to {small} in steps of {few}, as if counting {thing}.",
            "Write the first {count} multiples of {small}, each followed by the word {thing}.",
        ),
    ),
    Task(
        "logic",
        "number",
        (
            (
                "{name}, {name2} and {name3} each own one of these: {thing}, {thing2}, {thing3}. {name} has no "
                "{thing}. {name2} has {thing3}. Who owns what?"
            ),
            "All {thing} at the {place} are {colour}. This one is {colour2}. What follows?",
            "{name} arrived at the {place} before {name2}, but after {name3}. Who was first, and who last?",
            (
                "Either the {role} or the {role2} took the {object}. The {role} was in {city} all {day}. Who took "
                "it? Explain."
            ),
            "If no {animal} likes {thing} and {name} is a(n) {animal}, does {name} like {thing}?",
            "Design a logic puzzle with {few} people and {thing}. Add the solution.",
        ),
    ),
    Task(
        "python_function",
        "code",
        (
            (
                "Write a Python function that [counts|sorts|filters|groups] a list of {thing} by "
                "[name|size|price|first letter]."
            ),
            "Write a Python script that reads a CSV file of {thing} and prints the {count} largest.",
            "python function to average the weight of {thing}",
            "In Python, how do I remove duplicates from a list of {thing} but keep the order?",
            (
                "Write a Python class for {thing} with a name, a price and a method that gives a discount of "
                "{percent} percent."
            ),
            "Write a small text game in Python about {topic}.",
            "Use a dictionary in Python to map each {role} to a number of {thing}, then print the average.",
        ),
    ),
    Task(
        "javascript",
        "code",
        (
            "Write a JavaScript function that [finds|adds up|formats|shuffles] {thing} in an array of objects.",
            "How do I show a list of {thing} on a web page with plain JavaScript?",
            (
                "Write HTML and CSS for a simple page about {topic} with a heading, a list of {few} {thing} and "
                "a(n) {colour} button."
            ),
            "js function that picks random {thing}",
            "Write JavaScript that checks a form of a(n) {place}: name required, age over {small}.",
        ),
    ),
    Task(
        "sql",
        "code",
        (
            "Write an SQL query that counts {thing} per city.",
            (
                "I have a table of {thing} with id, name, price and city. Which query gives the {count} cheapest in "
                "{city}?"
            ),
            "Explain this query:\n\n{query}",
            "sql create table for {thing}",
            "Rewrite this statement so that it also shows the average price:\n{query}",
        ),
        held=True,
    ),
    Task(
        "fix_bug",
        "code",
        (
            "This code does not do what I want. Find the bug:\n\n{buggy}",
            "Why does this fail?\n{buggy}",
            "{buggy}\n\nfix it please",
            "My program about {thing} gives wrong results. What is wrong here, and how do I repair it?\n\n{buggy}",
            "Review this code and correct any mistakes.\n\n{buggy}",
        ),
    ),
    Task(
        "explain_code",
        "prose",
        (
            "What does this code do?\n\n{code}",
            "Explain the following program line by line:\n{code}",
            "{code}\n\nI am new to programming. Can you explain this?",
            "What is the output, and what could go wrong?\n\n{code}",
        ),
    ),
    Task(
        "change_code",
        "code",
        (
            "Add comments and a docstring to this code:\n\n{python}",
            (
                "Rewrite this [in JavaScript|with a list comprehension|so that it handles empty input|with clearer "
                "names]:\n\n{python}"
            ),
            "Write a test for this:\n{python}",
            "Can this be made [shorter|faster|safer]? {code}",
        ),
    ),
    Task(
        "algorithm",
        "prose",
        (
            "Describe in words an algorithm that finds the heaviest of {large} {thing}.",
            "How would you search {large} records of {thing} quickly? Write pseudocode.",
            "Write a shell command that counts the files in a folder called {thing}.",
            "What is a good data structure for {thing} that come and go in order of arrival?",
            "Write a regular expression that matches dates in notes about {topic}.",
        ),
    ),
    Task(
        "json_output",
        "code",
        (
            "Give me a JSON array of {few} {thing} with name, size and colour.",
            "Write a JSON object that describes a(n) {place}: name, city, opening hours, {thing}.",
            "Convert to JSON:\n{data}",
            "json example for {topic}",
            "Return only valid JSON: {count} quiz questions about {topic}, each with a question and an answer.",
        ),
    ),
    Task(
        "table",
        "code",
        (
            "Make a markdown table of {few} {thing} with a name, a use and a price.",
            "Compare {thing}, {thing2} and {thing3} in a table.",
            "Put this into a markdown table:\n{data}",
            "table of {thing} and costs",
            (
                "Write a table for a(n) {role} with one row per weekday and columns for morning and afternoon, "
                "filled with tasks."
            ),
        ),
    ),
    Task(
        "csv",
        "code",
        (
            "Write {count} lines of CSV about {thing} with the columns id, name, city, price.",
            "Turn this into CSV with a header line:\n{data}",
            "csv sample for {topic}",
            "Add a row for {name7} to this data and sort it by amount:\n{data}",
        ),
        held=True,
    ),
    Task(
        "data_question",
        "number",
        (
            "Here are some records:\n{data}\n\nWho has the largest amount, and what is the total?",
            "{data}\n\nHow many rows mention {city1}? What is the average amount?",
            "Sort this by amount, largest first:\n{data}",
            "Describe this data in {few} sentences:\n\n{data}",
        ),
    ),
    Task(
        "markdown_page",
        "code",
        (
            "Write a README in Markdown for a program that keeps lists of {thing}.",
            "Format this as Markdown with headings and bold names:\n\n{passage}",
            "Write an outline in Markdown for a handbook on {topic}, {few} chapters with {few2} sections each.",
            "Write a YAML file with settings for an app about {thing}: name, language, {few} options.",
        ),
    ),
)
