"""What the generated instructions are about: fields with people, places and aims, and topics with their things."""

from __future__ import annotations

from dataclasses import dataclass

HELD = "*"  # before the name of a topic that training never sees


@dataclass(frozen=True)
class Topic:
    """A subject: `name` fits after "about", each of `things` is a plural, each of `goals` fits after "how do I"."""

    name: str
    field: str
    things: tuple[str, ...]
    roles: tuple[str, ...]
    places: tuple[str, ...]
    goals: tuple[str, ...]
    held: bool


# A field: who works in it; where; what people want to do, split by "/"; then its topics, each with things, plural.
FIELDS = {
    "animals": """
zookeeper, vet, wildlife photographer, dog trainer, biologist, farmer
animal shelter, nature reserve, aquarium, petting farm, field station
get closer to {thing} without scaring them / teach a child about {thing} / keep a diary of the {thing} I see /
raise money for a charity that protects {thing} / tell {thing} and {thing2} apart
bees and beekeeping: hives, honeycombs, queen bees, swarms, wildflowers
* owls: nests, feathers, night calls, talons, barn owls
whales: calves, fins, migration routes, whale songs, feeding grounds
pet dogs: puppies, leashes, chew toys, commands, walks
house cats: kittens, scratching posts, whiskers, litter boxes, naps
ants: colonies, tunnels, worker ants, scent trails, anthills
horses: saddles, stables, foals, hooves, riding lessons
sharks: gills, teeth, reefs, hunting habits, shark species
frogs and toads: tadpoles, ponds, croaks, egg clusters, wetlands
""",
    "plants and the outdoors": """
gardener, park ranger, forester, botanist, allotment owner, landscape designer
botanical garden, garden centre, national park, greenhouse, community allotment
grow healthy {thing} on a small balcony / protect {thing} from bad weather / set up a small project around {thing} /
photograph {thing} in good light / find out what is harming my {thing}
tomato growing: seedlings, tomato plants, watering cans, garden stakes, ripe tomatoes
* mushrooms: spores, mushroom caps, fungi, forest floors, field guides
oak trees: acorns, branches, tree rings, old roots, leaves
composting: food scraps, compost bins, worms, dry leaves, garden beds
hiking: trails, hiking boots, trail maps, backpacks, viewpoints
camping: tents, sleeping bags, campfires, camp stoves, campsites
houseplants: flower pots, leaf cuttings, window sills, ferns, succulents
rainforests: vines, tree canopies, rare species, streams, clearings
cactuses: spines, deserts, desert blooms, sandy soils, seed pods
""",
    "earth and space": """
astronomer, geologist, weather forecaster, oceanographer, astronaut, science teacher
observatory, planetarium, weather station, research vessel, mountain hut
understand how {thing} form / explain {thing} to my grandmother / build a classroom model of {thing} /
read a chart that shows {thing} / spend a weekend learning about {thing}
volcanoes: lava flows, craters, eruptions, ash clouds, hot springs
the Moon: moon phases, lunar craters, tides, eclipses, moon landings
* hurricanes: storm surges, wind speeds, evacuation plans, warning systems, rain bands
earthquakes: fault lines, aftershocks, tectonic plates, tremors, seismographs
the solar system: planets, moons, asteroids, orbits, comets
glaciers: icebergs, crevasses, ice cores, moraines, meltwater streams
black holes: event horizons, galaxies, gravitational waves, dying stars, telescopes
* rivers: floodplains, deltas, river bends, dams, waterfalls
the water cycle: clouds, raindrops, puddles, lakes, groundwater wells
""",
    "history": """
historian, archaeologist, museum guide, archivist, history teacher, battlefield tour guide
city museum, castle, archive, excavation site, old town hall
write a short essay on {thing} / find trustworthy sources about {thing} / lead a class discussion on {thing} /
make a small exhibition about {thing} / memorise the key dates about {thing}
ancient Egypt: pyramids, pharaohs, hieroglyphs, mummies, temples
the Roman Empire: legions, aqueducts, emperors, gladiators, Roman roads
medieval castles: drawbridges, moats, knights, sieges, stone towers
* the Silk Road: caravans, spices, trading posts, silk merchants, desert routes
the Industrial Revolution: factories, steam engines, mill workers, inventions, coal mines
the Vikings: longships, raids, sagas, settlements, rune stones
the printing press: pamphlets, printed books, movable letters, print shops, early newspapers
the Second World War: air raids, ration books, alliances, codebreakers, veterans
the Aztecs: floating gardens, market squares, warriors, stone calendars, canals
""",
    "food": """
chef, baker, waiter, nutritionist, food critic, home cook
restaurant kitchen, bakery, street market, cooking school, canteen
cook a cheap dinner with {thing} / store {thing} so that nothing is wasted / make {thing} for eight guests /
choose good {thing} at the market / get my children to eat {thing}
bread baking: loaves, sourdough starters, bread rolls, ovens, crusts
soups: vegetable broths, lentils, croutons, soup bowls, carrots
* chocolate: cocoa beans, truffles, chocolate bars, brownies, molds
coffee: espresso shots, coffee beans, paper filters, mugs, grinders
pasta: noodles, tomato sauces, pasta shapes, meatballs, dumplings
breakfast: pancakes, eggs, oat flakes, smoothies, waffles
cheese: cheese wheels, dairies, rinds, cheese boards, crackers
vegetarian cooking: beans, chickpeas, roasted peppers, salads, veggie burgers
street food: tacos, food stalls, skewers, fried snacks, hot sauces
""",
    "technology": """
electrical engineer, product designer, repair technician, inventor, tech journalist, support agent
repair shop, electronics fair, workshop, engineering lab, help desk
choose between different {thing} / fix a common problem with {thing} / explain {thing} to someone who fears computers /
save money when buying {thing} / recycle old {thing} safely
smartphones: screens, apps, phone cases, chargers, notifications
electric cars: charging stations, battery packs, electric motors, long drives, dashboards
robots: sensors, robot arms, wheels, control boards, factory lines
* 3D printing: plastic filaments, nozzles, digital models, prototypes, print errors
solar panels: rooftops, inverters, power bills, batteries, sunny days
drones: propellers, flight rules, aerial photos, spare batteries, remote controls
home Wi-Fi: routers, passwords, dead zones, network cables, guest networks
digital cameras: lenses, memory cards, tripods, flash units, shutter speeds
smart homes: thermostats, door locks, light bulbs, voice assistants, motion sensors
""",
    "computing": """
software developer, data analyst, system administrator, game designer, computer science student, tester
start-up office, coding club, data centre, university lab, hackathon
learn the basics of {thing} in a month / debug a problem with {thing} / document {thing} for my team /
pick a good tool for {thing} / make {thing} faster
sorting algorithms: arrays, comparisons, swaps, sorted lists, worst cases
databases: tables, queries, indexes, backups, transactions
computer security: passwords, phishing emails, firewalls, software updates, login attempts
machine learning: training sets, neural networks, predictions, labels, error rates
* video game design: levels, characters, puzzles, high scores, game rules
websites: web pages, forms, menus, links, page layouts
spreadsheets: formulas, columns, charts, cells, pivot tables
open source software: bug reports, contributors, licenses, code reviews, releases
programming for beginners: variables, loops, functions, error messages, exercises
""",
    "sports": """
football coach, referee, personal trainer, sports reporter, team captain, physiotherapist
stadium, sports hall, climbing gym, sports ground, running track
improve my {thing} in six weeks / organise a friendly tournament / get better at {thing} without hurting myself /
motivate a team that keeps losing / explain {thing} to a complete beginner
football: goals, penalty kicks, defenders, matches, goalkeepers
basketball: free throws, dribbles, three-pointers, fast breaks, rebounds
* swimming: laps, swim strokes, goggles, flip turns, swim lessons
marathon running: long runs, running shoes, finish lines, split times, water stops
tennis: serves, rackets, backhands, tie-breaks, clay courts
* rock climbing: ropes, harnesses, handholds, climbing routes, safety knots
cycling: bike lanes, hill climbs, helmets, bike tires, road races
chess: openings, pawns, endgames, checkmates, chess clocks
winter sports: ski slopes, snowboards, lift passes, ice skates, jumps
""",
    "health": """
nurse, family doctor, pharmacist, dentist, yoga teacher, health coach
clinic, pharmacy, wellness centre, hospital ward, gym
build a habit around {thing} / talk to my doctor about {thing} / track {thing} over a month /
fit {thing} into a busy day / help an older relative with {thing}
sleep: bedtimes, dreams, pillows, alarm clocks, afternoon naps
* vitamins: supplements, citrus fruits, deficiencies, daily doses, blood tests
stretching: hamstrings, warm-ups, yoga mats, shoulder rolls, sore muscles
allergies: pollen counts, rashes, antihistamines, triggers, sneezing fits
stress: deadlines, breathing exercises, short breaks, worries, relaxation methods
dental care: toothbrushes, cavities, gums, check-ups, braces
healthy eating: portions, leafy greens, snacks, food labels, meal plans
first aid: bandages, burns, emergency calls, first aid kits, sprains
meditation: quiet rooms, guided sessions, wandering thoughts, cushions, breaths
""",
    "travel": """
tour guide, flight attendant, hotel manager, backpacker, travel blogger, train conductor
airport, youth hostel, tourist office, railway station, beach resort
travel light with only {thing} / plan a weekend around {thing} / deal with problems with {thing} on the road /
save money on {thing} / keep two small children happy on the way
train travel: timetables, sleeper cars, window seats, connections, rail passes
city trips: museums, walking tours, cafes, city maps, sights
beach holidays: sandcastles, sunscreen bottles, waves, beach towels, parasols
* road trips: rest stops, playlists, detours, gas stations, road signs
air travel: boarding passes, layovers, carry-on bags, delays, window shades
backpacking: hostels, night buses, rain jackets, travel journals, shared dorms
travelling with children: car seats, bedtime stories, snack boxes, playgrounds, tantrums
travel in Japan: temples, bullet trains, noodle bars, cherry blossoms, hot spring inns
cruise ships: cabins, harbours, deck chairs, shore excursions, buffets
""",
    "law": """
lawyer, judge, notary, police officer, law student, tenant adviser
court house, law office, legal aid centre, police station, city council
understand {thing} without a lawyer / prepare for a meeting about {thing} / write a polite letter about {thing} /
find out which rules apply to {thing} / keep good records of {thing}
renting a flat: leases, deposits, landlords, repairs, house rules
traffic rules: speed limits, parking tickets, crosswalks, driving licences, fines
* copyright: book quotes, song lyrics, photographs, licences, fair uses
consumer rights: refunds, warranties, faulty goods, receipts, return periods
* wills and inheritance: heirs, signatures, estates, witnesses, family homes
privacy: cookies, personal records, consent forms, security cameras, data leaks
contracts: clauses, deadlines, signatures, penalties, notice periods
juries and trials: verdicts, witnesses, jurors, opening statements, appeals
neighbour disputes: fences, noise complaints, shared driveways, hedges, quiet hours
""",
    "money": """
accountant, bank clerk, financial adviser, shop owner, economist, tax clerk
bank, accounting firm, pawn shop, stock exchange, savings club
cut my spending on {thing} / compare {thing} before I sign anything / teach a teenager about {thing} /
keep track of {thing} in a simple way / avoid common mistakes with {thing}
household budgets: bills, groceries, rent payments, spending limits, envelopes
* saving for retirement: pensions, monthly savings, retirement plans, old savings accounts, yearly statements
credit cards: interest charges, card limits, late fees, statements, reward points
the stock market: shares, dividends, index funds, price swings, brokers
* student loans: repayments, interest rates, loan forms, grace periods, part-time jobs
taxes: tax returns, deductions, pay slips, tax brackets, receipts
inflation: food prices, wages, price tags, central banks, rising rents
insurance: claims, premiums, policies, accidents, deductibles
starting a small business: customers, invoices, suppliers, business plans, price lists
""",
    "work": """
office manager, recruiter, team leader, intern, freelancer, sales representative
open-plan office, co-working space, job fair, meeting room, warehouse
handle {thing} with more confidence / prepare for {thing} next week / talk to my boss about {thing} /
spend less time on {thing} / give a new colleague an introduction to {thing}
job interviews: hard questions, handshakes, job offers, first impressions, thank-you notes
* remote work: video calls, home offices, chat messages, time zones, headsets
meetings: agendas, minutes, presentations, late starts, action items
time management: to-do lists, priorities, calendars, interruptions, deadlines
leadership: goals, team talks, decisions, conflicts, feedback rounds
customer service: complaints, waiting times, phone calls, refunds, satisfied customers
career changes: new skills, evening courses, contacts, risks, fresh starts
* night shifts: late hours, shift plans, coffee breaks, quiet streets, sleep problems
apprenticeships: trade skills, mentors, exams, tools, training years
""",
    "school": """
primary school teacher, headteacher, tutor, school librarian, exchange student, parent
classroom, school library, university campus, after-school club, lecture hall
get better grades in {thing} / explain {thing} to a classmate / plan a lesson about {thing} /
stop putting off {thing} / help my son with {thing}
studying for exams: flash cards, practice tests, study groups, summaries, late nights
homework: worksheets, due dates, excuses, study desks, reading tasks
* learning to read: picture books, letters, syllables, reading circles, bedtime stories
mathematics lessons: fractions, equations, times tables, geometry problems, calculators
school trips: buses, permission slips, packed lunches, museum visits, group photos
science fairs: experiments, posters, hypotheses, judges, prize ribbons
note taking: outlines, margins, highlighters, mind maps, notebooks
university applications: essays, recommendation letters, entry tests, scholarships, open days
school uniforms: jackets, ties, dress codes, school badges, skirts
""",
    "visual arts": """
painter, sculptor, gallery owner, art student, photographer, illustrator
art gallery, studio, art supply shop, sculpture park, design school
start with {thing} although I cannot draw / look at {thing} more carefully / find my own style with {thing} /
hang {thing} in a small flat / give a short talk about {thing}
oil painting: brushes, canvases, glazes, palettes, portraits
street art: murals, spray cans, stencils, brick walls, tags
photography: portraits, shadows, filters, close-ups, frames
* pottery: clay bowls, kilns, glazes, potter's wheels, vases
architecture: facades, arches, skylines, blueprints, staircases
comics: speech bubbles, panels, superheroes, sketches, punchlines
fashion design: fabrics, patterns, sewing machines, catwalks, buttons
animation: frames, storyboards, cartoon figures, voice actors, backgrounds
colour theory: hues, contrasts, primary colours, colour wheels, tints
""",
    "music and stage": """
pianist, choir leader, actor, stage manager, music teacher, sound engineer
concert hall, rehearsal room, theatre, jazz club, recording studio
practise {thing} without annoying the neighbours / overcome my fear of performing / learn {thing} as an adult /
write something new with {thing} / choose {thing} for a small party
jazz: solos, trumpets, improvisations, rhythms, jam sessions
learning the piano: scales, chords, pedals, finger exercises, sheet notes
theatre: rehearsals, costumes, stage lights, monologues, curtains
film making: scenes, scripts, camera angles, actors, trailers
singing in a choir: harmonies, high notes, voices, concerts, songbooks
hip hop: beats, rhymes, samples, turntables, verses
* ballet: pointe shoes, leaps, dance steps, mirrors, dancers
stand-up comedy: punchlines, hecklers, microphones, awkward silences, open stages
musical instruments: violins, drums, guitar strings, flutes, bows
""",
    "language and books": """
librarian, translator, novelist, editor, poet, bookseller
library, bookshop, writing workshop, publishing house, language school
write better {thing} / discuss {thing} in a reading group / learn {thing} in ten minutes a day /
read more although I have little time / explain {thing} to someone who hates reading
learning Spanish: verbs, flash cards, conversations, grammar rules, accents
detective novels: clues, suspects, alibis, plot twists, detectives
* fairy tales: dragons, witches, wishes, enchanted forests, stepmothers
* poetry: rhymes, metaphors, stanzas, line breaks, images
public libraries: shelves, library cards, reading rooms, late fees, audiobooks
science fiction: spaceships, aliens, time machines, future cities, robots
creative writing: plots, characters, drafts, opening lines, dialogues
English grammar: commas, tenses, prepositions, irregular verbs, clauses
sign language: gestures, hand shapes, facial expressions, interpreters, deaf communities
""",
    "household": """
plumber, electrician, cleaner, carpenter, interior designer, landlord
hardware store, basement, laundry room, furniture shop, second-hand store
repair {thing} with simple tools / clean {thing} the right way / make room for {thing} in a tiny flat /
decide when {thing} must be replaced / find a cheap replacement for {thing}
cleaning the kitchen: sponges, oven trays, stains, cupboards, drains
leaking taps: washers, pipes, wrenches, drips, valves
* moving house: boxes, moving vans, labels, keys, farewell parties
laundry: socks, stain removers, washing machines, clotheslines, wool sweaters
painting a room: paint rollers, paint cans, masking tapes, walls, colour samples
furniture: bookshelves, screws, wooden chairs, drawers, instructions
saving energy at home: light bulbs, radiators, insulated windows, power meters, thick curtains
decluttering: wardrobes, storage boxes, old papers, charity shops, souvenirs
home safety: smoke alarms, power cords, door locks, ladders, fire blankets
""",
    "people and family": """
social worker, wedding planner, kindergarten teacher, marriage counsellor, grandmother, scout leader
community centre, kindergarten, wedding venue, retirement home, playground
talk about {thing} without starting a fight / plan something special around {thing} / make new friends after moving /
deal with {thing} as a shy person / support a friend who struggles with {thing}
friendship: old friends, secrets, phone calls, promises, shared hobbies
weddings: guests, vows, wedding cakes, invitations, speeches
raising teenagers: curfews, arguments, house rules, messy rooms, moods
* grandparents: family stories, photo albums, recipes, Sunday visits, hugs
birthday parties: balloons, gifts, party games, candles, guest lists
making small talk: openers, compliments, shared interests, awkward pauses, questions
conflict between siblings: shared rooms, toys, apologies, fair rules, quarrels
volunteering: soup kitchens, food banks, helpers, donations, clean-up days
dating: first dates, messages, dinner plans, expectations, nerves
""",
    "science": """
chemist, physicist, lab assistant, doctoral student, science journalist, medical researcher
laboratory, science museum, university department, clean room, lecture theatre
run a safe home experiment on {thing} / describe {thing} without any formulas / measure {thing} with simple tools /
draw a clear diagram of {thing} / prepare a five-minute talk about {thing}
gravity: falling objects, orbits, masses, forces, pendulums
photosynthesis: leaves, sugars, chlorophyll pigments, plant cells, light rays
* DNA: genes, chromosomes, base pairs, mutations, cells
* magnets: poles, compasses, magnetic fields, coils, iron filings
the human brain: neurons, memories, reflexes, brain scans, nerve signals
vaccines: antibodies, viruses, immune cells, trials, booster shots
electricity: circuits, currents, switches, conductors, charges
chemical reactions: acids, catalysts, bubbles, molecules, test tubes
evolution: fossils, species, adaptations, ancestors, finches
""",
    "society and transport": """
mayor, bus driver, city planner, journalist, election helper, firefighter
town hall, bus depot, polling station, fire station, market square
convince my town to care about {thing} / take part in a debate on {thing} / find reliable numbers on {thing} /
write to the newspaper about {thing} / live with fewer {thing}
public transport: buses, tram stops, tickets, rush hours, night lines
elections: ballots, candidates, polls, debates, voters
* recycling: plastic bottles, bins, glass jars, sorting rules, landfills
* bridges: cables, arches, pillars, toll booths, inspections
advertising: slogans, billboards, logos, target groups, jingles
local newspapers: headlines, reporters, readers, columns, small ads
city parks: benches, fountains, playgrounds, picnics, old trees
firefighting: hoses, ladders, false alarms, rescue drills, fire engines
immigration: passports, border checks, language courses, new arrivals, work permits
""",
    "hobbies": """
knitting instructor, stamp collector, model builder, magician, board game designer, amateur radio operator
hobby shop, craft fair, games night, attic, clubhouse
start with {thing} on a budget / show {thing} to visitors in an interesting way /
turn {thing} into a small side income / organise all my {thing} / find other people who like {thing}
knitting: needles, yarn balls, stitches, scarves, knitting patterns
board games: dice, cards, game pieces, rule books, turns
model trains: tracks, locomotives, tunnels, signal lights, tiny houses
* stamp collecting: albums, postmarks, rare stamps, tweezers, envelopes
magic tricks: card tricks, coins, wands, secret pockets, audiences
fishing: hooks, rods, baits, lakes, quiet mornings
woodworking: planks, saws, joints, chisels, birdhouses
bird watching: binoculars, bird calls, feeders, sightings, notebooks
crossword puzzles: grids, clues, pencils, rare words, themes
""",
}


def parse(field: str, text: str) -> list[Topic]:
    """The topics of a field's text."""
    roles, places, rest = text.strip().split("\n", 2)
    lines = rest.split("\n")
    num_goal_lines = next(idx for idx, line in enumerate(lines) if ": " in line)
    goals = tuple(goal.strip() for goal in " ".join(lines[:num_goal_lines]).split("/"))
    topics = []
    for line in lines[num_goal_lines:]:
        name, things = line.split(": ")
        topics.append(
            Topic(
                name=name.removeprefix(HELD).strip(),
                field=field,
                things=tuple(things.split(", ")),
                roles=tuple(roles.split(", ")),
                places=tuple(places.split(", ")),
                goals=goals,
                held=name.startswith(HELD),
            )
        )
    return topics


TOPICS: tuple[Topic, ...] = tuple(topic for field, text in FIELDS.items() for topic in parse(field, text))
