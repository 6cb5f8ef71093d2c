"""Texts with one person in or behind them: diaries, complaints, mails, stories and the like."""

from __future__ import annotations

from tools.draft_training.genre import Genre

PRIVATE_GENRES = (
    # Diary.
    Genre(
        (
            "{day}. I woke up at {hour}, far too early, and could not stop thinking about {topic}.",
            "Dear diary, today was [strange|one of those days|a mess from start to finish].",
            "It is late and my hands still smell of the {place}, but I want to write this down before I forget.",
        ),
        (
            "On the way I met {name}, who used to be a(n) {role} and now mostly complains about {thing}.",
            (
                "At lunch someone asked what I think of {thing2}, and I gave a(n) [clumsy|long|honest] answer that "
                "I already regret."
            ),
            "I wanted to buy {thing3}, but the shop on {street} had only {small} left and all of them were {colour}.",
            "{name2} phoned from {city} to say that the visit is off; I was {feeling} and pretended not to be.",
            "Then the rain came, so I hid in the {place2} and read an old magazine about {thing4}.",
            "Funny how a single afternoon can change your mind about something you have believed since school.",
            "My notebook got wet, which means {small2} pages of notes on {thing} are now a blue cloud.",
            "An old man at the bus stop told me he had spent {price} on a(n) {object} and would do it again.",
            "For a moment everything was quiet and I felt {feeling2} for no reason at all.",
        ),
        (
            "Tomorrow I will try again.",
            "I should sleep now, but I doubt that I can.",
            "Note to self: call {name2}, return the {object2}, stop worrying.",
        ),
    ),
    # Complaint.
    Genre(
        (
            (
                "Dear {firm}, on {day} I ordered your guide to {topic} together with a(n) {colour} bag, order "
                "number {large}{small}."
            ),
            (
                "To whom it may concern: I am writing about the course on {topic} which I attended at your {place} "
                "in {month}."
            ),
            "Hello, I have been your customer since {recent}, and [until now|so far] I had nothing to complain about.",
        ),
        (
            "The parcel arrived {small2} days late, and the box looked as if somebody had danced on it.",
            "Your website promised a whole chapter on {thing}, yet all I found was a blurry picture of {thing2}.",
            "When I called your hotline, a friendly person named {name} put me on hold for {medium} minutes.",
            "Two of the {small} worksheets on {thing3} were missing and a third was in {language}.",
            "I paid {price}, which is not a small sum for me, and {price2} for shipping on top.",
            "As a(n) {role} I depend on correct information, so mistakes like these cost me time and nerves.",
            "I then wrote an e-mail on {day2} and got an automatic reply that thanked me for my interest in {thing4}.",
            "My {season} plans are ruined, because I cannot start without the missing parts.",
            "Other buyers at the {place2} told me that the same thing had happened to them.",
        ),
        (
            "Please send a replacement or return the money by {month2} {small}.",
            "I expect an answer within {few} weeks[, otherwise I will have to take further steps|]. {name2} {surname}",
            "I would rather not leave a bad review, so I hope we can sort this out. Regards, {name2} {surname}",
        ),
    ),
    # A person's portrait.
    Genre(
        (
            "{name} {surname} never planned to become a(n) {role}.",
            "Ask anybody in {city} about {topic} and sooner or later they will mention {name} {surname}.",
            "Born in {country} in {year}, {name} {surname} grew up above a(n) {place}.",
            "If you visit the {place} in {city}, you will probably hear {name} {surname} before you see {him}.",
        ),
        (
            (
                "At school {he} was [bad at almost everything|a quiet pupil] and filled {his} notebooks with "
                "sketches of {thing}."
            ),
            "It was an aunt, a retired {role2}, who first showed {him} {thing2} and explained what to look for.",
            "{^he} moved to {city2} with two suitcases and a(n) {object}, which {he} still owns.",
            "For {small} years {he} worked nights at {firm} and studied in the mornings.",
            'Asked about {thing3}, {he} laughs. "I was {feeling} the whole time," {he} says, "but I kept going."',
            "{^his} first attempt failed so badly that a local reporter wrote a column about it.",
            "Then, in the {season} of {year2}, a letter arrived that changed {his} plans completely.",
            "Today {he} leads a team of {medium} people and gives talks on {thing4} all over {country2}.",
            "Colleagues describe {him} as stubborn, generous and impossible to hurry.",
            "On {day}s {he} does not answer the phone, because that time belongs to {his} two children.",
        ),
        (
            "{^his} advice to beginners is short: start small, and ask.",
            "Retirement? {^he} shakes {his} head and goes back to work.",
            "A book about {his} life is due in {month}.",
        ),
    ),
    # Review.
    Genre(
        (
            "I signed up for the weekend class on {topic} at the {place} because a friend had a spare ticket.",
            "[Three|Two|Four] stars. I really wanted to love this book about {topic}.",
            "We visited the new exhibition on {topic} in {city} last {day}, two adults and {few} children.",
        ),
        (
            "The part about {thing} was excellent: clear, lively and full of examples I had not heard before.",
            "Unfortunately, {thing2} are dealt with in about {small} minutes, as if somebody had looked at the clock.",
            "{name}, our guide, is a(n) {role} and knows a hundred stories, of which perhaps half are true.",
            "At {price} per person it is not cheap, though tea and biscuits are included.",
            "The lighting could be better; I had trouble reading the captions under {thing3}.",
            "My daughter, who is {age}, wanted to stay for another round and talked about {thing4} all the way home.",
            "Signs are only in {language}, so we missed a few things.",
            (
                "Do not expect much comfort: the chairs are hard, and the heating seems to have been switched off "
                "in {month}."
            ),
            "What I liked best was that nobody made us feel stupid for asking simple questions.",
            "Parking on {street} cost us another {price2}.",
        ),
        (
            "Would I go again? [Probably|Yes, but not at the weekend|I am not sure].",
            "Recommended for {readers}, less so for {readers2}.",
            "All in all a(n) [decent|uneven|pleasant] afternoon with room for improvement.",
        ),
    ),
    # Mail between colleagues.
    Genre(
        (
            "Hi {name}, sorry for the late reply, it has been a(n) [wild|busy|long] week at the {place}.",
            "{name}, a quick update on {topic} before I leave for {city}.",
            "Hello {name}, {name2} forwarded me your message about {thing}, and I have [some|a few] thoughts.",
        ),
        (
            "The list of {thing} you sent is great, but rows {small} to {medium} seem to be duplicates.",
            "I spoke to the {role} yesterday: she can do {day} at {hour}, or any time in {month}.",
            "About {thing2}: we still have {medium2} of them in the basement, so please do not order more.",
            "Could you check whether the {price} per piece includes tax? {firm} was vague about it.",
            "Honestly, I am a little {feeling} about the deadline, since {name3} is away until {day2}.",
            "The draft reads well; I would only move the paragraph on {thing3} to the front.",
            "If it helps, I can ask my old team in {city2}, who did something similar in {recent}.",
            "And one more thing, somebody left a(n) {object} on my desk with your name on it.",
            "For the slides, less is more: three pictures of {thing4}, one number, done.",
        ),
        (
            "Let me know what you think[ by {day2}|]. {name4}",
            "Talk soon, {name4}",
            "Thanks a lot, and greetings to everyone at the {place2}. {name4}",
        ),
    ),
    # Fiction.
    Genre(
        (
            (
                "The {object} had been lying on the steps of the {place} since {day}, and nobody but {name} dared "
                "to touch it."
            ),
            "When {name} turned {small}, {his} grandfather gave {him} a(n) {object} and a warning about {thing}.",
            "Nobody in {city} except {name} could say who had first seen the {animal}.",
            "At {hour} sharp the door of the {place} opened, although {name} had locked it {him}self the night before.",
        ),
        (
            "{name} held {his} breath and counted to {small2}.",
            "Somewhere behind the wall a voice was reading a list: {thing}, {thing2}, {thing3}.",
            '"You are late," said {name2}, without looking up from {thing4}.',
            "The old {role} only shrugged and pointed towards {street}, where the lamps had gone out one by one.",
            "It smelled of wet coats and oranges, the way the whole house had smelled in the {season} of {year}.",
            (
                "A(n) {colour} envelope slid under the door; inside were {price} in coins and a photograph of the "
                "{place2}."
            ),
            '"I thought you were [dead|in {city2}]," {he} whispered.',
            "Outside, a(n) {animal2} crossed the road as calmly as if it were going to work.",
            "Of course {he} should have turned back then, but {he} was too {feeling}.",
            "Everything {he} had ever learned about {topic} suddenly seemed useless.",
        ),
        (
            "Then the telephone rang.",
            "That was when {name2} began to laugh.",
            "In the morning, both of them were gone.",
        ),
    ),
    # Opinion.
    Genre(
        (
            "I am tired of hearing that {topic} should be left to experts.",
            "Let me say something unpopular about {topic}.",
            "There are two kinds of people: those who love {thing}, and those who have never given them a chance.",
        ),
        (
            (
                "When I was young, a(n) {role} came to our school in {city} and talked for one lesson; I remember "
                "every word."
            ),
            "Today, children know {thing2} from screens only, and we wonder why they are bored.",
            "Yes, it costs money: about {price} per head and year, less than most of us spend on parking.",
            "My opponents will say that {thing3} cause more trouble than they are worth, and sometimes they are right.",
            "But a town that closes its {place} and opens another car park has forgotten what it is for.",
            "Numbers prove little here, although {percent} percent of readers agreed with me in last {month}'s poll.",
            "{name} {surname}, whom I admire, once called {thing4} a luxury; I would call them a beginning.",
            "Nobody needs to like everything, and nobody should be forced to join in.",
            "What I ask for is modest: one afternoon, an open door, and somebody who can explain things.",
        ),
        (
            "Is that really too much?",
            "I look forward to your angry letters.",
            "We will not get this chance again in my lifetime.",
        ),
    ),
    # Question in a forum.
    Genre(
        (
            "Long-time reader, first post. I need help with {thing} before I do something stupid.",
            "Has anyone here tried to combine {topic} with [a full-time job|small children|a tiny budget]?",
            "Update on my post from {month}: things got [worse|better, then worse|weird].",
        ),
        (
            "Background: I am {medium}, live in {city}, and until last year I could not tell {thing} from {thing2}.",
            "My flatmate {name} swears by a method from {year} that involves vinegar and a(n) {object}.",
            "So far I have spent {cost} and have {small} half-finished attempts in the hallway to show for it.",
            "The guy at the {place} just said that it depends, which is true and of no use.",
            "I did search the archive, but the one thread about {thing3} ends with somebody writing that it is solved.",
            "Pictures follow as soon as I find out how to make them smaller than {small2} megabytes.",
            (
                "Please do not tell me to hire a(n) {role}: the nearest one is {medium2} kilometres away and does "
                "not call back."
            ),
            "What confuses me is that it worked fine on {day} and stopped on {day2} although I changed nothing.",
            "Edit: thanks for {large} replies, I did not expect that many opinions on {thing4}.",
        ),
        ("Any hint is welcome.", "Sorry for the wall of text.", "Am I overthinking this?"),
    ),
    # School report.
    Genre(
        (
            "{name} is a lively pupil with a strong interest in {topic}.",
            "Report on the internship of {name} {surname} at the {place}, {month} to {month2}.",
        ),
        (
            "{^he} arrived on time on all but {small} days and always had a good story to explain the rest.",
            "In group work {he} listens well, although {his} jokes about {thing} sometimes go too far.",
            "{^his} talk on {thing2} lasted {minutes} minutes longer than planned and nobody looked at the clock.",
            "Written work is neat; spelling, however, remains an adventure.",
            "{^he} scored {medium} out of a hundred points in the {season} test, {small2} more than the year before.",
            "With a(n) {role} as a mentor, {he} built a model of {thing3} from matches and glue.",
            "{^he} found it hard to accept that {name2} solved the same task in half the time.",
            "When a younger child was {feeling}, it was {name} who stayed behind and helped.",
            "We advise {him} to sleep more and to read the question twice.",
        ),
        ("We wish {him} all the best.", "Overall mark: good.", "Signed, {name3} {surname3}, {city}"),
    ),
)
