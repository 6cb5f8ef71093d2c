"""Tasks that ask for knowledge, advice and ideas."""

from __future__ import annotations

from tools.draft_training.task import Task

KNOWLEDGE_TASKS = (
    Task(
        "explain",
        "prose",
        (
            "Explain {aspect}.",
            "[Can|Could] you explain {aspect} [to me|in simple terms|in plain English]?",
            "I [never understood|want to understand] {aspect}. Where do I start?",
            "Tell me [something|more] about {aspect}.",
            "{topic} explained briefly",
            "What should I know about {aspect}?",
            "Give me an overview of {aspect}.",
        ),
    ),
    Task(
        "compare",
        "prose",
        (
            "Compare {thing} and {thing2}.",
            "What is the difference between {thing} and {thing2} when it comes to {topic}?",
            "{thing} vs {thing2}: which matter more [for|to] {readers}?",
            "How do {thing} differ from {thing2}, and what do they have in common?",
            "difference between {thing} and {thing2}",
            "[Compare|Contrast] the view of a(n) {role} and a(n) {role2} on {thing}.",
        ),
    ),
    Task(
        "list_items",
        "list",
        (
            "List {count} facts about {aspect}.",
            "Give me {count} examples of {thing}[ and say where one finds them|].",
            "Name {count} things that people connect with {topic}.",
            "{count} reasons to care about {thing}",
            "What are the {count} most important [facts|points] about {aspect}?",
            "I need a list of {count} [interesting|surprising|little-known] facts about {topic}.",
        ),
    ),
    Task(
        "steps",
        "list",
        (
            "How do I {goal}?",
            "What are the steps to {goal}?",
            "Give me step-by-step instructions: I want to {goal}.",
            "I need to {goal} [by|before] {day}. [What do I do first|How would you go about it]?",
            "how to {goal}",
            "Write a [short|detailed] guide on how to {goal}.",
        ),
    ),
    Task(
        "recipe",
        "list",
        (
            (
                "I have {small} eggs, rice, onions and half a cabbage. Suggest a dish for an evening about {topic}, "
                "with steps."
            ),
            "Invent a [cake|salad|soup|sandwich|drink] whose name and look remind people of {thing}. Give the recipe.",
            "Write a simple recipe for a snack that I can serve to {small} guests at a party with the theme {topic}.",
            "recipe for {thing} themed [cookies|cupcakes|snacks]",
            (
                "What could a(n) {role} cook after a long day at the {place} in under {medium} minutes? List the "
                "ingredients first."
            ),
        ),
    ),
    Task(
        "pros_and_cons",
        "list",
        (
            "What are the pros and cons of {thing}?",
            "{topic} pros and cons",
            "List advantages and disadvantages of [relying on|spending money on|learning about] {thing}.",
            "Should a(n) {role} invest in {thing}? Give me [both sides|arguments for and against].",
            "I am thinking about working as a(n) {role}. Pros and cons?",
        ),
        held=True,
    ),
    Task(
        "define",
        "prose",
        (
            "Define {thing}.",
            "What does the term {thing} mean in the context of {topic}?",
            "what are {thing}",
            "Give a one-sentence definition of {thing}, then [an example|a longer one].",
            "In {topic}, what do we mean by {thing}?",
        ),
    ),
    Task(
        "trivia",
        "prose",
        (
            "Who was the first person known for {topic}?",
            "What is the most [surprising|famous|expensive] fact about {thing}?",
            "Which country is best known for {topic}, and why?",
            "Tell me a fun fact about {thing}.",
            "fun fact about {topic}",
            "When did {thing} first become [common|popular|known]?",
            "What does a(n) {role} do all day?",
        ),
    ),
    Task(
        "why",
        "prose",
        (
            "Why do people [care about|argue about|spend money on|worry about] {thing}?",
            "Why are {thing} [important|so often misunderstood|hard to explain]?",
            "why {thing} and not {thing2}?",
            "What is the reason that {thing} play such a role in {topic}?",
            "Why would anyone become a(n) {role}?",
        ),
    ),
    Task(
        "for_children",
        "prose",
        (
            "How would you explain {thing} to a child of {age}?",
            "My {age}-year-old wants to know what {thing} are. What do I say?",
            "Tell a class of {age}-year-olds why {topic} can be fun.",
            "What should children think about {thing}? Give an honest, kind answer for a(n) {age}-year-old.",
            "explain {thing} like im {age}",
        ),
    ),
    Task(
        "timeline",
        "list",
        (
            "Make a timeline of the [main|most important] events in the history of {topic}.",
            "What happened in {topic} [before|after|around] {year}?",
            "How did {thing} change between {year} and today?",
            "timeline of {topic}",
            "Sketch the history of {thing} in {count} dates.",
        ),
    ),
    Task(
        "myths",
        "prose",
        (
            "Is it true that {thing} [are a modern invention|are dangerous|only exist in {country}|bring luck]?",
            "Name {few} myths about {topic} and correct them.",
            "My {role} says that {thing} and {thing2} are the same. Is that right?",
            "I read that {percent} percent of people misunderstand {thing}. Can that be true?",
            "myths about {topic}",
        ),
    ),
    Task(
        "checklist",
        "list",
        (
            "Make a checklist for [someone|a person|a group] who wants to {goal}.",
            "What do I need to bring to a(n) {place} for a day about {topic}?",
            "checklist for {thing}",
            "Write a checklist that a(n) {role} can use every {day}. It should cover {thing} and {thing2}.",
            "Packing list: {few} days in {city} in {month}, with a visit to a(n) {place}.",
        ),
    ),
    Task(
        "advice",
        "prose",
        (
            "Any [tips|advice] for somebody who wants to {goal}?",
            "I feel {feeling} about {thing}. What would you advise?",
            "[My friend|My sister|My colleague] is a(n) {role} and feels {feeling} lately. How can I help?",
            "I have {price} and one free {day}. What is the best way to start with {topic}?",
            "tips for {topic}",
            "What would a(n) {role} tell {readers} about {thing}?",
        ),
    ),
    Task(
        "decide_step_by_step",
        "prose",
        (
            "I cannot decide between {thing} and {thing2}. Think through it step by step, then recommend one.",
            "Should I become a(n) {role} or a(n) {role2}? Reason step by step.",
            "Think step by step: what would happen to a(n) {place} if nobody cared about {thing} any more?",
            "Reason aloud: which of {thing}, {thing2} and {thing3} would you drop first, if money were tight?",
            "I can go to the {place} on {day} or to the {place2} on {day2}, but {day} it may rain and the {place2} "
            "costs {price}. Work out what is best and show every step.",
        ),
    ),
    Task(
        "troubleshoot",
        "list",
        (
            "I tried to {goal}, but it did not work. What may have gone wrong?",
            "What mistakes do beginners make with {thing}?",
            "common mistakes in {topic}",
            "My {thing} do not look right since {day}. What could be the cause?",
            "Something is wrong with the {thing} at our {place}. How do I find the problem?",
        ),
        held=True,
    ),
    Task(
        "interview_questions",
        "list",
        (
            "Write {count} interview questions for a(n) {role}.",
            "I am going to interview a(n) {role} about {thing} for the school paper. What should I ask?",
            "interview questions for {role}",
            "Suggest {few} hard and {few2} easy questions to ask an applicant at a(n) {place}, with good answers.",
        ),
    ),
    Task(
        "quiz",
        "list",
        (
            "Make a quiz with {count} questions about {topic}. Put the answers at the end.",
            "Write {few} multiple choice questions on {thing} for {readers}.",
            "quiz me on {topic}",
            "Ask me one question about {aspect}, then give the answer below.",
            "Give me {count} statements about {thing}; half should be false. Mark which.",
        ),
    ),
    Task(
        "schedule",
        "list",
        (
            "Plan my {day}: work at the {place} until {hour2}, one hour for {thing}, shopping, and dinner with {name}.",
            "Make a {count}-day plan for someone who wants to {goal}.",
            "I have {few} weeks to learn about {topic}, {few2} evenings a week. Write a study plan.",
            (
                "Put these into a timetable that starts at {hour}: a talk on {thing}, a walk to the {place}, lunch, "
                "questions, cleaning up."
            ),
            "weekly plan for {topic}",
        ),
    ),
    Task(
        "budget",
        "list",
        (
            "I can spend {large} dollars on {topic} this year. How should I divide it?",
            "Draft a budget for a small event on {thing} at a(n) {place} with {medium} guests.",
            "What does it cost to {goal}? Give a rough breakdown.",
            "cheap ways into {topic}",
        ),
    ),
    Task(
        "analogy",
        "prose",
        (
            "Find an analogy for {thing}.",
            "What are {thing} like? Compare them to something from {season} or from a kitchen.",
            "Explain {topic} with a comparison to [football|cooking|traffic|a family dinner|a school].",
            "analogy for {thing} please",
        ),
        held=True,
    ),
    Task(
        "what_if",
        "prose",
        (
            "What if there were no {thing}?",
            "Imagine that {thing} were free for everybody. What would change?",
            "What would happen if every {role} in {country} stopped working for a week?",
            "Suppose {topic} had been [forbidden|forgotten|discovered] in {year}. How would the world look?",
            "what if {thing} disappeared tomorrow",
        ),
        held=True,
    ),
    Task(
        "glossary",
        "list",
        (
            "Write a glossary of {count} words from {topic}.",
            "Which {count} technical terms should I know before I talk to a(n) {role}? Explain each in one line.",
            "key terms in {topic}",
            "Define these for {readers}: {thing}, {thing2}, {thing3}.",
        ),
    ),
    Task(
        "debate",
        "prose",
        (
            "Argue that {thing} are [overrated|underrated|worth every penny].",
            "Write the strongest argument against [spending public money on|teaching children about] {topic}.",
            "Give {few} arguments why every {place} should offer courses on {thing}, and one objection.",
            "Make the case that a(n) {role} deserves better pay than a(n) {role2}.",
            "Convince me that {thing} matter.",
        ),
    ),
    Task(
        "brainstorm_names",
        "list",
        (
            "Suggest {count} names for a(n) [podcast|club|shop|blog|newsletter|app|cafe] about {topic}.",
            "I need a name for a(n) {colour} {animal} that lives at a(n) {place}.",
            "name ideas for a {topic} club",
            "What could we call our team? We are {small} people who love {thing} and {thing2}.",
            "Brainstorm {count} [short|funny|serious] titles for a book about {aspect}.",
        ),
    ),
    Task(
        "brainstorm_ideas",
        "list",
        (
            "Give me {count} ideas for [a school project|a gift|a party game|a short video|a weekend] about {topic}.",
            "How could a(n) {place} attract more {readers}? Brainstorm {count} ideas.",
            "{count} unusual uses for {thing}",
            "What can I do with {small} old {thing} and a(n) {object}?",
            "I want to surprise {person}, who is crazy about {topic}. Ideas?",
        ),
    ),
    Task(
        "cause_and_effect",
        "prose",
        (
            "What [causes|leads to] problems with {thing}?",
            "How does {season} affect {thing}?",
            "Describe what follows for a(n) {role} when {thing} become rare.",
            "What effect did the year {year} have on {topic}?",
            "how do {thing} influence {thing2}",
        ),
    ),
    Task(
        "rank",
        "list",
        (
            "Rank {thing}, {thing2}, {thing3} and {thing4} by [cost|importance|difficulty|fun].",
            "Top {count} {place}s for fans of {topic}?",
            "Which of these would a(n) {role} miss most: {thing}, {thing2} or {thing3}? Rank them with reasons.",
            "top {count} things about {topic}",
        ),
    ),
    Task(
        "follow_up",
        "prose",
        (
            "Earlier you said that {thing} are more important than {thing2}. [Are you sure|Why]?",
            'You told me: "{sentence}" [What did you mean by that|Can you say that in other words|Is that still so]?',
            "Thanks, that helped. Now [do the same for|what about] {thing2}?",
            (
                "In your last answer you listed {count} points about {topic}. Which one would a(n) {role} "
                "[doubt|like best]?"
            ),
            "I asked you about {thing} before, and your answer was too long. Try again in {few} sentences.",
            "User: What are {thing}?\nAssistant: They are a part of {topic} that a(n) {role} deals with.\n"
            "User: [And {thing2}?|Give an example.|I still do not get it.]",
            "ok and what about {thing}?",
            "No, I meant {thing}, not {thing2}. Please answer my question about {topic} again.",
        ),
    ),
    Task(
        "resources",
        "list",
        (
            "Which kinds of books, films and places help somebody who wants to learn about {topic}?",
            "Where can I [find|ask for] help with {thing} in a small town?",
            "How do I find a good {role} near me?",
            "best way to learn {topic}",
            "What should I search for online if I want to {goal}?",
        ),
    ),
    Task(
        "short_answer",
        "none",
        (
            "Yes or no: are {thing} part of {topic}?",
            "In one word: what do {thing} remind you of?",
            "Complete the sentence: A good {role} always",
            "Give one synonym for {feeling} and use it in a sentence about {thing}.",
            "what are {thing}? one sentence",
            "Which is older, {thing} or {thing2}?",
        ),
    ),
)
