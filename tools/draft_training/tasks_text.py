"""Tasks on a text that comes with the request."""

from __future__ import annotations

from tools.draft_training.task import Task

TEXT_TASKS = (
    Task(
        "summarise",
        "text",
        (
            "[Summarize|Summarise] the [following|text below]:\n\n{passage}",
            "Sum this up in [one sentence|{few} sentences|{words} words]:\n{passage}",
            "{passage}\n\nTL;DR?",
            "{passage}\n\nWhat is the main point of this text?",
            'Give me the gist of this: "{passage}"',
        ),
    ),
    Task(
        "rewrite_formal",
        "text",
        (
            "Rewrite this in a [formal|professional] tone:\n\n{draft}",
            'Make this sound more professional: "{sentence}"',
            "Could you turn this into proper business English? {draft}",
            "{passage}\n\nRewrite the text above for an official report.",
        ),
    ),
    Task(
        "rewrite_simple",
        "text",
        (
            "Rewrite this so that {readers} understand it:\n\n{passage}",
            "Say it in simple words: {sentence}",
            "[Simplify|Make this easier to read]:\n{passage}",
            "{passage}\n\nRewrite it for a child of {age}.",
        ),
    ),
    Task(
        "shorten",
        "text",
        (
            "Shorten this text to half its length:\n\n{passage}",
            "Cut this down to {words} words. {passage}",
            "Too long! Make it shorter: {draft}",
            "Remove everything that is not needed:\n\n{passage}",
        ),
    ),
    Task(
        "third_person",
        "text",
        (
            "Rewrite this in the third person:\n\n{passage}",
            "Change the following from I to [he|she|they]: {draft}",
            "Put this text into the [past|present|future] tense:\n{passage}",
            "Rewrite as if {name5} were telling it:\n\n{passage}",
        ),
        held=True,
    ),
    Task(
        "rewrite_tone",
        "text",
        (
            "Rewrite this in a(n) {tone} tone:\n\n{draft}",
            "Make this {tone}: {sentence}",
            "{draft}\n\nSame content, but [friendlier|more polite|angrier|for a poster], please.",
            "Rewrite the following as [a fairy tale|a weather report|a sports commentary|a telegram]:\n\n{passage}",
        ),
    ),
    Task(
        "rephrase",
        "list",
        (
            "Say this in {few} other ways: {sentence}",
            'Paraphrase: "{sentence}"',
            "Rephrase the sentence without the letter z and without numbers: {sentence}",
            "Turn this statement into a question: {sentence}",
        ),
    ),
    Task(
        "extract_names",
        "text",
        (
            "List all [people|persons] and places in this text:\n\n{passage}",
            "Which names occur here? {passage}",
            "{passage}\n\nExtract every name[ and say who the person is|].",
            "Find the [companies|cities|people] mentioned below.\n\n{passage}",
        ),
    ),
    Task(
        "extract_numbers",
        "text",
        (
            "Extract all numbers from this text and say what each one means:\n\n{passage}",
            "{passage}\n\nWhat dates, times and prices are mentioned?",
            "How many numbers are in the following? List them. {passage}",
            "Add up the amounts in these lines:\n{data}",
        ),
    ),
    Task(
        "extract_json",
        "code",
        (
            "Extract the people from this text as JSON with the keys name, job and city:\n\n{passage}",
            'Return {"names": [], "dates": [], "topic": ""} filled from this text:\n\n{passage}',
            "{passage}\n\nGive me the facts above as a JSON object.",
        ),
    ),
    Task(
        "classify",
        "text",
        (
            "Is the tone of this text positive, negative or neutral?\n\n{passage}",
            "Label each line as praise, complaint, question or fact:\n{claims}",
            "What kind of text is this: news, diary, letter, advert or story? {passage}",
            "Classify the sentiment: {sentence}",
            "Sort these words into groups and name the groups: {jumble}",
            "spam or not? {sentence}",
        ),
    ),
    Task(
        "passage_qa",
        "text",
        (
            "{passage}\n\nQuestion: [Who|Which person] is mentioned first, and what do we learn about that person?",
            "Read the text and answer: what is it about, and how does it end?\n\n{passage}",
            "{passage}\n\nAccording to the text, what went wrong?",
            "Answer only from this text. {passage}\n\nWhat does it say about {thing}?",
            "Context: {passage}\n\nQuestion: When and where does this take place?\nAnswer:",
            "{passage}\n\nQ: Why might the writer feel that way?",
        ),
    ),
    Task(
        "title_for_text",
        "short",
        (
            "Find a title for this text:\n\n{passage}",
            "{passage}\n\nSuggest {few} headlines for the text above.",
            "Give this a(n) {tone} title: {draft}",
            "What would be a good subject line for this message?\n\n{passage}",
        ),
    ),
    Task(
        "translate",
        "text",
        (
            "Translate into {language}:\n{phrases}",
            'How do you say "{phrases}" in {language}?',
            "Translate these words to {language}: {jumble}",
            "{language} translation please: {phrases}",
            "What is the {language} word for {thing}? Use it in a sentence and translate that.",
        ),
    ),
    Task(
        "correct_grammar",
        "text",
        (
            "Correct the mistakes:\n\n{flawed}",
            "Fix the grammar and spelling[, and explain each change|]: {flawed}",
            "proofread this pls: {flawed}",
            "{flawed}\n\nIs this correct English? [Why not|If not, mend it].",
            "I am learning English. Please check my text about {topic}: {flawed}",
        ),
    ),
    Task(
        "bullet_points",
        "none",
        (
            "Turn this text into bullet points:\n\n{passage}",
            "{passage}\n\nKey points as a list, please.",
            "Make {count} bullet points out of this: {passage}",
        ),
    ),
    Task(
        "feedback",
        "prose",
        (
            "Give me feedback on this draft:\n\n{draft}",
            "What do you think of my text? Be honest. {draft}",
            "I wrote this for the {place}. How can I make it better?\n\n{draft}",
            "Grade this like a strict {role} would:\n\n{draft}",
        ),
    ),
    Task(
        "continue_text",
        "none",
        (
            "{passage}\n\nContinue the text with one more paragraph.",
            "Write what comes next:\n\n{passage}",
            "Add {few} sentences in the same style:\n\n{passage}",
        ),
    ),
    Task(
        "reply",
        "letter",
        (
            "I got this message. Write a [polite|short|friendly|firm] reply:\n\n{passage}",
            "How should I answer this? {draft}",
            "{passage}\n\nReply as a(n) {role} and say no without being rude.",
            "Answer every point in this message:\n\n{claims}",
        ),
        held=True,
    ),
    Task(
        "true_or_false",
        "text",
        (
            "{passage}\n\nTrue or false according to the text: {sentence}",
            "Here is a text. Write {few} true and {few2} false statements about it.\n\n{passage}",
            "Check whether these lines contradict each other:\n{claims}",
        ),
        held=True,
    ),
    Task(
        "expand",
        "prose",
        (
            "Expand this into a full paragraph: {sentence}",
            "Make this longer and add details:\n\n{draft}",
            "Turn these keywords into a short text: {jumble}",
            "Write the e-mail behind this note: {sentence}",
        ),
        held=True,
    ),
    Task(
        "sort_words",
        "text",
        (
            "Sort alphabetically: {jumble}",
            "Put these in order of [length|size|price]: {jumble}",
            "Remove the words that have nothing to do with {topic}: {jumble}",
            "Which one does not belong? {jumble}",
            "Write these in upper case, one per line: {jumble}",
        ),
    ),
    Task(
        "grammar_parts",
        "text",
        (
            "List the verbs in this sentence: {sentence}",
            "Find all adjectives: {passage}",
            "How many [sentences|commas|questions] are there in this text?\n\n{passage}",
            "Explain the tense used here: {sentence}",
        ),
    ),
    Task(
        "compare_texts",
        "prose",
        (
            "Text A: {passage}\n\nText B: {draft}\n\nWhich of the two is better written, and why?",
            "Which sentence is clearer?\n1) {sentence}\n2) {sentence2}",
            "What do these two have in common?\n\n{draft}\n\n---\n\n{sentence}",
        ),
    ),
    Task(
        "questions_on_text",
        "list",
        (
            "Write {count} questions that test whether somebody understood this text:\n\n{passage}",
            "What would you ask the author of this? {passage}",
            "{passage}\n\nMake a small quiz from the text, answers at the end.",
        ),
    ),
)
