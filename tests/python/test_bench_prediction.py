"""bench/prediction.py runs, says what it ran, and its heads and predictors agree with each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from spice_moe.shipped import tiny_model

BENCH = Path(__file__).resolve().parents[2] / "bench" / "prediction.py"


def test_prediction(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\nOnce upon a time " * 30)
    options = ["--text", str(text), "--tokens", "200", "--chunk", "100", "--skip", "0"]
    command = [sys.executable, str(BENCH), str(tiny_model()), *options]
    report = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert report["config"]["tokens"] == 200
    recall = report["horizons"]
    assert recall.keys() >= {"training-free", "history (ids only)", "router (training-free scores)"}
    for values in recall.values():
        assert all(0.25 < v < 1.0 for v in values[:2])  # chance is a quarter
        assert values[2:] == [None] * 4  # the model has three layers with experts
    assert "adapter" not in recall  # there is no sidecar
    # What only sees the scores finds about what the scores say.
    assert abs(recall["router (training-free scores)"][0] - recall["training-free"][0]) < 0.05
    layers = report["by_layer"]["training-free"]
    assert layers["1"] == [None] * 6 and layers["3"][1] is not None

    printed = subprocess.run(
        [*command, "--predictors", "history"], check=True, capture_output=True, text=True
    )
    assert "history (ids only)" in printed.stdout and "router (" not in printed.stdout
