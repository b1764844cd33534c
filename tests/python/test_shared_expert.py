"""The shared expert is computed while routed experts are being read, and the output stays stock's."""

from __future__ import annotations

import contextlib

import pytest
from spice_moe import Llama
from support import Stock, assert_same, open_model, prefill, prompt

TOKENS = prompt(40)
BATCHES = [1, 1, 2, 30, 5, 1]  # few rows per expert and many, and one batch that touches nearly all experts


# ffn_down(swiglu(gate, up)) added to the routed sum; the same times its own gate; two in one; none at all
@pytest.mark.parametrize(("arch", "shared"), [("deepseek2", 4), ("qwen2moe", 6), ("olmoe", 0)])
@pytest.mark.parametrize("ram_budget", ["30%", "60%", 1.0])
def test_early_nodes(tiny_model, arch: str, shared: int, ram_budget: str | float) -> None:
    path = tiny_model(arch, layers=3, expert_type="Q4_K", seed=1)
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = [prefill(stock, TOKENS, BATCHES), prefill(stock, TOKENS)]
    with contextlib.closing(open_model(Llama, path, ram_budget=ram_budget, prefetch=False)) as llm:
        layers = llm.spice.plan.moe_layers
        assert_same(prefill(llm, TOKENS, BATCHES), expected[0])
        early = llm.spice.stats()["early_nodes"]
        # Nothing is early where the reads end before the layer asks: luck, but not 12 times in a row.
        assert early % max(shared, 1) == 0
        assert (0 < early <= shared * layers * len(BATCHES)) if shared else early == 0

        llm.spice.reset_stats()
        assert_same(prefill(llm, TOKENS), expected[1])
        stats = llm.spice.stats()
        if ram_budget == 1.0:
            assert stats["early_nodes"] == 0, "nothing to wait for: every node has its turn"
        elif ram_budget == "60%":
            assert stats["early_nodes"] in {shared * computed for computed in range(layers + 1)}
