"""Texts that address everybody: news, notices, minutes, manuals and the like."""

from __future__ import annotations

from tools.draft_training.genre import Genre

PUBLIC_GENRES = (
    # A club's report.
    Genre(
        (
            "The {city} circle for {topic} met at the {place} on {day}, and {medium} people came[| despite the rain].",
            "Our {month} evening on {topic} was the best attended [so far|since {year}]: we ran out of chairs.",
            "[Thank you to everyone|Many thanks to all] who helped with last week's open day on {topic}.",
        ),
        (
            (
                "{name} {surname}, who has worked as a(n) {role} for {small} years, opened the evening with a story "
                "about {thing}."
            ),
            (
                "Nobody expected so many questions on {thing2}, and the discussion went on until the caretaker "
                "turned off the lights."
            ),
            "At the second table, children could draw {thing3} and win a(n) {colour} badge.",
            "The treasurer reported that tickets brought in {cost}, a little more than in {season}.",
            "There was also some disagreement: {name2} felt that {thing4} take up too much of our time.",
            "We agreed to borrow a projector from the {place2}, because ours is older than most members.",
            "Three newcomers from {city2} joined on the spot and promised to bring {thing5} next time.",
            "A short film from {year} showed how differently people used to think about {thing}.",
            "During the break {name3} served a soup that some of us still talk about.",
        ),
        (
            "The next meeting is on {day2} at {hour}; bring a friend[ and something to eat|].",
            "If you would like to give a talk in {month2}, please tell {name2} before {day2}.",
            "Photos [will be|are] on the notice board at the {place2}.",
        ),
    ),
    # News.
    Genre(
        (
            (
                "More than {large} residents of {city} have signed a petition on {topic}, the mayor's office said "
                "on {day}."
            ),
            "A(n) {place} in {city} will close for {small} weeks [after|following] a dispute about {thing}.",
            "{city} plans to spend more on {topic}, although [not everybody is|few are] convinced that it will help.",
            "The number of people who work with {thing} in {country} has grown by {percent} percent since {year}.",
        ),
        (
            '"We have been asking for this since {year}," said {name} {surname}, a(n) {role} who lives on {street}.',
            "Critics point out that {thing2} were promised once before and never arrived.",
            "According to a study of {large2} households, only {percent2} percent know what {thing3} are good for.",
            "The first {small2} projects should start in {month}; the rest depends on money from the region.",
            "Similar plans in {city2} failed when costs rose from {cost},000 to nearly twice as much.",
            "Local shops hope for more visitors, while neighbours fear noise and a lack of parking spaces.",
            "A spokesperson for {firm} declined to comment on {thing4}.",
            "Opposition leader {name2} {surname2} called the timetable unrealistic and asked for a second opinion.",
            "Experts from the {place2} were consulted, but their report has not been published.",
            "What worries people most, in a poll, is that nobody seems to be in charge.",
        ),
        (
            "A decision is expected [before the end of {month2}|in {month2}].",
            "The council votes on the matter next {day2}.",
            "Until then, everything stays as it is.",
        ),
    ),
    # Explainer.
    Genre(
        (
            "Few subjects start as many arguments among experts as {topic}.",
            "Anyone who looks into {topic} for the first time soon comes across {thing}.",
            "[In {year}|Around {year}], hardly anybody outside a small circle had heard much about {topic}.",
            "When people hear about {topic}, they usually think of {thing} first.",
        ),
        (
            (
                "That is understandable, since {thing} are easy to see and easy to describe, but they are only a "
                "part of the picture."
            ),
            "Just as important are {thing2}, which often go unnoticed until something goes wrong.",
            "A(n) {role} would add that no two cases are alike and that patience counts for more than talent.",
            "In {country}, for example, schools have taught the basics since {year2}, with mixed results.",
            (
                "One reason is cost: a simple set of materials can be had for {price}, while a professional one "
                "costs {medium} times as much."
            ),
            "Another reason lies in old habits, which people give up slowly even when better ways are known.",
            "Researchers compared {large} reports and found that {thing3} were mentioned in {percent} percent of them.",
            "It would be wrong, however, to conclude that {thing4} do not matter.",
            "The word itself has changed its meaning more than once, and older books can be confusing for that reason.",
            "Good introductions begin with one clear example, then add exceptions, and only at the end give a rule.",
            "Much of what is repeated online goes back to a single newspaper article that was never checked.",
        ),
        (
            "Whoever wants to know more can start at a(n) {place}, where questions are usually welcome.",
            "Much remains to be understood[, and that is part of the appeal|].",
            "In short, it pays to look twice.",
        ),
    ),
    # Minutes.
    Genre(
        (
            (
                "Minutes, {day}, {hour}. Present: {name}, {name2}, {name3} and {name4}. Subject: [our project "
                "on|the programme for] {topic}."
            ),
            (
                "Team meeting at the {place}, {month} {small}. {name} chaired; {name2} took notes; {name3} was "
                "[ill|on holiday|late]."
            ),
        ),
        (
            "Item one: the leaflet on {thing} is ready, but the printer quoted {cost} instead of {cost2}.",
            "{name2} will ask {firm} for a second offer by {day2}.",
            "Item two: visitors keep asking for {thing2}, and so far we have nothing to show them.",
            "{name3} suggested a survey with no more than {small2} questions; everyone agreed except {name4}.",
            "The {place2} has offered us a room for {medium} people on {day3}, free of charge.",
            "Budget: {large} left, of which {percent} percent is reserved for {thing3}.",
            "There was a long talk about who answers messages at the weekend, without a result.",
            "{name4} pointed out that last year's event clashed with an exam week and should move to {month2}.",
            "A(n) {role} from {city} may join us as a guest speaker if we pay for the train.",
            "Action points: order {thing4}, update the list of members, find the missing key.",
        ),
        (
            "Next meeting: {day3}, same time, [same place|room {small3}].",
            "Any other business: none. The meeting ended at {hour2}.",
            "{name} closed the meeting [early|with thanks to all].",
        ),
    ),
    # Notice to visitors.
    Genre(
        (
            "Welcome to the {place}. Please read this notice before you touch anything.",
            "Information for all visitors of the {month} days on {topic}.",
            "From {day}, new rules apply at the {place} in {city}.",
        ),
        (
            "Doors open at {hour} and close at {hour2}; on {day2} we stay closed for repairs.",
            "Tickets cost {price}, groups of more than {small} get a discount of {percent} percent.",
            "Please leave bags and {thing} in the lockers on your left, for which you need a one-euro coin.",
            "Children under {age} are welcome in the room with {thing2}, but not without an adult.",
            "Do not feed, bend, open or lick {thing3}, whatever your older brother may have told you.",
            "A(n) {role} is on duty every afternoon and glad to answer questions about {thing4}.",
            "In an emergency, follow the {colour} lamps to the exit on {street}.",
            "Photographs are allowed without flash, films only with written permission from {name} {surname}.",
            "Lost items are kept for {small2} weeks and then given to a charity.",
        ),
        (
            "We wish you a pleasant stay.",
            "Your {place2} team",
            "Questions? Ask at the desk, or call extension {large}.",
        ),
    ),
    # Project log.
    Genre(
        (
            "Field notes, {city}, {month} {small}. Weather: [windy and cold|hot, no clouds|light rain since dawn].",
            "Progress report on the {topic} project, week {small}.",
            "We wanted to find out whether practice with {thing} changes how {readers} think about {topic}.",
        ),
        (
            "We recorded {medium} cases between {hour} and {hour2}, {small2} more than on the day before.",
            "Group A worked with {thing2} for {small3} days, group B with {thing3}, and group C only waited.",
            "Contrary to our guess, the difference was small: {percent} against {percent2} percent.",
            "Two records had to be thrown away because the labels had come off in the {place}.",
            "{name} repeated the count on {day} and got {large} instead of {large2}, which we cannot explain yet.",
            "Our {role} suspects that {thing4} play a part, but the sample is too small to be sure.",
            "The equipment, rented from {firm} for {price} a day, broke down twice.",
            "Next time we should start earlier, ask fewer questions and bring better shoes.",
            "A similar test in {country} in {year} ended with the opposite result.",
        ),
        (
            "Next steps: repeat in {season}, then write it up.",
            "Open question: who pays for the second round?",
            "Signed: {name2} {surname}, {role2}",
        ),
    ),
    # Interview.
    Genre(
        (
            (
                "{^name}, you have been a(n) {role} for {medium} years. How did it begin? By accident: I was "
                "looking for a(n) {place} and took the wrong door."
            ),
            "We talked to the {role} {name} {surname} in {city}, between two appointments and over cold tea.",
        ),
        (
            "What do people ask you most often? Whether {thing} are expensive, and the answer is [no|yes|it depends].",
            "And what should they ask instead? Where {thing2} come from, because that is where it gets interesting.",
            (
                "Were you ever ready to give up? In {month} {year}, when I owed the bank {cost},000 and had {small} "
                "customers."
            ),
            "Your mother wanted you to work for {firm}, is that right? She still does.",
            "Which of your ideas failed? A museum of {thing3}: we sold {medium2} tickets, most of them to relatives.",
            "Do machines make your job easier? They make it faster, which is not the same thing.",
            (
                "You once said that {topic} can be learned in a week. I was {small2} years younger and very sure of "
                "myself."
            ),
            "What is on your desk right now? A(n) {object}, {few} unpaid bills and a drawing by my son.",
            "Who taught you the trade? {name2} {surname2}, who never praised anybody and cried at my wedding.",
        ),
        (
            "Last question: {season} or {season2}? Always {season}.",
            "Thank you for your time. Thank you for the biscuits.",
        ),
    ),
    # Manual.
    Genre(
        (
            "Model {large} is meant for indoor use in a(n) {place} or at home.",
            (
                "Keep this booklet. It tells you how to set up the {colour} case, how to clean it and what to do "
                "about faults."
            ),
        ),
        (
            "Before first use, wipe all parts with a damp cloth and let them dry for {small} hours.",
            "Never place {thing} on top of the cover while the {colour2} light is on.",
            "Press the round button for {few} seconds until you hear a click, then turn the dial to position {small2}.",
            "If {thing2} get stuck, unplug the device, wait {minutes} minutes and lift the flap with a wooden stick.",
            "The filter lasts for about {medium} uses and can be ordered from {firm} at {price} plus postage.",
            "A hum of up to {medium2} decibels is normal; a whistle is not.",
            "Store it upright, away from sunlight and out of reach of children under {age}.",
            "Error {small3} means that the lid is open, error {large2} that a(n) {role} should have a look.",
            "Damage caused by {thing3} is not covered by the guarantee of {few2} years.",
        ),
        (
            "Printed in {country}, {year}.",
            "Service: {day} to {day2}, {hour} to {hour2}.",
            "Do not throw it into the household waste.",
        ),
    ),
    # Match report.
    Genre(
        (
            "{city} against {city2} was supposed to be an easy afternoon for the team in {colour}.",
            "The final of the {month} cup, held on the field behind the {place}, drew {large} spectators.",
        ),
        (
            "After only {small} minutes {name} {surname}, by profession a(n) {role}, gave the home side the lead.",
            "The visitors answered with patience and with long passes that nobody seemed able to stop.",
            "A(n) {animal} ran across the pitch and was carried off by the linesman, to loud applause.",
            "At half-time a local choir sang a song about {thing}, which divided opinion.",
            "Trainer {name2} {surname2} brought on {few} fresh players and moved {name3} to the left.",
            "Rain set in, the ball grew heavy, and the goalkeeper slipped in front of an open goal.",
            "With {small2} minutes to go it stood level, and the crowd began to count the seconds aloud.",
            "The referee gave a penalty that {percent} percent of viewers at home thought was wrong.",
            "The prize, a basket with {thing2} worth {price}, went to the losers as well.",
        ),
        ("Final score: three to two.", "The return match is on {day}.", "Both teams left the field arm in arm."),
    ),
    # Travel guide.
    Genre(
        (
            (
                "{city} shows its best side in {season}, when the {street} market sells {thing} and everything "
                "smells of rain."
            ),
            "Most visitors to {country} spend {few} days in {city} and miss what lies an hour to the north.",
        ),
        (
            "Begin at the {place}, a(n) {colour} building of {year} with an unexpected view from the roof.",
            (
                "Tram {small} takes you to the harbour in {minutes} minutes; buy the ticket beforehand, since "
                "drivers carry no change."
            ),
            "Those who like {topic} should not miss the private collection of {name} {surname}, open on {day}s only.",
            "Lunch costs about {price} in the side streets and twice as much with a view of the river.",
            "Beware of people who offer {thing2} near the station, no matter how charming they are.",
            "After dark the {place2} turns into a dance floor, and tables are carried out onto the pavement.",
            (
                "Rooms are scarce in {month}; try the guest house at {medium} {street2}, which has {small2} beds "
                "and a(n) {animal}."
            ),
            "The dialect is hard to follow even for people from the capital, but a smile helps.",
            "A cable car, closed since {year2}, may run again soon, or so the posters claim.",
        ),
        (
            "Leave room in your bag on the way home.",
            "If you have one more day, do nothing.",
            "Best time to go: {month2}.",
        ),
    ),
)
