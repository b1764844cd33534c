"""What substituting missed experts costs in quality: `bench/quality.py MODEL --lore SIDECAR --text FILE`.

A share of the routed experts is taken for missing by lot, whatever is in memory (the same ones for every
kind; never a token's first expert), and replaced: by nothing (drop), by their mean output (base), by the
stand-ins of each --lore file, and by those only for experts with at most --max-share of the token's gate
weights (thresholds). Each is compared with the exact model on the same tokens: KL divergence, top-1
agreement, perplexity on the texts, on GSM8K and on HumanEval's canonical solutions, and the share of
HellaSwag and TruthfulQA questions whose right answer has the greatest log-likelihood (per token for
HellaSwag). "error" is what the file's calibration expects of the blocks' outputs, "exp. KL" of the KL.

The evaluation sets come from packages (the extra `bench`); what is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quality_sets import Question, Text, gsm8k, hellaswag, human_eval, truthful_qa, windows
from spice_moe import capture, fit
from spice_moe.fit_lore_sensitivity import divergence, log_probabilities

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """One way to replace, for one share. label: as printed."""

    label: str
    kind: str  # of _core.Model.set_substitution
    share: float
    max_share: float = 1.0


@dataclass
class Score:
    """Sums over the tokens of a set, or over its questions."""

    tokens: int = 0
    kl: float = 0.0
    agree: int = 0
    nll: float = 0.0
    questions: int = 0
    right: int = 0
    exact_choice: int = 0

    def result(self) -> dict[str, Any]:
        if self.questions:
            n = self.questions
            return {"questions": n, "right": self.right / n, "as_exact": self.exact_choice / n}
        n = max(1, self.tokens)
        return {
            "tokens": self.tokens, "kl": self.kl / n, "top1": self.agree / n, "nll": self.nll / n,
            "perplexity": float(np.exp(self.nll / n)),
        }  # fmt: skip


@dataclass
class Bench:
    """One model and what is scored on it."""

    llm: Any
    texts: dict[str, list[Text]]
    questions: dict[str, list[Question]]
    scores: dict[tuple[str, float, str], Score] = field(default_factory=dict)
    counted: dict[tuple[str, float], dict[str, float]] = field(default_factory=dict)

    def run(self, settings: list[Setting], progress: Callable[[float], object]) -> None:
        """Score all settings; of a set each item goes through all of them, so that one item's exact
        distributions are in memory at a time."""
        items = list(self._items())
        for number, (name, item) in enumerate(items):
            if isinstance(item, Text):
                self._score_text(settings, name, item, number)
            else:
                self._score_question(settings, name, item, number)
            progress((number + 1) / len(items))

    def _items(self) -> Iterator[tuple[str, Text | Question]]:
        for name, texts in self.texts.items():
            yield from ((name, text) for text in texts)
        for name, questions in self.questions.items():
            yield from ((name, question) for question in questions)

    def _evaluate(self, setting: Setting | None, ids: list[int], seed: int) -> Floats:
        core = self.llm.spice._core
        if setting is None:
            core.set_substitution("off")
            return log_probabilities(self.llm, ids)
        core.set_substitution(setting.kind, setting.share, seed, -1, setting.max_share)
        before = core.stats()
        out = log_probabilities(self.llm, ids)
        after = core.stats()
        counted = self.counted.setdefault((setting.label, setting.share), {})
        for key in ("lore_rows", "lore_pairs", "lore_substituted", "lore_gate_mass", "lore_error", "lore_kl"):
            counted[key] = counted.get(key, 0.0) + after[key] - before[key]
        counted["tokens"] = counted.get("tokens", 0) + len(ids)
        core.set_substitution("off")
        return out

    def _score_text(self, settings: list[Setting], name: str, text: Text, seed: int) -> None:
        ids = np.array(text.ids)
        rows = np.arange(text.scored - 1, len(ids) - 1)  # that predict a scored token
        exact = self._evaluate(None, text.ids, seed)[rows]
        for setting in (None, *settings):
            got = exact if setting is None else self._evaluate(setting, text.ids, seed)[rows]
            score = self._score(setting, name)
            score.tokens += len(rows)
            score.kl += float(divergence(exact, got).sum())
            score.agree += int((exact.argmax(axis=1) == got.argmax(axis=1)).sum())
            score.nll -= float(got[np.arange(len(rows)), ids[rows + 1]].sum())

    def _score_question(self, settings: list[Setting], name: str, question: Question, seed: int) -> None:
        exact = self._choose(None, name, question, seed)
        for setting in (None, *settings):
            chosen = exact if setting is None else self._choose(setting, name, question, seed)
            score = self._score(setting, name)
            score.questions += 1
            score.right += chosen == question.right
            score.exact_choice += chosen == exact

    def _choose(self, setting: Setting | None, name: str, question: Question, seed: int) -> int:
        likelihoods = []
        for choice in question.choices:
            rows = np.arange(choice.scored - 1, len(choice.ids) - 1)
            got = self._evaluate(setting, choice.ids, seed)[rows, np.array(choice.ids)[rows + 1]]
            likelihoods.append(got.mean() if name == "hellaswag" else got.sum())
        return int(np.argmax(likelihoods))

    def _score(self, setting: Setting | None, name: str) -> Score:
        key = ("exact", 0.0, name) if setting is None else (setting.label, setting.share, name)
        return self.scores.setdefault(key, Score())

    def result(self) -> list[dict[str, Any]]:
        """One row per setting: its scores by set, the share really replaced, and what was expected of it."""
        out: list[dict[str, Any]] = []
        for label, share in dict.fromkeys((label, share) for label, share, _ in self.scores):
            row: dict[str, Any] = {"kind": label, "share": share}
            counted = self.counted.get((label, share))
            if counted:
                rows = max(1.0, counted["lore_rows"])
                row["replaced"] = counted["lore_substituted"] / max(1.0, counted["lore_pairs"])
                row["gate_mass"] = counted["lore_gate_mass"] / rows
                row["expected_error"] = counted["lore_error"] / rows
                row["expected_kl"] = counted["lore_kl"] / max(1.0, counted["tokens"])
            names = [n for a, b, n in self.scores if (a, b) == (label, share)]
            row["sets"] = {n: self.scores[label, share, n].result() for n in names}
            texts = [self.scores[label, share, n] for n in names if n in self.texts]
            row["all"] = _sum(texts).result()
            out.append(row)
        return out


def _sum(scores: list[Score]) -> Score:
    out = Score()
    for s in scores:
        out.tokens, out.kl, out.agree, out.nll = (
            out.tokens + s.tokens, out.kl + s.kl, out.agree + s.agree, out.nll + s.nll
        )  # fmt: skip
    return out


def settings_of(label: str, first: bool, options: argparse.Namespace) -> list[Setting]:
    """Of one sidecar; what does not depend on it with the first one only."""
    out = []
    for share in options.shares:
        if first:
            out += [Setting(kind, kind, share) for kind in options.kinds]
        out.append(Setting(label, "lore", share))
        if options.max_share < 1:
            out.append(Setting(f"{label} up to {options.max_share:g}", "lore", share, options.max_share))
    return out


def run(options: argparse.Namespace, progress: Callable[[float], object]) -> dict[str, Any]:
    used = fit.FitOptions(
        chunk=options.chunk,
        expert_used=options.experts_used,
        n_threads=options.threads,
        ram_budget=options.ram,
    )
    started = time.monotonic()
    with contextlib.closing(fit.open_model(options.model, used)) as llm:
        lead = capture.cut(llm, [0], options.chunk)[0][:-1]

        def tokenize(text: str) -> list[int]:
            return capture.tokenize(llm, text)

        size, tokens, items = options.chunk, options.tokens, options.items
        texts = {
            path.name: windows(
                tokenize(path.read_text(encoding="utf-8", errors="replace")), lead, size, tokens
            )
            for path in options.text
        }
        questions: dict[str, list[Question]] = {}
        if options.sets:
            texts["gsm8k"] = gsm8k(tokenize, lead, size, tokens)
            texts["humaneval"] = human_eval(tokenize, lead, size, tokens)
            questions["hellaswag"] = hellaswag(tokenize, lead, size, items)
            questions["truthfulqa"] = truthful_qa(tokenize, lead, size, items)
        bench = Bench(llm, {k: v for k, v in texts.items() if v}, {k: v for k, v in questions.items() if v})
        if not bench.texts:
            raise SystemExit("there is no text to score: give --text FILE")
        plans = []
        for number, path in enumerate(options.lore):
            llm.spice._core.load_lore(str(path))
            label = f"lore {path.name}" if len(options.lore) > 1 else "lore"
            plans.append(llm.spice._core.lore())
            part = (number / len(options.lore), 1 / len(options.lore))
            bench.run(settings_of(label, number == 0, options), lambda f, p=part: progress(p[0] + f * p[1]))
        return {
            "config": {
                "model": str(options.model),
                "lore": [str(path) for path in options.lore],
                "lore_plans": [dict(plan) for plan in plans],
                "experts_used": options.experts_used or "the model's own",
                "texts": {name: sum(len(t.ids) for t in v) for name, v in bench.texts.items()},
                "questions": {name: len(v) for name, v in bench.questions.items()},
                "chunk": size,
                "shares": options.shares,
                "max_share": options.max_share,
                "seconds": round(time.monotonic() - started, 1),
            },
            "rows": bench.result(),
        }


def print_table(result: dict[str, Any]) -> None:
    print(json.dumps(result["config"]))
    rows = result["rows"]
    texts = [n for n, s in rows[0]["sets"].items() if "kl" in s]
    others = [n for n, s in rows[0]["sets"].items() if "right" in s]
    width = max(4, *(len(row["kind"]) for row in rows))
    print(
        f"{'':{width}} misses replaced  gates    error  exp. KL       KL  top-1"
        + "".join(f" {'ppl ' + n[:12]:>16}" for n in texts)
        + "".join(f" {n[:12]:>12}" for n in others)
    )
    for row in rows:
        extra = [row.get(k) for k in ("replaced", "gate_mass", "expected_error", "expected_kl")]
        cells = [
            f"{'' if v is None else format(v, '.3g'):>{w}}" for v, w in zip(extra, (8, 6, 8, 8), strict=True)
        ]
        print(
            f"{row['kind']:{width}} {row['share']:>6.0%} {' '.join(cells)} {row['all']['kl']:>8.4f} "
            f"{row['all']['top1']:>6.1%}"
            + "".join(f" {row['sets'][n]['perplexity']:>16.2f}" for n in texts)
            + "".join(f" {row['sets'][n]['right']:>12.1%}" for n in others)
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a .gguf file")
    add("--lore", type=Path, action="append", required=True, help="a sidecar with stand-ins; several: ranks")
    add("--text", type=Path, action="append", default=[], help="a UTF-8 text that was not fitted")
    add("--sets", action=argparse.BooleanOptionalAction, default=True, help="the evaluation sets of packages")
    add("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0], help="of misses replaced")
    add("--kinds", nargs="*", default=["drop", "base"], choices=["drop", "base"], help="beside stand-ins")
    add("--max-share", type=float, default=1.0, help="thresholds: of the gate weights; 1: without")
    add("--tokens", type=int, default=1024, help="of each text (default 1024)")
    add("--items", type=int, default=25, help="of each set of questions (default 25)")
    add("--chunk", type=int, default=256, help="longest sequence (default 256)")
    add("--experts-used", type=int, default=0, help="experts per token; 0: the model's own number")
    add("--threads", type=int, default=0, help="0: all cores")
    add("--ram", default="auto", help="memory for experts, as in spice-run; changes no result")
    add("--plot", type=Path, help="write the curves to this .png; needs matplotlib")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)

    def progress(part: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{part:4.0%}", end="" if part < 1 else "\n", file=sys.stderr, flush=True)

    result = run(options, progress)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)
    if options.plot:
        from quality_plot import plot

        plot(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
