"""The device benchmark runs on the emulated accelerator and reports what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.device_emulator import EmulatorUnavailableError, library_path
from models.planted import make_like

BENCH = Path(__file__).resolve().parents[2] / "bench" / "device.py"


@pytest.fixture(autouse=True)
def _emulator() -> None:
    try:
        library_path()
    except EmulatorUnavailableError as error:
        pytest.skip(str(error))


def test_device_bench(tiny_model) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    speeds = json.dumps({"upload_per_second": 1e9, "memory_bytes": 1 << 30})
    options = ["--vram", "25%", "--placements", "spice", "all-host", "--threads", "1", "--emulate", speeds]
    options += ["--decode", "4", "--warm", "4", "--prefills", "32", "--json"]
    done = subprocess.run([sys.executable, str(BENCH), str(path), *options], check=True, capture_output=True)
    report = json.loads(done.stdout)
    labels = [result["label"] for result in report["results"]]
    assert labels[0] == "stock, experts on CPU" and "(best)" in labels[1]
    assert labels[2:] == ["SPICE spice", "SPICE all-host"]
    assert report["same_tokens"], "the emulator computes with the CPU's arithmetic"
    spice = report["results"][2]["report"]
    assert spice["plan"]["device"] == "EMU0" and spice["plan"]["vram_slots"] > 0
    assert spice["counters"]["device_rows"] > 0
    assert all(result["report"]["decode_seconds"] > 0 for result in report["results"])
    assert report["results"][1]["n_cpu_moe"] == 0, "all experts fit"
    assert subprocess.run([sys.executable, str(BENCH), "nothing.gguf"], capture_output=True).returncode == 3


def test_like_a_machine(tmp_path: Path) -> None:
    """In the proportions of a preset, with products by experts that take their time and are not computed."""
    small = dict(embd=256, ff=256, layers=3, file_type="Q5_K_M")
    model = make_like("deepseek-v2-lite", tmp_path / "m.gguf", thin=True, **small)
    options = ["--like", "rtx4060", "--vram", "25%", "--ram", "100%", "--no-stock", "--turn", "3", "--json"]
    options += ["--decode", "8", "--warm", "4", "--placements", "spice", "static", "lru:all-fetch"]
    done = subprocess.run([sys.executable, str(BENCH), str(model), *options], check=True, capture_output=True)
    report = json.loads(done.stdout)
    runs = {result["label"]: result["report"] for result in report["results"]}
    assert list(runs) == ["SPICE spice", "SPICE static", "SPICE lru:all-fetch"]
    assert [len(run["turns"]) for run in runs.values()] == [3, 3, 3] and len(runs["SPICE spice"]["best"]) == 8
    assert all(report["ratios"][label][0]["ratio"] > 0 for label in list(runs)[1:])
    static, lru = runs["SPICE static"], runs["SPICE lru:all-fetch"]
    assert static["counters"]["upload_bytes"] == 0, "what the text used most is there already"
    assert static["counters"]["device_hits"] > 0 == static["counters"]["device_fetched"]
    assert lru["plan"]["strategy"] == "lru"
    assert lru["counters"]["device_left"] == 0 < lru["counters"]["device_fetched"]
    assert lru["host_before"] > 0 and lru["speed"]["upload_per_second"] * lru["factor"] == pytest.approx(
        12.5e9
    )
    seconds = lru["counters"]["upload_bytes"] * lru["factor"] / 12.5e9
    assert lru["device"]["upload_busy_seconds"] == pytest.approx(seconds, rel=0.1)
