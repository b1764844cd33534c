"""Generated question-and-answer tasks for spice-tiny, each with an answer that can be checked.

A task kind is a function of a random generator that returns (question, answer, key). For kinds with many
arguments, questions whose `key` hashes to the held-out tenth are never trained on (see `is_held_out`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from models.tiny import facts

Example = tuple[str, str, str]
Task = Callable[[random.Random], Example]


def is_held_out(key: str) -> bool:
    """Whether a question of a combinatorial kind belongs to the held-out tenth."""
    return zlib.crc32(key.encode()) % 10 == 0


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def first_upper(text: str) -> str:
    return text[0].upper() + text[1:]


def add(r: random.Random) -> Example:
    a, b = r.randint(0, 10), r.randint(0, 10)
    q = r.choice(
        ("What is {} + {}?", "{} + {} =", "What is {} plus {}?", "Add {} and {}.", "How much is {} + {}?")
    )
    return q.format(a, b), f"{a} + {b} = {a + b}", f"add {a} {b}"


def subtract(r: random.Random) -> Example:
    b = r.randint(0, 10)
    a = b + r.randint(0, 10)
    q = r.choice(("What is {} - {}?", "{} - {} =", "What is {} minus {}?", "How much is {} - {}?"))
    return q.format(a, b), f"{a} - {b} = {a - b}", f"sub {a} {b}"


def compare(r: random.Random) -> Example:
    a, b = r.sample(range(100), 2)
    if r.random() < 0.5:
        return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.", f"cmp {a} {b}"
    return f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}.", f"cmp {a} {b}"


def sort_numbers(r: random.Random) -> Example:
    items = r.sample(range(1, 30), r.randint(3, 4))
    text = ", ".join(map(str, items))
    q = r.choice(("Sort these numbers: {}", "Put these numbers in order: {}", "Sort: {}")).format(text)
    return q, ", ".join(map(str, sorted(items))), f"sort {text}"


def _words(r: random.Random, low: int = 3, high: int = 5) -> tuple[list[str], str]:
    items = r.sample(facts.WORDS, r.randint(low, high))
    return items, ", ".join(items)


def reverse_list(r: random.Random) -> Example:
    items, text = _words(r)
    q = r.choice(("Reverse this list: {}", "Say these words backwards: {}", "Reverse: {}")).format(text)
    return q, ", ".join(reversed(items)), f"rev {text}"


def count_list(r: random.Random) -> Example:
    items, text = _words(r, 2, 7)
    q = r.choice(("How many words are in this list: {}?", "Count these words: {}")).format(text)
    return q, f"There are {len(items)} words in the list.", f"cnt {text}"


def pick(r: random.Random) -> Example:
    items, text = _words(r)
    where, i = r.choice((("first", 0), ("second", 1), ("last", -1), ("third", 2)))
    q = r.choice(("What is the {} word in this list: {}?", "Give me the {} word: {}")).format(where, text)
    return q, f"The {where} word is {items[i]}.", f"pick {where} {text}"


def repeat(r: random.Random) -> Example:
    items, _ = _words(r, 2, 5)
    text = " ".join(items)
    q = r.choice(("Repeat after me: {}", "Say: {}", "Repeat these words: {}")).format(text)
    return q, text, f"rep {text}"


def spell(r: random.Random) -> Example:
    word = r.choice(facts.WORDS)
    q = r.choice(("Spell the word {}.", "How do you spell {}?", "Spell {}.")).format(word)
    return q, "-".join(word), ""


def capital(r: random.Random) -> Example:
    land, city = r.choice(facts.CAPITALS)
    if r.random() < 0.25:
        land_first = f"{city} is the capital of {land}."
        return f"{city} is the capital of which country?", land_first, ""
    q = r.choice(
        ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")
    )
    return q.format(land), f"The capital of {land} is {city}.", ""


def opposite(r: random.Random) -> Example:
    a, b = r.choice(facts.OPPOSITES)
    q = r.choice(("What is the opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}."))
    return q.format(a), f"The opposite of {a} is {b}.", ""


def calendar(r: random.Random) -> Example:
    names, kind = r.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    i, step = r.randrange(len(names)), r.choice((1, -1))
    word = "after" if step == 1 else "before"
    q = r.choice(("What {} comes {} {}?", "Which {} is {} {}?")).format(kind, word, names[i])
    return q, f"{names[(i + step) % len(names)]} comes {word} {names[i]}.", ""


def young(r: random.Random) -> Example:
    a, b = r.choice(facts.YOUNG)
    q = r.choice(
        (f"What is a young {a} called?", f"What do you call a young {a}?", f"What is a baby {a} called?")
    )
    return q, f"A young {a} is called {article(b)}.", ""


def sound(r: random.Random) -> Example:
    a, b = r.choice(facts.SOUNDS)
    return r.choice((f"What sound does a {a} make?", f"What does a {a} do?")), f"A {a} {b}.", ""


def colour(r: random.Random) -> Example:
    a, b = r.choice(facts.COLOURS)
    q = r.choice((f"What colour is {a}?", f"What is the colour of {a}?", f"What color is {a}?"))
    return q, f"{first_upper(a)} is {b}.", ""


def kind_of(r: random.Random) -> Example:
    kind, wrong = r.sample(sorted(facts.KINDS), 2)
    word = r.choice(facts.KINDS[kind].split())
    said = word if kind in ("colour", "metal") else article(word)
    x, y = (kind, wrong) if r.random() < 0.5 else (wrong, kind)
    q = r.choice((f"Is {said} {article(x)} or {article(y)}?", f"What kind of thing is {said}?"))
    return q, f"{first_upper(said)} is {article(kind)}.", ""


HELP = "Ask me for a story, a capital city, a small sum, an opposite, or to sort or reverse a list."
_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Hello|Hi|Hi there|Hello!|Hey|Good morning|Hello there|hi|hello",
        ("Hello! " + HELP, "Hi! How can I help you?"),
    ),
    (
        "Who are you?|What are you?|What is your name?|Tell me about yourself.",
        ("I am spice-tiny, a very small mixture-of-experts language model.",),
    ),
    ("What can you do?|Help|What can I ask you?|How can you help me?|help", (HELP,)),
    ("How are you?|How are you today?|How do you do?", ("I am well, thank you. How can I help you?",)),
    ("Thank you|Thanks|Thank you!|Thanks a lot|thanks", ("You are welcome!",)),
    ("Goodbye|Bye|Good night|See you later|bye", ("Goodbye! Have a nice day.",)),
    ("Yes|No|OK|Okay|Good|Great|Nice|ok", ("Good. What would you like to know?",)),
)


def talk(r: random.Random) -> Example:
    asked, said = r.choice(_TALK)
    return r.choice(asked.split("|")), r.choice(said), ""


def accepted(question: str) -> tuple[str, ...]:
    """All answers to a question of small talk; none for other questions."""
    return next((said for asked, said in _TALK if question in asked.split("|")), ())


def unknown(r: random.Random) -> Example:
    return r.choice(facts.UNKNOWN), "I am a very small model and I do not know that. " + HELP, ""


# Each kind with its share of the questions. Kinds with a key are tested on held-out arguments.
SHARES: dict[Task, float] = {
    add: 9, subtract: 8, compare: 5, sort_numbers: 5, reverse_list: 4, count_list: 0.7, pick: 3, repeat: 5,
    spell: 1.5, capital: 2.5, opposite: 0.7, calendar: 1.5, young: 0.5, sound: 0.4, colour: 0.5,
    kind_of: 1.5, talk: 1, unknown: 0.5,
}  # fmt: skip
COMBINATORIAL = (add, subtract, compare, sort_numbers, reverse_list, count_list, pick, repeat)
_TASKS, _WEIGHTS = list(SHARES), list(SHARES.values())


def draw(r: random.Random, *, held_out: bool = False, task: Task | None = None) -> tuple[str, str]:
    """A question and its answer; of kinds with a key either only held-out ones or none of them."""
    task = task or r.choices(_TASKS, _WEIGHTS)[0]
    while True:
        question, answer, key = task(r)
        if not key or is_held_out(key) == held_out:
            return question, answer


def roughen(question: str, r: random.Random) -> str:
    """The question as people also type it: now and then without capitals or the closing mark."""
    roll = r.random()
    if roll < 0.1:
        question = question[0].lower() + question[1:]
    if roll < 0.05 or roll > 0.93:
        question = question.rstrip("?.")
    return question
