"""Two devices: each holds the experts of the layers that llama.cpp gave it, within a budget of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import device_child
import pytest
from device_child import DeviceProcess
from spice_moe import Llama, SpiceBudgetError
from spice_moe.device import budgets_for, check_vram, owners
from support import Logits, Stock, assert_same, greedy, open_model, prefill, prompt

TOKENS = prompt(33)
SMALL = dict(arch="qwen2moe", layers=4, expert_type="Q4_K", seed=1)


def run(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Logits of a prompt and 8 greedy tokens, twice; the plan, the counters, and those of both devices."""
    with contextlib.closing(open_model(Llama, path, **{"n_gpu_layers": 99, **options})) as llm:
        for _ in range(2):
            first = prefill(llm, TOKENS)
            ids, logits = greedy(llm, TOKENS, 8)
        devices = [device_child.emulator.counters(d) for d in range(2)]
        return dict(
            first=first,
            ids=ids,
            logits=logits,
            stats=llm.spice.stats(),
            devices=devices,
            plan=str(llm.spice.plan),
        )


def stock(path: Path) -> tuple[Logits, list[int], Logits]:
    with contextlib.closing(open_model(Stock, path)) as llm:
        return prefill(llm, TOKENS), *greedy(llm, TOKENS, 8)


def assert_equal(there: dict[str, Any], here: tuple[Logits, list[int], Logits]) -> None:
    assert_same(there["first"], here[0])
    assert there["ids"] == here[1]
    assert_same(there["logits"], here[2])
    assert there["stats"]["failures"] == 0 and there["stats"]["device_rows"] > 0


@pytest.mark.parametrize("placement", ["spice", "all-fetch"])
@pytest.mark.parametrize("vram", ["auto", "30%", "30%,60%"])
def test_each_has_its_layers(emulated_two: DeviceProcess, tiny_model, vram: str, placement: str) -> None:
    path = tiny_model(**SMALL)
    there = emulated_two.run(run, path, {"vram_budget": vram, "placement": placement, "tensor_split": [1, 1]})
    assert_equal(there, stock(path))
    plan = there["stats"]["plan"]
    first, second = plan["devices"]
    assert (first["device"], second["device"]) == ("EMU0", "EMU1") and plan["device"] == "EMU0, EMU1"
    assert sorted(first["layers"] + second["layers"]) == [0, 1, 2, 3] and max(first["layers"]) < min(
        second["layers"]
    )
    assert plan["vram_slots"] == first["slots"] + second["slots"]
    assert plan["vram_budget"] == first["vram_budget"] + second["vram_budget"]
    per_layer = plan["experts_per_layer"]
    shares = [one["slots"] / (per_layer * len(one["layers"])) for one in (first, second)]
    wanted = {"auto": (1.0, 1.0), "30%": (0.3, 0.3), "30%,60%": (0.3, 0.6)}[vram]
    assert shares == pytest.approx(wanted, abs=0.1)
    assert all(device["matmul_id_nodes"] > 0 for device in there["devices"])


def test_main_gpu(emulated_two: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    there = emulated_two.run(run, path, {"split_mode": 0, "main_gpu": 1, "vram_budget": "50%"})
    assert_equal(there, stock(path))
    (only,) = there["stats"]["plan"]["devices"]
    assert only["device"] == "EMU1" and only["layers"] == [0, 1, 2, 3]
    assert there["devices"][0]["matmul_id_nodes"] == 0 < there["devices"][1]["matmul_id_nodes"]


def test_one_of_them_without_experts(emulated_two: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    there = emulated_two.run(run, path, {"vram_budget": ["50%", 0], "tensor_split": [1, 1]})
    assert_equal(there, stock(path))
    first, second = there["stats"]["plan"]["devices"]
    assert first["vram_budget"] > 0 == second["vram_budget"] and second["reason"] == "vram_budget=0"
    assert there["stats"]["plan"]["device"] == "EMU0"


def wrong(path: Path, options: dict[str, Any]) -> str:
    with pytest.raises(SpiceBudgetError) as caught:
        run(path, options)
    return str(caught.value)


def test_a_size_too_many(emulated_two: DeviceProcess, tiny_model) -> None:
    text = emulated_two.run(wrong, tiny_model(**SMALL), {"vram_budget": "1G,1G,1G"})
    assert "3 sizes" in text and "EMU0, EMU1" in text


def test_budgets() -> None:
    assert budgets_for("6G,50%", ["A", "B"]) == ["6G", "50%"]
    assert budgets_for(0.5, ["A", "B"]) == [0.5, 0.5]
    assert budgets_for("auto", []) == []
    with pytest.raises(SpiceBudgetError, match="one for each"):
        budgets_for(["1G"] * 2, ["A"])
    for bad in ("6G,", [], "6G,-1", [1, True]):
        with pytest.raises((TypeError, ValueError)):
            check_vram(bad)


def test_owners() -> None:
    assert owners({}, [1, 2]) == {"": [1, 2]}
    assert owners({0: "CPU", 1: "CPU"}, [1]) == {"": [1]}
    assigned = {0: "CPU", 1: "CPU", 2: "B", 3: "B", 4: "A"}
    assert owners(assigned, [1, 2, 3, 4]) == {"B": [1, 2, 3], "A": [4]}
    assert owners(assigned, [1]) == {"B": [1]}
