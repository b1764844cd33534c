"""The training stream of spice-tiny: rows of whole documents, drawn anew for every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.tiny import stories, tasks, texts
from models.tiny.facts import words
from models.tiny.tokens import END_OF_TEXT, IM_END, IM_START, Tokens

CHAT, STORY, PROSE = "chat", "story", "prose"
QUESTION_WEIGHT = 0.1  # what a user's words count in the loss beside the assistant's

Turn = tuple[str, str]


class Corpus:
    """Draws documents. Every twentieth prose document is held out."""

    def __init__(self, folder: Path, shares: dict[str, float] | None = None) -> None:
        stdlib, wordnet = texts.fetch(folder)
        documents = texts.prose(stdlib)
        self.held_out_prose = documents[::20]
        self.prose = [d for i, d in enumerate(documents) if i % 20]
        self.definitions = texts.definitions(wordnet)
        self.shares = shares or {CHAT: 0.9, STORY: 0.08, PROSE: 0.02}

    def define(self, r: random.Random) -> Turn:
        word, gloss = r.choice(self.definitions)
        said = word if word in _MASS else tasks.article(word)
        q = r.choice((f"What is {said}?", f"Define {word}.", f"What does {word} mean?"))
        return q, f"{tasks.first_upper(word)}: {gloss}."

    def turn(self, r: random.Random, held_out: bool = False) -> Turn:
        roll = r.random()
        if roll < 0.06:
            question, answer = self.define(r)
        elif roll < 0.1:
            question, answer = stories.request(r)
        else:
            question, answer = tasks.draw(r, held_out=held_out)
        return tasks.roughen(question, r), answer

    def chat(self, r: random.Random, held_out: bool = False) -> list[Turn]:
        return [self.turn(r, held_out) for _ in range(r.choice((1, 1, 2, 3, 4, 5, 6)))]


_MASS = set(
    words("""
    winter summer autumn butter bread cheese honey sugar salt pepper coffee tea wine gold silver
    iron copper glass coal oil paper lightning thunder
""")
)


def render(turns: list[Turn]) -> str:
    """A conversation in the chat template's form."""
    ask, say = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"
    return "".join(ask.format(q) + say.format(a) for q, a in turns)


def chat_weights(ids: list[int]) -> list[float]:
    """Loss weight of each token of a rendered conversation: full for the assistant's words and end mark."""
    weights, inside, answers = [], 0, False
    for token in ids:
        if token == IM_START:
            inside, answers = 0, not answers
            weights.append(QUESTION_WEIGHT)
            continue
        inside += 1
        asking = answers  # the first IM_START opens a question
        weights.append(QUESTION_WEIGHT if asking or inside <= 2 else 1.0)
    return weights


class Stream:
    """Batches of ids (int64) and loss weights (float32), each [rows, time + 1], made from the step."""

    def __init__(self, corpus: Corpus, tokens: Tokens) -> None:
        self.corpus, self.tokens = corpus, tokens
        self.prose = tokens.encode_all(corpus.prose)

    def document(self, r: random.Random) -> tuple[list[int], list[float]]:
        shares = self.corpus.shares
        kind = r.choices(list(shares), list(shares.values()))[0]
        if kind == PROSE:
            ids = [*r.choice(self.prose), END_OF_TEXT]
            return ids, [1.0] * len(ids)
        if kind == STORY and r.random() < 0.3:
            ids = [*self.tokens.encode(stories.story(r)), END_OF_TEXT]
            return ids, [1.0] * len(ids)
        turns = [stories.request(r)] if kind == STORY else self.corpus.chat(r)
        ids = [*self.tokens.encode(render(turns)), END_OF_TEXT]
        return ids, chat_weights(ids)

    def batch(self, step: int, rows: int, time: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        r = random.Random(f"spice-tiny {step}")
        ids = np.empty((rows, time + 1), np.int64)
        weights = np.empty((rows, time + 1), np.float32)
        for row in range(rows):
            seen: list[int] = []
            counts: list[float] = []
            while len(seen) <= time:
                a, b = self.document(r)
                seen += a
                counts += b
            ids[row], weights[row] = seen[: time + 1], counts[: time + 1]
        return ids, weights


def sample_texts(corpus: Corpus, count: int = 12000) -> Iterator[str]:
    """Texts for learning the vocabulary, in the mixture of the training."""
    r = random.Random("vocabulary")
    for _ in range(count):
        kind = r.choices(list(corpus.shares), list(corpus.shares.values()))[0]
        if kind == PROSE:
            yield r.choice(corpus.prose)
        elif kind == STORY:
            yield stories.story(r)
        else:
            yield "\n".join(f"user\n{q}\nassistant\n{a}\n" for q, a in corpus.chat(r))


__all__ = ["CHAT", "IM_END", "PROSE", "STORY", "Corpus", "Stream", "chat_weights", "render", "sample_texts"]
