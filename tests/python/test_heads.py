"""Training-free heads from a model's own routers: the norms and gating of each family on real routing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from spice_moe import _core, capture, fit, fit_recall
from spice_moe.fit_stats import Router
from spice_moe.shipped import tiny_model
from support import assert_same, both, prefill
from support_models import rewrite

TOKENS = [int(t) for t in np.random.default_rng(0).integers(100, 400, 48)]
# One of each kind: norm (FFN, post-attention, its own, attention's, LayerNorm with bias), router (bias, scale
# of its own), gating (softmax, sigmoid, over the chosen, square root; bias and groups in the choice).
FAMILIES = [
    *(
        "qwen2moe",
        "deepseek2-v3",
        "gpt-oss",
        "gemma4",
        "glm4moe-mtp",
        "cohere2moe",
        "dbrx",
        "arctic",
        "phimoe",
    ),
    *("qwen3next", "deepseek4", "granitehybrid", "minimax-01", "afmoe"),
]
# Whose routers read what the experts do not, or that choose in another way: predicted from history.
WITHOUT = {
    "grovemoe": "two banks",
    "llama4": "times the gate weight",
    "nemotron_h_moe": "projection",
    "kimi-k3": "projection",
}


def run(model: Path) -> capture.Chunk:
    with contextlib.closing(fit.open_model(model, fit.FitOptions(chunk=len(TOKENS)))) as llm:
        (chunk,) = capture.run(llm, [TOKENS])
    return chunk


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_routers_make_the_choices_that_llama_cpp_made(arch: str, tiny_model) -> None:
    """Each router on what its own experts read: the same experts; and the input is normalised by its norm."""
    model = tiny_model(arch, layers=3)
    heads = _core.heads.Heads(str(model))
    chunk, chooser = run(model), fit_recall.Chooser(heads)
    with_router = [g for g in range(len(heads.layers)) if heads.has_router(g)]
    assert with_router
    for group in with_router:
        router = Router.read(heads, group)
        hidden, ids = chunk.hidden[router.layer], chunk.ids[router.layer]
        chosen = chooser(router.logits(hidden), router)
        assert fit_recall.share(chosen, ids) > 0.97  # the scores are rounded differently
        if heads.router(group)["input_scale"].size:
            stream = (hidden - router.input_shift) / router.input_scale
            size = np.sqrt(np.mean(stream**2, axis=1))
            assert size.std() < 0.02 * size.mean()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.BF16, GGMLQuantizationType.F16])
def test_routers_that_are_not_f32(kind: GGMLQuantizationType, tiny_model, tmp_path: Path) -> None:
    """Converted files keep them in half precision: the same output as stock, the same choices predicted."""
    whole = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    names = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(3)]
    model = rewrite(whole, tmp_path / "half.gguf", types=dict.fromkeys(names, kind))
    with both(model, ram_budget="50%") as (stock, spice):
        assert_same(prefill(spice, TOKENS, [33, 1, 1]), prefill(stock, TOKENS, [33, 1, 1]))
        counters = spice.spice.stats()
        assert counters["expert_rows"] > 0
    heads = _core.heads.Heads(str(model))
    chunk, chooser = run(model), fit_recall.Chooser(heads)
    for group in range(3):
        router = Router.read(heads, group)
        chosen = chooser(router.logits(chunk.hidden[router.layer]), router)
        assert fit_recall.share(chosen, chunk.ids[router.layer]) > 0.97


@pytest.mark.parametrize("arch", WITHOUT)
def test_a_model_without_usable_routers_has_a_reason(arch: str, tiny_model) -> None:
    heads = _core.heads.Heads(str(tiny_model(arch, layers=4)))
    assert not any(heads.has_router(g) for g in range(len(heads.layers)))
    assert WITHOUT[arch] in heads.reason
    assert heads.bytes == 0
    assert heads.scores("training-free", 0, 1, np.zeros((1, 256), np.float32)) is None


def test_a_layer_for_a_second_token_is_no_target(tiny_model) -> None:
    heads = _core.heads.Heads(str(tiny_model("glm4moe-mtp", layers=3)))
    assert "second token" in heads.reason
    assert not heads.has("training-free", len(heads.layers) - 2, 1)


def test_the_packed_heads_give_the_scores_of_the_arrays() -> None:
    model = tiny_model()
    heads = _core.heads.Heads(str(model))
    chunk = run(model)
    for group in range(len(heads.layers) - 1):
        present, target = Router.read(heads, group), Router.read(heads, group + 1)
        rows, constant = target.seen_from(present)
        hidden = chunk.hidden[present.layer]
        wanted = hidden @ rows.T + constant
        got = heads.scores("training-free", group, 1, hidden)
        assert np.abs(got - wanted).max() < 0.03 * np.abs(wanted).max()


def test_wrong_arguments_are_refused() -> None:
    heads = _core.heads.Heads(str(tiny_model()))
    width = heads.router(0)["weight"].shape[1]
    with pytest.raises(ValueError, match="hidden must be"):
        heads.scores("training-free", 0, 1, np.zeros((1, width + 1), np.float32))
    with pytest.raises(ValueError, match="no kind of head"):
        heads.scores("oracle", 0, 1, np.zeros((1, width), np.float32))
    with pytest.raises(ValueError, match="ids must be"):
        heads.scores("training-free", 0, 1, np.zeros((2, width), np.float32), np.zeros((1, 2), np.int32))


def test_a_fingerprint_is_the_models_own(tiny_model) -> None:
    def print_of(**options: Any) -> str:
        return _core.heads.fingerprint(str(tiny_model("qwen2moe", **options)))

    assert print_of() != print_of(seed=1)
    assert print_of() != print_of(expert_type="Q8_0")
