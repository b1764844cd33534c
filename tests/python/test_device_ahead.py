"""Sending experts ahead to a device: they are there when their layer comes, and the logits stay exact."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import device_child
import pytest
from device_child import DeviceProcess
from spice_moe import Llama
from support import Stock, assert_same, greedy, open_model, prefill, prompt
from test_device_pool import SMALL, STEPS, TOKENS, assert_equal, device_run, stock_run
from test_exactness import SecondContext

from bench.device_emulator import Speed
from bench.device_sim import compare, run, simulate

MODEL = dict(arch="qwen2moe", layers=6, experts=16, expert_type="Q4_K", seed=1)
ALWAYS = {"vram_budget": "30%", "prefetch": "always", "preload": False}


def assert_consistent(stats: dict[str, Any]) -> None:
    """What was sent ahead before the counters were reset may be used or leave after."""
    ended = sum(stats[f"device_prefetch_{end}"] for end in ("used", "late", "wasted"))
    assert ended <= stats["device_prefetched"] + stats["plan"]["vram_slots"]


@pytest.mark.parametrize("predictor", ["ensemble", "history", "router"])
@pytest.mark.parametrize("ram", ["40%", "100%"])
def test_predicted_experts_are_sent_ahead(
    emulated: DeviceProcess, tiny_model, ram: str, predictor: str
) -> None:
    path = tiny_model(**MODEL)
    there = emulated.run(device_run, path, {**ALWAYS, "ram_budget": ram, "predictor": predictor})
    assert_equal(there, stock_run(path))
    stats = there["stats"]
    assert stats["device_prefetched"] > 0 and stats["device_prefetch_used"] > 0
    assert stats["device_prefetch_on"] and stats["predicted_calls"] > 0
    assert_consistent(stats)
    sent = stats["device_fetched"] + stats["device_filled"] + stats["device_prefetched"]
    # Counted at the begin and, by another thread, at the end: some were under way at the reset, or are now.
    assert stats["uploads"] == pytest.approx(sent, abs=stats["plan"]["vram_slots"])


@pytest.mark.parametrize(
    "options", [{"prefetch": False}, {"placement": "all-fetch"}, {"vram_budget": "100%"}]
)
def test_what_sends_nothing_ahead(emulated: DeviceProcess, tiny_model, options: dict[str, Any]) -> None:
    path = tiny_model(**SMALL)
    there = emulated.run(device_run, path, {**ALWAYS, **options})
    assert_equal(there, stock_run(path))
    stats = there["stats"]
    if options != {"vram_budget": "100%"}:  # there, until all are on the device
        assert stats["device_prefetched"] == stats["predicted_calls"] == 0
    assert stats["device_hits"] > 0


def test_a_slow_link(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**MODEL)
    slow = Speed(upload_per_second=50e6, copy_latency_seconds=2e-4, launch_seconds=1e-4)
    there = emulated.run(device_run, path, ALWAYS, slow)
    assert_equal(there, stock_run(path))
    assert_consistent(there["stats"])


def prompts_run(path: Path) -> dict[str, Any]:
    """Prompts in batches of eleven tokens and more, and nothing else."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, **ALWAYS)) as llm:
        for size in (11, 22, 33):
            prefill(llm, prompt(66, seed=size), [size] * (66 // size))
        return llm.spice.stats()


def test_prompts_send_nothing_ahead(emulated: DeviceProcess, tiny_model) -> None:
    stats = emulated.run(prompts_run, tiny_model(**MODEL))
    assert stats["device_prefetched"] == stats["predicted_calls"] == 0
    assert stats["device_rows"] > 0


def several_run(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Small batches, and a second context in turns with them."""
    out = []
    with (
        contextlib.closing(open_model(Llama, path, n_gpu_layers=99, **ALWAYS)) as llm,
        contextlib.closing(SecondContext(llm)) as second,
    ):
        for start in range(0, 33, 3):
            llm.eval(TOKENS[start : start + 3])
            out.append(llm.scores[start : start + 3].copy())
            second.eval(TOKENS[start : start + 3])
        return out, llm.spice.stats()


def test_batches_and_two_contexts(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**MODEL)
    there, stats = emulated.run(several_run, path)
    assert stats["device_prefetched"] > 0
    with contextlib.closing(open_model(Stock, path)) as llm:
        for start, logits in zip(range(0, 33, 3), there, strict=True):
            llm.eval(TOKENS[start : start + 3])
            assert_same(logits, llm.scores[start : start + 3])


def timeline_run(path: Path, file: Path) -> dict[str, Any]:
    """Decode with a timeline; the counters."""
    device_child.emulator.configure(Speed(upload_per_second=1e9))
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, timeline=file, **ALWAYS)) as llm:
        prefill(llm, TOKENS)
        greedy(llm, TOKENS, STEPS)
        return llm.spice.stats()


def test_the_timeline_names_them(emulated: DeviceProcess, tiny_model, tmp_path: Path) -> None:
    stats = emulated.run(timeline_run, tiny_model(**MODEL), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ahead = sum(event["name"].startswith("ahead layer") for event in events)
    assert ahead == pytest.approx(stats["device_prefetched"], abs=1) and ahead > 0


def uses_run(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Uses of all experts, as the next run's preload sees them, when the device computes some of them."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, **ALWAYS)) as llm:
        prefill(llm, TOKENS)
        greedy(llm, TOKENS, STEPS)
        uses = sum(map(sum, llm.spice._core.uses().values()))
        return uses, llm.spice.stats()["expert_rows"], llm.spice.stats()


def test_what_the_device_computes_counts_as_used(emulated: DeviceProcess, tiny_model) -> None:
    uses, rows, stats = emulated.run(uses_run, tiny_model(**MODEL))
    assert uses == rows and stats["device_rows"] > 0


def sim_run(path: Path) -> dict[str, dict[str, float]]:
    """The runtime's and the simulator's figures with predictions from ids."""
    device_child.emulator.configure(Speed(upload_per_second=1e9))
    report = run(str(path), prompt(60, seed=3), "spice", "25%", "history", n_threads=1)
    return compare(report, simulate(report, "spice", "history"))


def test_the_simulator_sends_ahead_as_well(emulated: DeviceProcess, tiny_model) -> None:
    figures = emulated.run(sim_run, tiny_model(**MODEL))
    for side in ("runtime", "simulator"):
        assert figures["sent ahead"][side] > 0 and figures["used"][side] > 0
