"""Stand-ins for experts (LoRE): what they compute is the format's definition, on every path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spice_moe import Llama
from support import Stock, assert_same, open_model, prefill, prompt
from support_lore import Weights, random_lore, stand_in, write_lore


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    with contextlib.closing(open_model(Llama, path, prefetch=False, **options)) as llm:
        yield llm, llm.spice._core


MODELS = {
    "shared": ("deepseek2", {}, True),
    "gated shared": ("qwen2moe", {}, True),
    "fused": ("deepseek2", {"fused_gate_up": True}, True),
    "no shared": ("olmoe", {}, False),
    "mixtral": ("llama", {}, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_stand_in_that_equals_its_experts_changes_nothing(tiny_model, tmp_path: Path, name: str) -> None:
    """Every part is random but the bias, which makes up the difference to the expert for one token."""
    arch, options, shared = MODELS[name]
    path = tiny_model(arch, layers=3, expert_type="F32", used=4, seed=1, **options)
    weights = Weights(path)
    lore = random_lore(weights, rank=5, base_rank=3, shared=shared)
    with opened(path) as (llm, core):
        core.start_capture()
        exact = prefill(llm, [7])
        hidden = {layer: h[0] for layer, h, _ in core.take_capture()}
    for layer in weights.layers:
        bias = lore[f"lore.{layer}.bias"]
        bias[:] = 0
        for e in range(len(bias)):
            h = hidden[layer]
            bias[e] = weights.expert(layer, e, h) - stand_in(weights, lore, layer, e, h)
    file = write_lore(path, tmp_path / "lore.gguf", lore)
    with opened(path) as (llm, core):
        core.load_lore(str(file))
        assert_same(prefill(llm, [7]), exact)
        core.set_substitution("lore", 1.0)
        logits = prefill(llm, [7])
        stats = llm.spice.stats()
        core.set_substitution("base", 1.0)
        other = prefill(llm, [7])
        core.set_substitution("off")
        assert_same(prefill(llm, [7]), exact)
    assert stats["lore_substituted"] == 3 * llm.spice.plan.moe_layers
    spread = np.abs(exact).max()
    assert 0 < np.abs(logits - exact).max() < 2e-3 * spread
    assert np.abs(other - exact).max() > 0.02 * spread, "the parts that were left out matter"
