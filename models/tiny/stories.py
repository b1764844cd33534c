"""Short stories from templates with many alternatives, written for spice-tiny."""

from __future__ import annotations

import random

from models.tiny.facts import words
from models.tiny.tasks import article, first_upper

HEROES = words("""
    fox rabbit bear mouse owl cat dog horse duck frog hedgehog squirrel wolf goat sheep bird fish
    turtle bee lion boy girl king queen farmer sailor baker
""")
THINGS = words("""
    lantern key map bell boat kite drum ring coin book hat basket mirror candle flute ladder clock
    rope
""")
PLACES = (
    "in a quiet forest",
    "by a wide river",
    "near the sea",
    "on a green hill",
    "in a small village",
    "beside an old mill",
    "at the edge of a dark wood",
    "on a little farm",
    "in a warm valley",
    "under a tall tree",
    "close to a stone bridge",
)
NAMES = words("Anna Ben Clara Finn Greta Hugo Ida Leo Mia Nora Otto Pip Rosa Sam Tilly Vera")
MOODS = words("brave kind clever curious shy cheerful gentle lonely stubborn patient quiet hungry")

_OPEN = (
    "Once upon a time there was a {mood} {hero} named {name} who lived {place}.",
    "There was once a {mood} {hero} called {name}, and {name} lived {place}.",
    "Long ago, {place}, there lived a {mood} {hero} whose name was {name}.",
    "{name} was a {mood} {hero} who lived {place}.",
)
_HABIT = (
    "Every morning {name} went for a long walk and counted the clouds.",
    "{name} loved to sing when the sun came up.",
    "In the evening {name} liked to sit by the fire and listen to the wind.",
    "Nobody knew the paths of that land better than {name}.",
    "{name} had many friends, but the best of them was a {mood2} {friend}.",
    "All {name} wanted was a good meal and a little peace.",
)
_FIND = (
    "One day {name} found {a_thing} lying in the grass.",
    "One rainy afternoon {name} saw {a_thing} under a bush.",
    "One morning {a_thing} was lying in front of the door.",
    "On a cold day in winter {name} dug {a_thing} out of the snow.",
    "One night {name} dreamed of {a_thing}, and in the morning it was there.",
)
_WONDER = (
    '"Whose {thing} is this?" asked {name}.',
    '"What a beautiful {thing}!" said {name}.',
    "It was old and dusty, but {name} thought that it was beautiful.",
    '"Somebody must have lost this {thing}," said {name}.',
    "{name} had never seen such a {thing} before.",
)
_TROUBLE = (
    "Just then a {friend} came running down the road and began to cry.",
    "Soon a {mood2} {friend} came by and looked at it for a long time.",
    "Suddenly the sky turned dark and a great storm began.",
    'Then a {friend} jumped out and shouted, "That {thing} is mine!"',
    "But when {name} wanted to go home, the bridge was broken.",
)
_TROUBLE_FRIEND = (0, 1, 3)
_SOLVE_FRIEND = (
    '"Please do not be sad," said {name}. "We can share the {thing}."',
    '"I lost my {thing} yesterday," said the {friend}, and {name} gave it back at once.',
    "They talked for a while, and then they sat down together and ate some bread and honey.",
    "{name} was afraid at first, but the {friend} only wanted to play.",
    '"If you help me," said the {friend}, "I will show you where the stars sleep."',
)
_SOLVE_ALONE = (
    "{name} held the {thing} tight and waited under a rock until the sun came back.",
    "{name} was tired and wet, but did not give up.",
    "With the help of the {thing}, {name} found another way.",
    "{name} called for help, and all the neighbours came at once.",
)
_END = (
    "From that day on they were the best of friends.",
    "That night {name} slept very well.",
    "And {name} never forgot that day.",
    "When {name} came home, supper was warm and everybody was happy.",
    "So {name} learned that it is better to share than to keep.",
    "And if you walk {place}, you can still see the {thing} today.",
)


def story(r: random.Random, hero: str | None = None, thing: str | None = None) -> str:
    """A story of six to eight sentences about the given hero and thing (random ones by default)."""
    hero, thing = hero or r.choice(HEROES), thing or r.choice(THINGS)
    words = dict(
        hero=hero, thing=thing, a_thing=article(thing), name=r.choice(NAMES), place=r.choice(PLACES),
        mood2=r.choice(MOODS), friend=r.choice([h for h in HEROES if h != hero]),
    )  # fmt: skip
    mood = r.choice(MOODS)
    trouble = r.randrange(len(_TROUBLE))
    solve = _SOLVE_FRIEND if trouble in _TROUBLE_FRIEND else _SOLVE_ALONE
    lines = [r.choice(_OPEN), r.choice(_HABIT), r.choice(_FIND), r.choice(_WONDER), _TROUBLE[trouble]]
    lines.append(r.choice(solve))
    end = r.choice(_END if trouble in _TROUBLE_FRIEND else _END[1:])
    lines.append(end)
    done = []
    for line in lines:
        text = line.format(mood=mood, **words)
        for m in (mood, words["mood2"], words["friend"]):
            text = text.replace(f" a {m}", f" {article(m)}")
        done.append(first_upper(text))
    return " ".join(done)


def request(r: random.Random) -> tuple[str, str]:
    """A user's wish for a story, and the story."""
    hero, thing = r.choice(HEROES), r.choice(THINGS)
    roll = r.random()
    if roll < 0.3:
        asked = r.choice(
            ("Tell me a story.", "Write a short story.", "Can you tell me a story?", "A story, please.")
        )
        return asked, story(r)
    begin = r.choice(("Tell me a story about", "Write a short story about", "Can you tell me a story about"))
    mark = "?" if begin.startswith("Can") else "."
    if roll < 0.7:
        return f"{begin} {article(hero)}{mark}", story(r, hero)
    return f"{begin} {article(hero)} and {article(thing)}{mark}", story(r, hero, thing)
