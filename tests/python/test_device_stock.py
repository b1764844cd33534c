"""The emulated accelerator is an honest device: stock llama.cpp on it gives the CPU's logits, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import device_child
import numpy as np
import pytest
from device_child import DeviceProcess
from support import Logits, Stock, assert_same, greedy, open_model, prefill, prompt

from bench.device_emulator import Speed

TOKENS = prompt(33)


def stock(path: Path, options: dict) -> tuple[Logits, list[int], Logits, dict]:
    """Logits of a prompt and of 8 greedy tokens, and what the devices counted."""
    speed = options.pop("speed", None)
    if speed is not None:
        device_child.emulator.configure(speed)
    with contextlib.closing(open_model(Stock, path, **options)) as llm:
        first = prefill(llm, TOKENS)
        ids, logits = greedy(llm, TOKENS, 8)
    counters = {} if device_child.emulator is None else device_child.emulator.counters()
    return first, ids, logits, counters


@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2", "llama"])
@pytest.mark.parametrize("speed", [Speed(), Speed(upload_per_second=2e9, copy_latency_seconds=2e-4)])
def test_stock_on_the_device_equals_the_cpu(emulated: DeviceProcess, tiny_model, arch, speed) -> None:
    path = tiny_model(arch, layers=3, expert_type="Q4_K", seed=1)
    first, ids, logits, _ = stock(path, {})
    there = emulated.run(stock, path, {"n_gpu_layers": 99, "main_gpu": 0, "split_mode": 0, "speed": speed})
    assert_same(there[0], first)
    assert there[1] == ids
    assert_same(there[2], logits)
    counters = there[3]
    assert counters["matmul_id_nodes"] > 0 and counters["upload_bytes"] > 100_000
    assert np.isfinite(there[2]).all()
