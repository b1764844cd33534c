"""Stand-ins for experts (LoRE): what they compute is the format's definition, on every path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_child import DeviceProcess
from spice_moe import Llama
from support import Stock, assert_same, open_model, prefill, prompt
from support_lore import Weights, random_lore, stand_in, write_lore


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    with contextlib.closing(open_model(Llama, path, prefetch=False, **options)) as llm:
        yield llm, llm.spice._core


MODELS = {
    "shared": ("deepseek2", {}),
    "gated shared": ("qwen2moe", {}),
    "fused": ("deepseek2", {"fused_gate_up": True}),
    "no shared": ("olmoe", {}),
    "mixtral": ("llama", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_stand_in_that_equals_its_experts_changes_nothing(tiny_model, tmp_path: Path, name: str) -> None:
    """Every part is random but the bias, which makes up the difference to the expert for one token."""
    arch, options = MODELS[name]
    path = tiny_model(arch, layers=3, expert_type="F32", used=4, seed=1, **options)
    weights = Weights(path)
    lore = random_lore(weights, rank=5, gated=2)
    with opened(path) as (llm, core):
        core.start_capture()
        exact = prefill(llm, [7])
        hidden = {layer: h[0] for layer, h, *_ in core.take_capture()}
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


@pytest.mark.parametrize(
    "arch", ["olmoe", "qwen2moe"]
)  # gate weights that are not normalised over the chosen
def test_dropping_all_but_the_top_is_a_model_that_uses_one_expert(tiny_model, arch: str) -> None:
    path = tiny_model(arch, layers=3, expert_type="F32", used=4, seed=1)
    one = {"kv_overrides": {f"{arch}.expert_used_count": 1}}
    with contextlib.closing(open_model(Stock, path, **one)) as stock:
        expected = prefill(stock, prompt(40), [1, 2, 30])
    for budget in (1.0, "60%", "15%"):
        with opened(path, ram_budget=budget) as (llm, core):
            core.set_substitution("drop", 1.0)
            logits = prefill(llm, prompt(40), [1, 2, 30])
            assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
            stats = llm.spice.stats()
            assert stats["lore_substituted"] == 3 * stats["lore_rows"] == 3 * 3 * 40
            assert stats["expert_rows"] == 3 * 40


PATHS = {
    "one by one": ([1] * 40, {}),
    "batches": ([2, 7, 31], {}),
    "two threads": ([1, 39], {"n_threads": 2, "n_threads_batch": 2}),
    "waves": ([1, 2, 37], {"ram_budget": "60%"}),
    "streaming": ([1, 1, 38], {"ram_budget": "15%"}),
    "micro-batches": ([40], {"n_batch": 16, "n_ubatch": 16}),
}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("deepseek2", {}),
        ("qwen2moe", {}),
        ("qwen2moe", {"expert_type": "Q4_K"}),
        ("deepseek2", {"fused_gate_up": True}),
        ("gpt-oss", {}),  # biases of the experts
        ("llama", {"expert_scales": True}),
        ("hy_v3", {"expert_scales": True}),
    ],
)
def test_every_path_replaces_the_same_pairs(
    tiny_model, tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    """The lot depends on rows and experts alone, so all ways to evaluate a text must agree, to rounding."""
    path = tiny_model(arch, **{"layers": 3, "expert_type": "F32", "used": 3, "seed": 1, **options})
    lore = random_lore(Weights(path))
    file = write_lore(path, tmp_path / "lore.gguf", lore)
    results = {}
    for name, (chunks, settings) in PATHS.items():
        with opened(path, **settings) as (llm, core):
            core.load_lore(str(file))
            core.set_substitution("lore", 0.5, seed=3)
            logits = prefill(llm, prompt(40), chunks)
            stats = llm.spice.stats()
            assert stats["lore_unfit"] == stats["failures"] == 0
            results[name] = logits, stats["lore_substituted"], stats["lore_kl"]
    logits, count, nats = results["one by one"]
    assert np.isfinite(logits).all()
    tolerance = 1e-3 if options.get("expert_type") is None else 0.05
    for name, (others, n, kl) in results.items():
        assert n == count, name
        assert kl == pytest.approx(nats, rel=tolerance), name
        assert np.abs(others - logits).max() < tolerance * np.abs(logits).max(), name


def test_only_missed_experts_are_replaced_and_not_read(tiny_model, tmp_path: Path) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    file = write_lore(path, tmp_path / "lore.gguf", random_lore(Weights(path)))
    tokens, chunks = prompt(80), [20, *[1] * 60]
    with opened(path, ram_budget="40%") as (llm, _):
        exact = prefill(llm, tokens, chunks)
        exactly = llm.spice.stats()
    with opened(path, ram_budget="40%") as (llm, core):
        core.load_lore(str(file))
        core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0)
        logits = prefill(llm, tokens, chunks)
        stats = llm.spice.stats()
        llm.spice.reset_stats()
        assert llm.spice.stats()["lore_rows"] == 0
    assert_same(logits[:20], exact[:20])  # a prompt
    assert not np.array_equal(logits[20:], exact[20:])
    assert stats["lore_rows"] == 3 * 60
    assert 0 < stats["lore_substituted"] < 0.75 * stats["lore_pairs"]
    assert stats["expert_rows"] + stats["lore_substituted"] == exactly["expert_rows"]
    assert stats["slabs_read"] < 0.7 * exactly["slabs_read"]
    assert 0 < stats["lore_gate_mass"] < stats["lore_rows"]

    with opened(path, ram_budget=1.0) as (llm, core):  # everything is there after the first round
        core.load_lore(str(file))
        prefill(llm, tokens, chunks)
        core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0, prompts=True)
        prefill(llm, tokens, [80])  # what was never used may be missed
        llm.spice.reset_stats()
        assert_same(prefill(llm, tokens, chunks), exact)
        stats = llm.spice.stats()
        assert stats["lore_rows"] == 3 * 80
        assert stats["lore_substituted"] == 0

    with opened(path, ram_budget="40%") as (llm, core):
        core.load_lore(str(file))
        core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0, prompts=True)
        prefill(llm, tokens, [10] * 8)  # more, and each expert is the first of some token
        assert llm.spice.stats()["lore_substituted"] > 0


def test_a_budget_is_kept(tiny_model, tmp_path: Path) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    file = write_lore(path, tmp_path / "lore.gguf", random_lore(Weights(path)))
    spent = []
    for budget in (1e-4, 1e-3, 1e-2):
        with opened(path, ram_budget="40%") as (llm, core):
            core.load_lore(str(file))
            core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0, budget=budget)
            prefill(llm, prompt(140), [20, *[1] * 120])
            stats = llm.spice.stats()
            spent.append(stats["lore_kl"] / 120)
            assert spent[-1] <= budget
    assert spent[0] < spent[1] < spent[2]


def test_a_curve_maps_what_is_expected_and_the_budget(tiny_model, tmp_path: Path) -> None:
    """Twice the sum up to a point that one token does not reach, then half as much for more."""
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    lore = random_lore(Weights(path))
    kl = {}
    for name, curve in {"sum": [], "twice": [[1e3, 2e3]], "bent": [[1e-6, 2e-3], [1.0, 0.5]]}.items():
        extra = {"lore-kl.curve": np.array(curve, np.float32)} if curve else {}
        file = write_lore(path, tmp_path / f"{name}.gguf", {**lore, **extra})
        with opened(path) as (llm, core):
            core.load_lore(str(file))
            core.set_substitution("lore", 1.0)
            prefill(llm, prompt(40), [40])
            kl[name] = llm.spice.stats()["lore_kl"] / 40
    assert kl["twice"] == pytest.approx(2 * kl["sum"])
    assert kl["bent"] == pytest.approx(2e-3 + 0.498 * kl["sum"], rel=1e-3)
    with opened(path, ram_budget="40%") as (llm, core):
        core.load_lore(str(tmp_path / "bent.gguf"))
        core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0, budget=1e-3)
        prefill(llm, prompt(140), [20, *[1] * 120])
        assert llm.spice.stats()["lore_substituted"] == 0  # the budget buys half of 1e-6
        core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0, budget=2e-2)
        prefill(llm, prompt(140), [20, *[1] * 120])
        stats = llm.spice.stats()
        assert stats["lore_substituted"] > 0
        assert 0 < stats["lore_kl"] / 120 <= 2e-2


def device_lore(path: Path, file: Path) -> tuple[np.ndarray, dict[str, Any], np.ndarray, dict[str, Any]]:
    """Beside a device: a forced half of the pairs, then the missed ones."""
    out: list[Any] = []
    settings = dict(n_gpu_layers=99, vram_budget="30%", ram_budget="30%", prefetch=False)
    for rules in (False, True):
        with contextlib.closing(open_model(Llama, path, **settings)) as llm:
            core = llm.spice._core
            core.load_lore(str(file))
            prefill(llm, prompt(40), [40])
            if rules:
                core.use_lore(max_share=1.0, max_mass=1.0, max_confidence=1.0)
            else:
                core.set_substitution("lore", 1.0)
            llm.spice.reset_stats()
            out += [prefill(llm, prompt(40), [1] * 40), llm.spice.stats()]
    return tuple(out)


def test_beside_a_device(emulated: DeviceProcess, tiny_model, tmp_path: Path) -> None:
    path = tiny_model("olmoe", layers=3, expert_type="Q4_K", experts=16, used=4, seed=1)
    file = write_lore(path, tmp_path / "lore.gguf", random_lore(Weights(path)))
    forced, stats, missed, missed_stats = emulated.run(device_lore, path, file)
    assert np.isfinite(forced).all() and np.isfinite(missed).all()
    for s in (stats, missed_stats):
        assert 0 < s["lore_substituted"] < s["lore_pairs"]
        assert s["expert_rows"] + s["device_rows"] >= 0
        assert s["device_rows"] > 0
    assert missed_stats["lore_substituted"] < stats["lore_substituted"]
