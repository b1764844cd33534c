"""SPICE beside a device that holds everything but the experts: the logits stay the CPU's, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from device_child import DeviceProcess
from spice_moe import Llama
from support import Counts, Logits, Stock, assert_same, greedy, open_model, prefill, prompt

TOKENS = prompt(33)
STEPS = 8


def core_of(llm: Llama) -> Any:
    assert llm._attachment is not None
    return llm._attachment.core


def expected(path: Path, options: dict[str, Any]) -> tuple[Logits, list[int], Logits]:
    """What stock llama.cpp computes on the CPU, in a process without a device."""
    with contextlib.closing(open_model(Stock, path, **options)) as llm:
        return prefill(llm, TOKENS), *greedy(llm, TOKENS, STEPS)


def beside(path: Path, options: dict[str, Any]) -> tuple[Logits, list[int], Logits, dict[str, Any]]:
    """The same by SPICE, everything else on the device; and SPICE's counters."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, vram_budget=0, **options)) as llm:
        counts = Counts(llm)
        assert core_of(llm).device_needs()["device"] in ("EMU0", "RPC0"), "there is a device to compute on"
        first = prefill(llm, TOKENS)
        counts.expect(batches=1, tokens=33)
        counts = Counts(llm)
        ids, logits = greedy(llm, TOKENS, STEPS)
        counts.expect(batches=1 + STEPS, tokens=33 + STEPS)
        return first, ids, logits, llm.spice.stats()


@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2", "olmoe", "llama"])
def test_everything_else_on_the_device(device: DeviceProcess, tiny_model, arch: str) -> None:
    path = tiny_model(arch, layers=3, expert_type="Q4_K", seed=1)
    first, ids, logits = expected(path, {})
    there = device.run(beside, path, {})
    assert_same(there[0], first)
    assert there[1] == ids
    assert_same(there[2], logits)
    assert there[3]["graph_calls"] == there[3]["layer_calls"], "a layer is one piece of the graph"


@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_with_a_pool_in_memory_too(device: DeviceProcess, tiny_model, budget: float) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    first, ids, logits = expected(path, {})
    there = device.run(beside, path, {"ram_budget": budget})
    assert_same(there[0], first)
    assert there[1] == ids
    assert_same(there[2], logits)
    assert there[3]["evictions"] > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_some_layers_on_the_device(device: DeviceProcess, tiny_model, layers: int) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    first, _, logits = expected(path, {})
    there = device.run(beside_some, path, layers)
    assert_same(there[0], first)
    assert_same(there[1], logits)


def beside_some(path: Path, layers: int) -> tuple[Logits, Logits]:
    """As :func:`beside` with the last ``layers`` layers on the device."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=layers, vram_budget=0)) as llm:
        return prefill(llm, TOKENS), greedy(llm, TOKENS, STEPS)[1]
