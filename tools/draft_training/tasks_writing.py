"""Tasks that ask for something to be written: stories, letters, scripts and short forms."""

from __future__ import annotations

from tools.draft_training.task import Task

WRITING_TASKS = (
    Task(
        "story",
        "story",
        (
            "Write a [short story|{genre}] about a(n) {role} and a(n) {animal}.",
            "Tell me a(n) {tone} story that takes place in a(n) {place}.",
            "Write a(n) {genre} in which {thing} [save the day|go missing|start to talk].",
            "short story about {thing}",
            "Make up a story for {readers}: {name} finds a(n) {object} and learns something about {topic}.",
            "Once upon a time there was a(n) {role} who feared {thing}. Tell the rest.",
        ),
    ),
    Task(
        "continue_story",
        "story",
        (
            "Continue this story:\n\n{opening}",
            "How does it go on? {opening}",
            "{opening}\n\n[Write the next paragraph.|Please finish the story.|go on]",
            "Write two different endings for a story that begins like this:\n{opening}",
        ),
    ),
    Task(
        "poem",
        "story",
        (
            "Write a poem about {thing}.",
            "Write a(n) {tone} poem about {topic} [that rhymes|without rhymes|with {few} stanzas].",
            "poem about {thing}",
            "I need {small} lines of verse for a card to {person}, who loves {topic}.",
            "Can you put the work of a(n) {role} into a limerick?",
        ),
    ),
    Task(
        "haiku",
        "none",
        (
            "Write a haiku about {thing}.",
            "haiku about {topic} please",
            "[Three|Two] haiku: one about {thing}, one about {season} in {city}, in that order.",
            "Turn this into a haiku: {sentence}",
        ),
        held=True,
    ),
    Task(
        "song",
        "story",
        (
            "Write song lyrics about {thing}.",
            "Write a chorus and two verses about life as a(n) {role}.",
            "Compose a(n) {tone} song that {readers} can sing at the {place}.",
            "song about {topic}",
        ),
        held=True,
    ),
    Task(
        "email",
        "letter",
        (
            "Write an e-mail to {person} about {thing}.",
            "[Write|Draft] a [polite|short|firm|friendly] email asking {person} to help me {goal}.",
            "email to {person}: {topic} class is cancelled",
            "Write an email that invites {person} to the {place} on {day} at {hour}.",
            "I need to tell {person} that {thing} will be late by {few} weeks. Draft an email. Sign as {name}.",
        ),
    ),
    Task(
        "letter",
        "letter",
        (
            "Write a letter from a(n) {role} to {person}.",
            "Write a [formal letter|complaint] to {firm} because the {thing} I bought for {price} arrived broken.",
            "Help me write a letter to my grandmother about my first day at the {place}.",
            "thank you letter for {thing}",
            "Draft a letter to the newspaper of {city} in which a(n) {role} asks for more attention to {topic}.",
        ),
    ),
    Task(
        "advert",
        "story",
        (
            "Write an advert for {thing}.",
            "Write a [radio spot|flyer|classified ad] for a(n) {place} that offers classes on {topic}.",
            "ad for used {thing}",
            "We sell {thing} from {price}. Write an advertisement for {readers}.",
            "Job advert: {firm} in {city} looks for a(n) {role}. Start in {month}.",
        ),
        held=True,
    ),
    Task(
        "speech",
        "letter",
        (
            "Write a [short speech|two-minute speech|toast] on {topic}.",
            "I have to give a speech at the {place} about {thing}. Write the opening.",
            "{name} retires after {medium} years as a(n) {role}. Write a(n) {tone} farewell speech.",
            "wedding toast with {thing} in it",
        ),
    ),
    Task(
        "dialogue",
        "story",
        (
            "Write a dialogue between a(n) {role} and a(n) {role2} about {thing}.",
            "Write a conversation in which {name} tries to sell {name2} {thing}.",
            "Dialogue: {name} wants to {goal}, {name2} is against it. {small} lines.",
            "Script a phone call to a(n) {place}: the caller is {feeling} because of {thing}.",
        ),
    ),
    Task(
        "role_play",
        "none",
        (
            "You are a(n) {role}. I come to the {place} with a question about {thing}. Greet me and ask what I need.",
            "Pretend to be a(n) {tone} {animal} who knows everything about {topic}. Introduce yourself.",
            "Let's role-play: you are a customer of {firm} who is {feeling} about {thing}, I am the {role}. You start.",
            "Act as my {role}. I want to {goal}. Ask me {few} questions first.",
            "act like a(n) {role} and tell me about your day",
            "Speak like a pirate and explain {thing}.",
        ),
    ),
    Task(
        "product_description",
        "story",
        (
            "Write a product description for a set of {thing}, price {price}, colour {colour}.",
            "Describe a(n) {colour} {object} so that fans of {topic} want to buy it.",
            "Write the text on the box of a game about {topic}.",
            "shop text for {thing}",
        ),
    ),
    Task(
        "review",
        "story",
        (
            "Write a [good|bad|balanced] review of a book about {topic}.",
            "Write a(n) {tone} review of a visit to a(n) {place} in {city}.",
            "Review a course on {thing} from the view of a(n) {role}.",
            "one star review of {thing}",
        ),
    ),
    Task(
        "diary",
        "story",
        (
            "Write a diary entry of a(n) {role} on a bad {day}.",
            "Write a page from the diary of somebody who sees {thing} for the first time.",
            "diary of a(n) {role}",
            "Log book, {month} {small}, {year}: write what a traveller to {country} notes about {topic}.",
        ),
    ),
    Task(
        "social_post",
        "short",
        (
            "Write a post for social media about {thing}.",
            "Write {few} tweets that make {readers} curious about {topic}.",
            "caption for a photo of {thing}",
            "Announce on our page that the {place} opens at {hour} on {day}. Keep it {tone}.",
        ),
    ),
    Task(
        "headlines",
        "list",
        (
            "Write {count} headlines for an article on {aspect}.",
            "Give me a(n) {tone} title for a talk about {thing}.",
            "headline about {thing} in {city}",
            "How would a newspaper from {year} announce news about {topic}? Only the headlines, {few} of them.",
        ),
    ),
    Task(
        "slogan",
        "list",
        (
            "Write {count} slogans for a(n) {place}.",
            "I need a(n) {tone} slogan for a campaign about {thing}.",
            "slogan for {thing}",
            "A motto for {firm}, who sell {thing} to {readers}?",
        ),
    ),
    Task(
        "riddle",
        "none",
        (
            "Make up a riddle whose answer is {thing}.",
            "Give me {few} riddles about {topic}, with answers.",
            "riddle about {thing}",
            "What riddle would a(n) {animal} ask a(n) {role}?",
        ),
        held=True,
    ),
    Task(
        "joke",
        "none",
        (
            "Tell me a joke about {thing}.",
            "Write {few} [clean jokes|puns] about {topic}.",
            "a(n) {role} walks into a bar",
            "Know a joke that a(n) {role} would laugh at? It should involve {thing}.",
            "joke about {thing} please",
        ),
    ),
    Task(
        "invitation",
        "letter",
        (
            "Write an invitation to a party about {topic} at the {place}, {day} at {hour}.",
            "Invite {readers} to a free talk on {thing}. Mention the address: {small} {street}.",
            "invitation text, {topic} evening",
            "Write a notice: the {place} is closed on {day} because of {thing}.",
        ),
    ),
    Task(
        "cover_letter",
        "letter",
        (
            "Write a cover letter for a job as a(n) {role} at {firm}.",
            (
                "I have worked as a(n) {role} for {small} years and know a lot about {thing}. Write a short "
                "application to a(n) {place}."
            ),
            "cover letter for {role}",
            "Help me answer the question: why do you want to be a(n) {role}?",
        ),
    ),
    Task(
        "character",
        "story",
        (
            "Describe a character: a {feeling} {role} called {name} {surname} who collects {thing}.",
            "Invent a villain who hates {topic}. Give name, looks, aim and weakness.",
            "Create {few} characters for a play set in a(n) {place}.",
            "backstory for a(n) {role} named {name}",
        ),
    ),
    Task(
        "description",
        "story",
        (
            (
                "Describe a(n) {place} in {season} [with all five senses|through the eyes of a child|in the present "
                "tense]."
            ),
            "Describe {thing} to somebody who has never seen them.",
            "Paint a picture with words: {thing} at {hour} in the morning.",
            "describe the perfect {place}",
        ),
    ),
    Task(
        "essay",
        "prose",
        (
            "Write an essay on {aspect}.",
            "Write [an introduction|a conclusion|an outline|the first paragraph] for an essay about {topic}.",
            "essay about {thing}",
            "Write {few} paragraphs on why {thing} [deserve|do not deserve] more attention.",
        ),
    ),
    Task(
        "newsletter",
        "story",
        (
            "Write the {month} newsletter of a(n) {place}. Topics: {thing}, {thing2}, a new {role}.",
            "Write a short news report: a(n) {animal} was found among {thing} in {city} on {day}.",
            "Press release: {firm} opens a(n) {place} in {city}.",
            "news item about {topic}",
        ),
    ),
    Task(
        "use_words",
        "none",
        (
            "Write a sentence that contains the words {animal}, {object} and {thing}.",
            "Use each of these in a sentence: {thing}, {feeling}, {place}.",
            (
                "Write {few} sentences about {topic} in which every sentence starts with [the same letter|a "
                "different season|a question]."
            ),
            "Write an acrostic for the word {animal} about {topic}.",
        ),
    ),
)
