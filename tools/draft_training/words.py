"""What the slots of a scene (scene.py) are filled with: names, places, feelings, numbers."""

from __future__ import annotations

WORDS = {
    "girl": """
Marta, Aisha, Ingrid, Yuki, Rosa, Chloe, Nadia, Priya, Hannah, Elena, Wanjiru, Sofia, Grace, Leila, Tess, Amina,
Beatriz, Carol, Dora, Emilia, Fatima, Greta, Ivy, Joanna, Keiko""",
    "boy": """
Tomas, Omar, Lukas, Kenji, Diego, Samuel, Idris, Arjun, Peter, Mateo, Kofi, Anton, Felix, Hassan, Walter, Adam,
Bruno, Cedric, Dmitri, Emil, Farid, Hugo, Jorge, Leon, Nikhil""",
    "surname": """
Lindqvist, Okafor, Brennan, Castillo, Novak, Haddad, Sato, Whitfield, Moreau, Petrov, Kaur, Dalton, Ferreira,
Jansen, Mbeki, Rossi, Quigley, Yilmaz, Hartmann, Oduya""",
    "city": """
Lisbon, Denver, Osaka, Leeds, Nairobi, Toronto, Krakow, Lima, Portland, Helsinki, Mumbai, Galway, Tampa, Seoul,
Ghent, Oslo, Austin, Valencia, Perth, Boston, Quito, Bergen, Cork, Dallas, Accra, Turin, Malmo, Pune, Bristol,
Seville""",
    "country": "Norway, Brazil, Kenya, Canada, Vietnam, Portugal, India, Mexico, Poland, Morocco, New Zealand, Chile",
    "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "month": "January, February, March, April, May, June, July, August, September, October, November, December",
    "season": "spring, summer, autumn, winter",
    "firm": """
Bluebird Supplies, Harlow & Finch, Northgate Tools, Copper Lane, Little Harbour Shop, Ostrava Trading, Green Kettle,
Sundial Books, Fourways Ltd, Pebble and Sons, Kite Street Studio, Morrow Brothers""",
    "colour": "red, dark green, yellow, pale blue, orange, grey, black, striped",
    "feeling": """
worried, excited, tired, proud, curious, annoyed, hopeful, nervous, bored, relieved, confused, grateful""",
    "tone": """
funny, serious, warm, dramatic, mysterious, gentle, sarcastic, hopeful, old-fashioned, playful, gloomy,
enthusiastic, dry, romantic, matter-of-fact, suspenseful""",
    "person": """
my boss, my best friend, a customer, my neighbour, my teacher, a colleague, my landlord, my sister, the city
council, an old schoolmate, our new team member, a local newspaper, my uncle, my piano teacher, the caretaker""",
    "readers": """
beginners, teenagers, busy parents, retired people, tourists, ten-year-olds, experts, new employees, people who know
nothing about it, sceptics, university students, visitors from abroad, investors""",
    "animal": """
fox, parrot, donkey, snail, otter, raven, hedgehog, goat, tortoise, squirrel, pelican, badger, swan, mole, lizard,
seal""",
    "object": """
broken umbrella, silver key, torn map, music box, wooden spoon, postcard, pocket watch, red suitcase, jar of
buttons, glass marble, old radio, left glove, cracked mirror, tin whistle, chess knight, folded flag, bicycle bell,
leather glove, empty birdcage, brass lamp""",
    "genre": """
mystery, comedy, ghost story, fable, adventure, love story, science fiction tale, bedtime story, thriller""",
    "language": "Spanish, French, German, Italian, Portuguese, Dutch, Swedish",
    "count": "three, four, five, six, seven, eight, ten",
    "few": "two, three, four, five",
    "words": "50, 60, 80, 100, 120, 150, 200, 250, 300",
    "age": "five, six, seven, eight, nine, ten, twelve",
    "small": "4, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16, 18",
    "medium": "24, 26, 28, 33, 35, 36, 38, 42, 45, 48, 51, 54, 57, 60, 64, 66, 72, 75, 78, 84, 88, 90, 96",
    "minutes": "5, 10, 15, 20, 25, 35, 40, 45, 50, 55",
    "large": """
135, 144, 180, 210, 240, 265, 288, 310, 375, 425, 490, 560, 640, 720, 850, 960, 1200, 1450, 1800, 2300, 3600""",
    "price": """
$3.50, $4.80, $7.20, $9.99, $12, $14.50, $18.75, $24, $27.30, $33, $39.90, $45, $52.40, $62, $74, $85, $99, $110""",
    "cost": "$140, $175, $260, $320, $385, $410, $540, $620, $790, $930",
    "percent": "5, 8, 10, 12, 15, 20, 25, 30, 35, 40, 60",
    "hour": "8:15, 9:00, 9:40, 10:30, 11:20, 2:45, 3:10, 4:00, 5:30, 6:50, 7:25",
    "year": """
1851, 1874, 1889, 1903, 1912, 1921, 1938, 1949, 1956, 1967, 1971, 1979, 1985, 1988, 1994, 1999, 2003, 2008, 2011,
2018, 2022""",
    "recent": "2009, 2013, 2015, 2016, 2017, 2019, 2020, 2021, 2022, 2023, 2024",
    "street": """
Mill Lane, Station Road, Elm Street, Harbour Street, Church Hill, Baker Row, Garden Avenue, King's Parade""",
}
POOLS: dict[str, tuple[str, ...]] = {kind: tuple(" ".join(words.split()).split(", ")) for kind, words in WORDS.items()}
