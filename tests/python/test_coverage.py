"""SPICE runs the experts of every MoE architecture and quantisation, with the bits of stock llama.cpp.

Each case evaluates a prompt of 40 tokens, 8 tokens one by one, and a batch of 3, with logits for every token.
In the prompt most experts have 8 rows or more, in the rest fewer: ggml has another arithmetic for each.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp._internals as internals
import numpy as np
import pytest
from gguf import GGUFReader
from spice_moe import Llama
from support import Logits, Stock, assert_same, open_model, prompt

from models.architectures import ARCHITECTURES

SIZES = [40, *[1] * 8, 3]
TOKENS = prompt(sum(SIZES))
# Every type that ggml-cpu can multiply.
TYPES = [
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q1_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "F16", "BF16", "F32"),
]
FUSED = sorted(name for name, arch in ARCHITECTURES.items() if arch.fuses)
SCALED = sorted(name for name, arch in ARCHITECTURES.items() if arch.scales)


def evaluate(llm: llama_cpp.Llama) -> Logits:
    """Values [len(TOKENS), width] of TOKENS in batches of SIZES: logits, of encoders embeddings.

    By llama.cpp's own calls: `Llama.eval` refuses models without a memory, such as diffusion models.
    """
    encoder = llm.context_params.embeddings
    get = llama_cpp.llama_get_embeddings if encoder else llama_cpp.llama_get_logits
    width = llm.n_embd() if encoder else llm.n_vocab()
    out, done = [], 0
    batch = internals.LlamaBatch(n_tokens=max(SIZES), embd=0, n_seq_max=1, verbose=False)
    with contextlib.closing(batch):
        for size in SIZES:
            batch.set_batch(TOKENS[done : done + size], n_past=done, logits_all=True)
            llm._ctx.decode(batch)
            out.append(np.ctypeslib.as_array(get(llm.ctx), shape=(size, width)).copy())
            done += size
    return np.concatenate(out)


def banks(path: Path, unused_layers: int) -> int:
    """Banks of experts that llama.cpp computes: one per MoE layer, two with adjugate experts."""
    names = [t.name for t in GGUFReader(path).tensors]
    layers = 1 + max(int(n.split(".")[1]) for n in names if n.startswith("blk.")) - unused_layers
    found = [re.match(r"blk\.(\d+)\.ffn_down_(ch)?exps\.weight", n) for n in names]
    return sum(1 for match in found if match and int(match[1]) < layers)


def compare(path: Path, arch: str, used: int, **options: Any) -> dict[str, Any]:
    """Asserts that both give the same bits and that SPICE ran every expert; returns SPICE's counters."""
    description = ARCHITECTURES[arch]
    options = dict(n_ctx=128, n_batch=64, n_ubatch=64) | options
    if description.encoder:
        options |= dict(embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE)
    with contextlib.closing(open_model(Stock, path, **options)) as stock:
        expected = evaluate(stock)
    with contextlib.closing(open_model(Llama, path, **options)) as spice:
        assert spice.spice.plan.mode == "spice"
        values = evaluate(spice)
        stats = spice.spice.stats()
    assert_same(values, expected)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected.round(3), axis=0)) > 0.9 * len(expected), "all tokens look alike"
    n = banks(path, description.unused_layers)
    assert n > 0
    assert stats["layer_calls"] == n * len(SIZES)
    assert stats["expert_rows"] == n * used * len(TOKENS)
    assert stats["failures"] == 0
    return stats


def layers_of(arch: str) -> int:
    """Two layers with experts, and whatever else the architecture has to have."""
    description = ARCHITECTURES[arch]
    return max(description.least_layers, description.dense_lead + 2 + description.unused_layers)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_architecture(arch: str, tiny_model) -> None:
    path = tiny_model(arch, layers=layers_of(arch), expert_type="Q4_K")
    stats = compare(path, arch, used=2)
    assert stats["experts_requested"] > stats["slabs_read"] > 0


@pytest.mark.parametrize("arch", FUSED)
def test_fused_gate_up(arch: str, tiny_model) -> None:
    path = tiny_model(arch, layers=layers_of(arch), expert_type="Q5_K", fused_gate_up=True)
    stats = compare(path, arch, used=2)
    assert stats["matmul_nodes"] == 2 * stats["layer_calls"]


@pytest.mark.parametrize("arch", SCALED)
def test_scales(arch: str, tiny_model) -> None:
    compare(tiny_model(arch, layers=layers_of(arch), expert_type="Q4_0", expert_scales=True), arch, used=2)


@pytest.mark.parametrize("arch", ["gemma4", "qwen3next"])
def test_fused_and_scales(arch: str, tiny_model) -> None:
    path = tiny_model(
        arch, layers=2, expert_type="Q8_0", down_type="F16", fused_gate_up=True, expert_scales=True
    )
    compare(path, arch, used=2)


@pytest.mark.parametrize("kind", TYPES)
def test_type(kind: str, tiny_model) -> None:
    """One bank row per expert: encoding all of them in the IQ types takes long."""
    path = tiny_model("olmoe", layers=1, experts=4, expert_type=kind, row_bank=1)
    assert {t.tensor_type.name for t in GGUFReader(path).tensors if "_exps." in t.name} == {kind}
    compare(path, "olmoe", used=2)


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("gpt-oss", {"expert_type": "MXFP4"}),  # as its real files: with biases
        ("gpt-oss", {"used": 1}),
        ("gpt-oss", {"experts": 1, "used": 1}),
        ("llama", {"used": 1}),
        ("llama", {"experts": 4, "used": 4}),
        ("qwen3moe", {"experts": 512, "used": 10, "ff": 32, "expert_type": "Q8_0"}),
        ("qwen3moe", {"expert_type": "NVFP4", "expert_scales": True}),
        ("deepseek2-v3", {"experts": 256, "used": 8, "ff": 32, "expert_type": "Q8_0", "layers": 2}),
        ("deepseek2", {"expert_type": "Q4_K", "down_type": "Q6_K", "ff": 96, "layers": 2}),  # falls to Q8_0
        ("deepseek2", {"split": 3, "layers": 3}),
        ("nemotron_h_moe", {"used": 1}),
        ("llama4", {"used": 1}),  # as its real files
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_variant(arch: str, options: dict[str, Any], tiny_model) -> None:
    path = tiny_model(arch, **{"layers": layers_of(arch), "expert_type": "Q4_K"} | options)
    if options.get("split"):
        merged = tiny_model(arch, **{"layers": 3, "expert_type": "Q4_K"})
        with contextlib.closing(open_model(Llama, path)) as parts:
            values = evaluate(parts)
        with contextlib.closing(open_model(Stock, merged)) as whole:
            assert_same(values, evaluate(whole))
    else:
        compare(path, arch, used=options.get("used", 2))


def test_an_expert_chosen_twice_by_one_token(tiny_model) -> None:
    """Grove's adjugate experts serve two routed ones each: a token that chose both needs one slab, twice."""
    path = tiny_model("grovemoe", layers=2, experts=8, used=4, expert_type="Q4_K")
    compare(path, "grovemoe", used=4)
    with contextlib.closing(open_model(Llama, path)) as spice:
        spice.eval(TOKENS[:40])
        spice.spice.reset_stats()
        for token in TOKENS[40:48]:
            spice.eval([token])
        stats = spice.spice.stats()
    # One token a call: experts of one bank differ, so whatever is missing was chosen twice in the other.
    assert stats["expert_rows"] == 8 * 4 * 2 * 2
    assert stats["experts_requested"] < stats["expert_rows"]
