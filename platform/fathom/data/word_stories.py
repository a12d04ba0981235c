"""The stories of the word problems: each draws its numbers and wording and works out its solution."""

import random
from collections.abc import Callable, Sequence

NAMES = (
    "Amira", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Keiko",
    "Liam", "Mona", "Omar", "Nadia", "Quentin", "Priya", "Samuel", "Rosa", "Viktor", "Tara",
    "Yusuf", "Uma", "Anton", "Wendy", "Chidi", "Zoe", "Emil", "Bella", "Tomas", "Dalia", "Kofi",
    "Leila", "Ravi",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "stickers", "pencils", "shells", "stamps", "buttons", "coins", "cards", "beads",
    "walnuts", "postcards",
)  # fmt: skip
SHOPS = ("market", "corner shop", "stationery shop", "fair", "farm stand", "bookshop")
GOODS = (
    ("notebook", "notebooks", "pens"),
    ("sandwich", "sandwiches", "bottles of juice"),
    ("ticket", "tickets", "snacks"),
    ("mug", "mugs", "spoons"),
    ("brush", "brushes", "paint tubes"),
    ("kite", "kites", "balls of string"),
)
SHE = frozenset(NAMES[::2])  # they alternate
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PLACES = ("library", "museum", "school hall", "theatre", "sports club", "community centre")

Told = tuple[str, list[str], int]


def he(name: str) -> str:
    """The pronoun for a name, at the beginning of a sentence."""
    return "She" if name in SHE else "He"


class Teller:
    """Draws names, words and numbers, and remembers the numbers: they decide the split."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.numbers: list[int] = []

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        drawn = self.chance.randint(low, high)
        self.numbers.append(drawn)
        return drawn

    def pick(self, options: Sequence[str]) -> str:
        """One of several words."""
        return options[self.chance.randrange(len(options))]

    def names(self, count: int) -> list[str]:
        """Different names."""
        return self.chance.sample(NAMES, count)


def gather(t: Teller) -> Told:
    """One step: two amounts together."""
    (who,), thing = t.names(1), t.pick(THINGS)
    first, more = t.number(3, 60), t.number(2, 40)
    got = t.pick(("finds", "buys", "is given", "collects"))
    ask = t.pick((f"How many {thing} does {who} have now?", f"How many {thing} is that altogether?"))
    question = f"{who} has {first} {thing} and {got} {more} more. {ask}"
    return question, [f"{who} has {first} + {more} = {first + more} {thing}."], first + more


def give_away(t: Teller) -> Told:
    """Two steps: two friends take some."""
    (who, one, two), thing = t.names(3), t.pick(THINGS)
    to_one, to_two, left = t.number(2, 25), t.number(2, 25), t.number(1, 40)
    start, given = to_one + to_two + left, to_one + to_two
    verb = t.pick(("gives", "hands", "sends"))
    question = (
        f"{who} had {start} {thing}. {he(who)} {verb} {to_one} of them to {one} and {to_two} to {two}. "
        f"How many {thing} does {who} have left?"
    )
    steps = [
        f"{who} gives away {to_one} + {to_two} = {given} {thing}.",
        f"{who} has {start} - {given} = {left} {thing} left.",
    ]
    return question, steps, left


def shopping(t: Teller) -> Told:
    """Three steps: two kinds of goods and their total."""
    (who,), shop = t.names(1), t.pick(SHOPS)
    _, big, small = GOODS[t.chance.randrange(len(GOODS))]
    many, price = t.number(2, 9), t.number(3, 15)
    few, cheap = t.number(2, 9), t.number(1, 6)
    ask = t.pick((f"How many dollars does {who} spend in all?", "What is the total cost in dollars?"))
    question = f"At the {shop}, {who} buys {many} {big} for ${price} each and {few} {small} for ${cheap} each. {ask}"
    steps = [
        f"The {big} cost {many} * {price} = {many * price} dollars.",
        f"The {small} cost {few} * {cheap} = {few * cheap} dollars.",
        f"Together that is {many * price} + {few * cheap} = {many * price + few * cheap} dollars.",
    ]
    return question, steps, many * price + few * cheap


def change(t: Teller) -> Told:
    """Two steps: what comes back from a note."""
    (who,), shop = t.names(1), t.pick(SHOPS)
    one, big, _ = GOODS[t.chance.randrange(len(GOODS))]
    many, price, back = t.number(2, 8), t.number(2, 12), t.number(1, 30)
    cost = many * price
    pays = t.pick(("pays with", "hands over", "puts down"))
    question = (
        f"{who} buys {many} {big} at the {shop}. Each {one} costs ${price}. {he(who)} {pays} ${cost + back}. "
        f"How many dollars does {who} get back?"
    )
    steps = [
        f"The {big} cost {many} * {price} = {cost} dollars.",
        f"{who} gets {cost + back} - {cost} = {back} dollars back.",
    ]
    return question, steps, back


def share(t: Teller) -> Told:
    """Two steps: packets shared out equally."""
    (who,), thing = t.names(1), t.pick(THINGS)
    each, people, packets = t.number(2, 12), t.number(2, 9), t.number(2, 6)
    per_packet = each * people
    total = packets * per_packet
    question = (
        f"{who} has {packets} bags with {per_packet} {thing} in each. {he(who)} shares all of them equally "
        f"among {people} children. How many {thing} does each child get?"
    )
    steps = [
        f"There are {packets} * {per_packet} = {total} {thing}.",
        f"Each child gets {total} / {people} = {total // people} {thing}.",
    ]
    return question, steps, total // people


def travel(t: Teller) -> Told:
    """Three steps: two legs at two speeds."""
    (who,) = t.names(1)
    way = t.pick(("cycles", "drives", "rides", "sails"))
    hours, speed, later, slow = t.number(2, 6), t.number(20, 60), t.number(1, 5), t.number(8, 19)
    first, second = hours * speed, later * slow
    unit = "hour" if later == 1 else "hours"
    question = (
        f"{who} {way} for {hours} hours at {speed} kilometres per hour, and then for {later} {unit} at "
        f"{slow} kilometres per hour. How many kilometres does {who} travel in total?"
    )
    steps = [
        f"The first part is {hours} * {speed} = {first} kilometres.",
        f"The second part is {later} * {slow} = {second} kilometres.",
        f"In total {who} travels {first} + {second} = {first + second} kilometres.",
    ]
    return question, steps, first + second


def twice_as_many(t: Teller) -> Told:
    """Two steps: a multiple, and both together."""
    (one, two), thing = t.names(2), t.pick(THINGS)
    base, times = t.number(3, 30), t.number(2, 5)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[times]
    question = (
        f"{one} has {base} {thing}. {two} has {word} as many {thing} as {one}. "
        f"How many {thing} do {one} and {two} have together?"
    )
    steps = [
        f"{two} has {times} * {base} = {times * base} {thing}.",
        f"Together they have {base} + {times * base} = {base + times * base} {thing}.",
    ]
    return question, steps, base + times * base


def older(t: Teller) -> Told:
    """Two steps: ages along a chain."""
    one, two, three = t.names(3)
    age, gap, less = t.number(9, 40), t.number(2, 15), t.number(2, 8)
    middle = age + gap
    question = (
        f"{one} is {age} years old. {two} is {gap} years older than {one}, and {three} is {less} years "
        f"younger than {two}. How old is {three}?"
    )
    steps = [
        f"{two} is {age} + {gap} = {middle} years old.",
        f"{three} is {middle} - {less} = {middle - less} years old.",
    ]
    return question, steps, middle - less


def wages(t: Teller) -> Told:
    """Four steps: two days of work, and what is saved."""
    (who,), first_day = t.names(1), t.chance.randrange(6)
    one, two = DAYS[first_day], DAYS[first_day + 1]
    hours, more, rate = t.number(2, 8), t.number(2, 8), t.number(8, 20)
    earned = (hours + more) * rate
    spent = t.number(1, earned - 1)
    job = t.pick(("babysitting", "gardening", "tutoring", "painting fences", "walking dogs"))
    question = (
        f"{who} earns ${rate} an hour for {job}. On {one} {who} worked {hours} hours and on {two} {more} "
        f"hours. After that {he(who).lower()} spent ${spent}. How many dollars are left?"
    )
    steps = [
        f"On {one} {who} earned {hours} * {rate} = {hours * rate} dollars.",
        f"On {two} {who} earned {more} * {rate} = {more * rate} dollars.",
        f"That makes {hours * rate} + {more * rate} = {earned} dollars.",
        f"After spending ${spent}, {earned} - {spent} = {earned - spent} dollars are left.",
    ]
    return question, steps, earned - spent


def seats(t: Teller) -> Told:
    """Two steps: rows of seats, some taken."""
    place = t.pick(PLACES)
    rows, per_row = t.number(4, 20), t.number(5, 20)
    total = rows * per_row
    taken = t.number(2, total)
    verb = t.pick(("are taken", "are already occupied", "have been sold"))
    question = (
        f"The {place} has {rows} rows of seats with {per_row} seats in each row. {taken} seats {verb}. "
        "How many seats are free?"
    )
    steps = [
        f"There are {rows} * {per_row} = {total} seats.",
        f"So {total} - {taken} = {total - taken} seats are free.",
    ]
    return question, steps, total - taken


def reading(t: Teller) -> Told:
    """Three steps: the rest of a book over the days that remain."""
    (who,) = t.names(1)
    pages, days, rest_days, daily = t.number(5, 30), t.number(2, 7), t.number(2, 8), t.number(6, 35)
    read, rest = pages * days, rest_days * daily
    question = (
        f"{who} is reading a book of {read + rest} pages. {he(who)} reads {pages} pages a day for {days} "
        f"days and wants to finish in {rest_days} more days. How many pages must {who} read on each of "
        f"those days?"
    )
    steps = [
        f"In {days} days {who} reads {pages} * {days} = {read} pages.",
        f"Then {read + rest} - {read} = {rest} pages remain.",
        f"On each day {who} must read {rest} / {rest_days} = {daily} pages.",
    ]
    return question, steps, daily


def bakery(t: Teller) -> Told:
    """Three steps: trays baked, some sold, the rest boxed."""
    thing = t.pick(("muffins", "rolls", "cookies", "tarts", "buns"))
    boxes, per_box, trays = t.number(2, 9), t.number(3, 12), t.number(3, 8)
    per_tray = -(-(boxes * per_box + 2) // trays)
    total = trays * per_tray
    sold = total - boxes * per_box
    question = (
        f"A baker takes {trays} trays of {thing} out of the oven, {per_tray} on each tray. {sold} {thing} "
        f"are sold right away, and the rest are packed into boxes of {per_box}. How many boxes are filled?"
    )
    steps = [
        f"The baker made {trays} * {per_tray} = {total} {thing}.",
        f"After the sale {total} - {sold} = {total - sold} {thing} are left.",
        f"They fill {total - sold} / {per_box} = {boxes} boxes.",
    ]
    return question, steps, boxes


def savings(t: Teller) -> Told:
    """Two steps: how many weeks until a price is reached."""
    (who,) = t.names(1)
    weekly, weeks, has = t.number(3, 20), t.number(2, 15), t.number(4, 50)
    price = has + weekly * weeks
    wish = t.pick(("bicycle", "guitar", "tent", "camera", "skateboard"))
    question = (
        f"A {wish} costs ${price}. {who} already has ${has} and saves ${weekly} every week. "
        f"After how many weeks can {who} buy the {wish}?"
    )
    steps = [
        f"{who} still needs {price} - {has} = {price - has} dollars.",
        f"That takes {price - has} / {weekly} = {weeks} weeks.",
    ]
    return question, steps, weeks


def garden(t: Teller) -> Told:
    """Three steps: a fence around a garden and its price."""
    (who,) = t.names(1)
    length, width, price = t.number(4, 25), t.number(3, 20), t.number(2, 9)
    half = length + width
    question = (
        f"{who}'s rectangular garden is {length} metres long and {width} metres wide. A fence costs "
        f"${price} per metre. How many dollars does a fence around the whole garden cost?"
    )
    steps = [
        f"One long and one short side are {length} + {width} = {half} metres.",
        f"The whole fence is 2 * {half} = {2 * half} metres.",
        f"It costs {2 * half} * {price} = {2 * half * price} dollars.",
    ]
    return question, steps, 2 * half * price


def bus(t: Teller) -> Told:
    """Three steps: people get on and off."""
    start, off, on = t.number(10, 45), t.number(2, 9), t.number(2, 20)
    second = t.number(2, 15)
    vehicle = t.pick(("bus", "tram", "ferry", "train"))
    question = (
        f"A {vehicle} leaves with {start} passengers. At the first stop {off} get off and {on} get on. At "
        f"the second stop {second} more get on. How many passengers are on the {vehicle} now?"
    )
    after_off, after_on = start - off, start - off + on
    steps = [
        f"After {off} get off there are {start} - {off} = {after_off} passengers.",
        f"After {on} get on there are {after_off} + {on} = {after_on} passengers.",
        f"After the second stop there are {after_on} + {second} = {after_on + second} passengers.",
    ]
    return question, steps, after_on + second


def eggs(t: Teller) -> Told:
    """Three steps: a farm's week, sold by the dozen-like carton."""
    (who,) = t.names(1)
    carton, cartons, days = t.pick(("4", "6", "10", "12")), t.number(2, 12), 7
    price = t.number(2, 6)
    daily = int(carton) * cartons
    week = days * daily
    question = (
        f"{who}'s hens lay {daily} eggs every day. {he(who)} packs the eggs of one week (7 days) into "
        f"cartons of {carton} and sells each carton for ${price}. How many dollars does {who} earn?"
    )
    t.numbers.append(int(carton))
    steps = [
        f"In one week the hens lay {days} * {daily} = {week} eggs.",
        f"They fill {week} / {carton} = {week // int(carton)} cartons.",
        f"{who} earns {week // int(carton)} * {price} = {week // int(carton) * price} dollars.",
    ]
    return question, steps, week // int(carton) * price


STORIES: tuple[Callable[[Teller], Told], ...] = (
    gather, give_away, shopping, change, share, travel, twice_as_many, older,
    wages, seats, reading, bakery, savings, garden, bus, eggs,
)  # fmt: skip
