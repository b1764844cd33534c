"""Blocks of every form on the emulated device: the bits of stock, and the device computes all of them.

Every architecture of models.architectures gives one of these forms (all of them were run once).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from device_child import DeviceProcess
from spice_moe import Llama
from support import Logits, Stock, assert_same, open_model
from test_coverage import SIZES, evaluate, layers_of

# Biases; two banks of experts; gate weights before the experts; no gate projection; as most have it.
NAMES = ["gpt-oss", "grovemoe", "llama4", "nemotron_h_moe", "deepseek2"]


def run(path: Path) -> tuple[Logits, dict[str, Any]]:
    """Values of the second evaluation, when experts are on the device, and its counters."""
    options = dict(
        n_ctx=128, n_batch=64, n_ubatch=64, n_gpu_layers=99, vram_budget="100%", placement="all-fetch"
    )
    with contextlib.closing(open_model(Llama, path, **options)) as llm:
        evaluate(llm)
        if memory := llama_cpp.llama_get_memory(llm.ctx):
            llama_cpp.llama_memory_clear(memory, True)
        llm.spice.reset_stats()
        return evaluate(llm), llm.spice.stats()


def compare(emulated: DeviceProcess, path: Path) -> dict[str, Any]:
    there, stats = emulated.run(run, path)
    with contextlib.closing(open_model(Stock, path, n_ctx=128, n_batch=64, n_ubatch=64)) as stock:
        assert_same(there, evaluate(stock))
    assert stats["failures"] == 0 and stats["layer_calls"] >= len(SIZES) > 0
    return stats


@pytest.mark.parametrize("arch", NAMES)
def test_architecture(emulated: DeviceProcess, tiny_model, arch: str) -> None:
    stats = compare(emulated, tiny_model(arch, layers=layers_of(arch), expert_type="Q4_K"))
    assert stats["device_unfit"] == 0
    assert stats["device_rows"] > 0.9 * stats["expert_rows"]


@pytest.mark.parametrize(("arch", "fused"), [("qwen3moe", False), ("gemma4", True)])
def test_scales(emulated: DeviceProcess, tiny_model, arch: str, fused: bool) -> None:
    options = dict(layers=2, expert_type="Q8_0", expert_scales=True, fused_gate_up=fused)
    stats = compare(emulated, tiny_model(arch, **options))
    assert stats["device_unfit"] == 0 and stats["device_rows"] > 0.9 * stats["expert_rows"]
