"""bench/quality.py: scores add up, the evaluation sets are read from packages or left out."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from spice_moe.shipped import tiny_model
from support_lore import Weights, random_lore, write_lore

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import quality_sets  # noqa: E402


def test_quality(tmp_path: Path) -> None:
    model = tiny_model()
    text = tmp_path / "t.txt"
    text.write_text("<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\nOnce upon a time " * 8)
    lore = write_lore(model, tmp_path / "s.gguf", random_lore(Weights(model), gated=2, size=0.1))
    command = [
        sys.executable,
        str(BENCH / "quality.py"),
        str(model),
        "--lore",
        str(lore),
        "--text",
        str(text),
    ]
    command += ["--no-sets", "--tokens", "120", "--chunk", "64", "--shares", "0.5", "1", "--max-share", "0.2"]
    report = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert report["config"]["texts"] == {"t.txt": 120}
    rows = {(row["kind"], row["share"]): row for row in report["rows"]}
    exact = rows["exact", 0]["all"]
    assert exact["kl"] == 0 and exact["top1"] == 1 and exact["tokens"] == 118  # two windows
    for kind in ("drop", "base", "lore"):
        assert 0 < rows[kind, 0.5]["all"]["kl"] < rows[kind, 1]["all"]["kl"]
        assert rows[kind, 1]["replaced"] == 0.75  # all but the first of four
        assert 0.3 < rows[kind, 0.5]["replaced"] < 0.45
        assert rows[kind, 1]["all"]["perplexity"] != exact["perplexity"]
    light = rows["lore up to 0.2", 1]
    assert 0 < light["replaced"] < 0.75 and light["gate_mass"] < rows["lore", 1]["gate_mass"]
    assert rows["lore", 1]["expected_kl"] > 0 and rows["lore", 1]["expected_error"] > 0

    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert len(printed.splitlines()) == 2 + len(rows)


def test_sets_are_read_from_the_packages_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"prompt": "def f():", "canonical_solution": "  return 1"}
    choice = {
        "activity_label": "Tea", "ctx": "A man", "endings": ["sits", "flies off"], "expected_index": 1,
        "question": "Why?", "choices": ["a", "b", "c" * 99],
    }  # fmt: skip
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(item).encode()))
    (tmp_path / "cases.jsonl").write_text(json.dumps(choice) + "\n")
    monkeypatch.setattr(quality_sets, "data_file", lambda _, ending: tmp_path / Path(ending).name)

    def letters(text: str) -> list[int]:
        return [ord(c) for c in text]

    (code,) = quality_sets.human_eval(letters, [0], 64, 1000)
    assert code.ids == [0, *letters("def f():  return 1")] and code.scored == 9
    (question,) = quality_sets.hellaswag(letters, [], 64, 10)
    assert question.right == 1
    assert [bytes(c.ids[c.scored :]) for c in question.choices] == [b" sits", b" flies off"]
    assert quality_sets.truthful_qa(letters, [], 64, 10) == []  # too long for the window


def test_windows_have_at_most_the_tokens_asked_for() -> None:
    texts = quality_sets.windows(list(range(100)), [7], size=11, tokens=25)
    assert [t.ids for t in texts] == [[7, *range(10)], [7, *range(10, 20)], [7, *range(20, 25)]]


def test_a_set_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality_sets, "data_file", lambda *_: None)
    assert quality_sets.gsm8k(list, [], 64, 100) == []
    assert "spice-moe[bench]" in capsys.readouterr().err
