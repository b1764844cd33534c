"""The device benchmark runs on the emulated accelerator and reports what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.device_emulator import EmulatorUnavailableError, library_path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "device.py"


def test_device_bench(tiny_model) -> None:
    try:
        library_path()
    except EmulatorUnavailableError as error:
        pytest.skip(str(error))
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
