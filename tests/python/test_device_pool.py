"""Experts split over file, memory and a device: the logits stay the CPU's to the last bit, budgets are kept.

The emulated accelerator computes with ggml-cpu, so even its kernels have stock's bits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import device_child
import numpy as np
import pytest
from device_child import DeviceProcess
from spice_moe import Llama, SpiceBudgetError, SpiceDeviceError, SpiceError, placements
from spice_moe.attachment import Attachment
from support import Logits, Stock, assert_same, greedy, open_model, prefill, prompt
from test_exactness import SecondContext

from bench.device_emulator import Speed

TOKENS = prompt(33)
STEPS = 24
SMALL = dict(arch="qwen2moe", layers=3, expert_type="Q4_K", seed=1)


def stock_run(path: Path, tokens: list[int] = TOKENS, **options: Any) -> tuple[Logits, list[int], Logits]:
    """Stock llama.cpp on the CPU, in a process without a device: prompt logits, greedy ids, their logits."""
    with contextlib.closing(open_model(Stock, path, **options)) as llm:
        return prefill(llm, tokens), *greedy(llm, tokens, STEPS)


def device_run(path: Path, options: dict[str, Any], speed: Speed | None = None) -> dict[str, Any]:
    """The same by SPICE beside the device, twice, so that the second round finds experts there."""
    if speed is not None:
        device_child.emulator.configure(speed)
    with contextlib.closing(open_model(Llama, path, **{"n_gpu_layers": 99, **options})) as llm:
        plan = llm.spice.plan
        prefill(llm, TOKENS)
        greedy(llm, TOKENS, STEPS)
        llm.spice.reset_stats()
        first = prefill(llm, TOKENS)
        ids, logits = greedy(llm, TOKENS, STEPS)
        stats = llm.spice.stats()
        counters = {} if device_child.emulator is None else device_child.emulator.counters()
    return dict(first=first, ids=ids, logits=logits, stats=stats, plan=plan.to_dict(), counters=counters)


def assert_equal(there: dict[str, Any], here: tuple[Logits, list[int], Logits]) -> None:
    assert_same(there["first"], here[0])
    assert there["ids"] == here[1]
    assert_same(there["logits"], here[2])
    stats, plan = there["stats"], there["plan"]
    calls = (2 + STEPS) * plan["moe_layers"]
    assert stats["layer_calls"] == calls
    assert stats["expert_rows"] == (2 * len(TOKENS) + STEPS) * plan["experts_used"] * plan["moe_layers"]
    assert stats["failures"] == 0


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16", "Q5_K"])
@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2", "olmoe", "llama"])
def test_all_experts_on_the_device(emulated: DeviceProcess, tiny_model, arch: str, kind: str) -> None:
    path = tiny_model(arch, layers=3, expert_type=kind, seed=1)
    # Not the default: a host is done with experts as small as these before a device has begun.
    there = emulated.run(device_run, path, {"placement": "cg-moe"})
    assert_equal(there, stock_run(path))
    stats, plan = there["stats"], there["plan"]
    assert plan["vram_slots"] == plan["experts_total"]
    assert stats["device_unfit"] == 0
    assert stats["device_rows"] > 0.5 * stats["expert_rows"], "most experts are on the device by now"
    assert stats["device_in_place"] == stats["device_calls"] > 0, "activations do not go up again"
    assert there["counters"]["matmul_id_nodes"] > 0


@pytest.mark.parametrize("ram", ["15%", "50%", "100%"])
@pytest.mark.parametrize("vram", ["10%", "25%", "50%"])
def test_every_proportion(emulated: DeviceProcess, tiny_model, vram: str, ram: str) -> None:
    path = tiny_model(**SMALL)
    there = emulated.run(device_run, path, {"vram_budget": vram, "ram_budget": ram})
    assert_equal(there, stock_run(path))
    stats, plan = there["stats"], there["plan"]
    assert 0 < plan["vram_slots"] < plan["experts_total"]
    assert stats["device_resident_bytes"] <= plan["vram_budget"]
    assert stats["device_rows"] > 0


@pytest.mark.parametrize("placement", placements())
def test_every_placement(emulated: DeviceProcess, tiny_model, placement: str) -> None:
    path = tiny_model(**SMALL)
    there = emulated.run(device_run, path, {"vram_budget": "25%", "placement": placement})
    assert_equal(there, stock_run(path))
    assert there["plan"]["placement"] == placement
    if placement == "all-fetch":
        assert there["stats"]["device_fetched"] > 0
    if placement == "static":
        assert there["stats"]["device_evictions"] == 0


def test_a_slow_link_and_a_slow_device(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    slow = Speed(upload_per_second=50e6, copy_latency_seconds=2e-4, compute_slowdown=2.0, launch_seconds=1e-4)
    for placement in ("spice", "all-fetch"):
        there = emulated.run(device_run, path, {"vram_budget": "25%", "placement": placement}, slow)
        assert_equal(there, stock_run(path))


def chunks_run(path: Path, sizes: list[int], options: dict[str, Any]) -> tuple[list[Logits], dict[str, Any]]:
    """Logits of a prompt evaluated in chunks of each size, twice each."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, **options)) as llm:
        out = []
        for size in sizes * 2:
            out.append(prefill(llm, prompt(70, seed=size), [size] * (70 // size)))
        return out, llm.spice.stats()


@pytest.mark.parametrize("placement", ["spice", "all-fetch", "hybrimoe"])
def test_batches_of_every_size(emulated: DeviceProcess, tiny_model, placement: str) -> None:
    path = tiny_model(**SMALL)
    sizes = [1, 2, 3, 5, 8, 33]
    there, stats = emulated.run(chunks_run, path, sizes, {"vram_budget": "40%", "placement": placement})
    assert stats["device_rows"] > 0
    with contextlib.closing(open_model(Stock, path)) as llm:
        for size, logits in zip(sizes * 2, there, strict=True):
            assert_same(logits, prefill(llm, prompt(70, seed=size), [size] * (70 // size)))


def prompt_run(path: Path, options: dict[str, Any]) -> tuple[list[Logits], dict[str, Any]]:
    """Logits of a long prompt in micro-batches, evaluated three times, and the counters of the last."""
    tokens = prompt(500, seed=9)
    device_child.emulator.configure(Speed(upload_per_second=2e8, copy_latency_seconds=1e-4))
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, n_ubatch=250, **options)) as llm:
        out = [prefill(llm, tokens) for _ in range(2)]
        llm.spice.reset_stats()
        return [*out, prefill(llm, tokens)], llm.spice.stats()


@pytest.mark.parametrize("vram", ["10%", "50%"])
def test_a_prompt_streams_through_the_pool(emulated: DeviceProcess, tiny_model, vram: str) -> None:
    path = tiny_model(**SMALL)
    there, stats = emulated.run(prompt_run, path, {"vram_budget": vram, "placement": "all-fetch"})
    with contextlib.closing(open_model(Stock, path, n_ubatch=250)) as llm:
        for logits in there:
            assert_same(logits, prefill(llm, prompt(500, seed=9)))
    plan = stats["plan"]
    # Every expert of a layer once per micro-batch at most, and only what is missing.
    assert stats["device_rows"] == stats["expert_rows"]
    assert stats["device_fetched"] + stats["device_hits"] <= 2 * plan["experts_total"]
    assert stats["device_passed"] > 0.5 * stats["device_fetched"] > 0
    if vram == "50%":
        assert stats["device_hits"] > 0, "what the pool holds is not given up for a prompt"


@pytest.mark.parametrize("ram", ["30%", "100%"])
def test_a_prompt_is_shared_with_the_host(emulated: DeviceProcess, tiny_model, ram: str) -> None:
    path = tiny_model(**SMALL)
    there, stats = emulated.run(prompt_run, path, {"vram_budget": "20%", "ram_budget": ram})
    with contextlib.closing(open_model(Stock, path, n_ubatch=250)) as llm:
        for logits in there:
            assert_same(logits, prefill(llm, prompt(500, seed=9)))
    assert stats["failures"] == 0


def test_ggml_s_rpc_as_the_device(rpc: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    for placement in ("spice", "all-fetch"):
        there = rpc.run(device_run, path, {"vram_budget": "30%", "placement": placement})
        assert_equal(there, stock_run(path))
        assert there["stats"]["device_rows"] > 0
        assert there["stats"]["uploads"] > 0


def contexts_run(path: Path) -> tuple[list[Logits], list[Logits], dict[str, Any]]:
    """Two contexts of one model in turns."""
    tokens = [prompt(32, seed=1), prompt(32, seed=2)]
    with (
        contextlib.closing(open_model(Llama, path, n_gpu_layers=99, vram_budget="30%")) as llm,
        contextlib.closing(SecondContext(llm)) as second,
    ):
        one, two = [], []
        for start in range(0, 32, 4):
            llm.eval(tokens[0][start : start + 4])
            one.append(llm.scores[start : start + 4].copy())
            two.append(second.eval(tokens[1][start : start + 4]))
        return one, two, llm.spice.stats()


def test_two_contexts_share_the_pool(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    one, two, stats = emulated.run(contexts_run, path)
    assert stats["device_rows"] > 0
    with contextlib.closing(open_model(Stock, path)) as llm:
        assert_same(np.concatenate(one), prefill(llm, prompt(32, seed=1), [4] * 8))
        assert_same(np.concatenate(two), prefill(llm, prompt(32, seed=2), [4] * 8))


@pytest.mark.parametrize("what", ["copy", "compute"])
def test_a_device_that_fails(emulated: DeviceProcess, tiny_model, what: str) -> None:
    path = tiny_model(**SMALL)
    here = stock_run(path)
    failures, logits = emulated.run(failing_run, path, what)
    assert failures > 0
    assert_same(logits, here[0])


def failing_run(path: Path, what: str) -> tuple[int, Logits]:
    """Let operations of the device fail at many places; after each failure evaluate again."""
    failures = 0
    options = dict(n_gpu_layers=99, vram_budget="25%", placement="all-fetch")
    with contextlib.closing(open_model(Llama, path, **options)) as llm:
        for nth in range(1, 40, 3):
            device_child.emulator.fail(what, nth)
            try:
                prefill(llm, TOKENS, [1] * 3)
            except (RuntimeError, SpiceError):  # ids that did not arrive look like a damaged model
                failures += 1
            device_child.emulator.fail(what, 0)
            with contextlib.suppress(
                RuntimeError, SpiceError
            ):  # a copy that failed late is told by the next graph
                prefill(llm, TOKENS, [1] * 3)
        return failures, prefill(llm, TOKENS)


def test_memory_that_runs_out_after_the_start(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    sizes = [5, 33]
    there, stats = emulated.run(starved_run, path, sizes)
    assert stats["failures"] == 0 and stats["device_refused"] >= 2 and stats["device_rows"] > 0
    with contextlib.closing(open_model(Stock, path)) as llm:
        for size, logits in zip(sizes * 2, there, strict=True):
            assert_same(logits, prefill(llm, prompt(70, seed=size), [size] * (70 // size)))


def starved_run(path: Path, sizes: list[int]) -> tuple[list[Logits], dict[str, Any]]:
    """As :func:`chunks_run`; the device has no memory for working space at the first and at a larger call."""
    options = dict(n_gpu_layers=99, vram_budget="40%", placement="all-fetch")
    with contextlib.closing(open_model(Llama, path, **options)) as llm:
        out = []
        for size in sizes * 2:
            device_child.emulator.fail("allocation", 1)
            out.append(prefill(llm, prompt(70, seed=size), [size] * (70 // size)))
        return out, llm.spice.stats()


def error_of(path: Path, options: dict[str, Any], memory: int) -> tuple[str, str]:
    """The class and text of what opening the model raises."""
    device_child.emulator.configure(Speed(memory_bytes=memory))
    try:
        with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, **options)) as llm:
            return "", str(llm.spice.plan)
    except Exception as error:
        return type(error).__name__, str(error)


def test_budgets_that_cannot_work(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    name, text = emulated.run(error_of, path, {"vram_budget": 1000}, 1 << 30)
    assert name == "SpiceBudgetError" and "give at least" in text and "EMU0" in text
    smallest = int(text.split("give at least ")[1].split()[0])
    assert emulated.run(error_of, path, {"vram_budget": smallest}, 1 << 30)[0] == ""
    assert emulated.run(error_of, path, {"vram_budget": smallest - 1}, 1 << 30)[0] == "SpiceBudgetError"
    name, text = emulated.run(error_of, path, {"placement": "nonsense"}, 1 << 30)
    assert name == "ValueError" and "all-host" in text
    # More than the device has: refused by the device itself, and said so.
    used = emulated.run(memory_of, path)
    name, text = emulated.run(error_of, path, {"vram_budget": "100%"}, used + 100_000)
    assert name == "SpiceMemoryError" and "vram_budget" in text


def memory_of(path: Path) -> int:
    """Device memory that llama.cpp takes for the model without its experts."""
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99, vram_budget=0)) as llm:
        assert llm.spice.plan.vram_reason == "vram_budget=0"
        return int(device_child.emulator.counters()["memory_used"])


def test_auto_takes_what_is_free_or_says_why_not(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    plan = emulated.run(error_of, path, {}, 1 << 40)[1]
    assert "also on EMU0" in plan
    used = emulated.run(memory_of, path)
    name, plan = emulated.run(error_of, path, {}, used + 1000)
    assert name == "" and "none on a GPU (EMU0 has" in plan


def refused_run(path: Path, n_failures: int) -> dict[str, Any]:
    """The plan, when the first ``n_failures`` allocations for experts fail."""
    real = Attachment._build_device_pool

    def failing(*arguments: Any) -> None:
        build = arguments[1].build_device_pool
        left = iter(range(n_failures))

        class Core:
            def build_device_pool(self, *arguments: Any) -> None:
                device_child.emulator.fail("allocation", 1 if next(left, None) is not None else 0)
                build(*arguments)

        real(arguments[0], Core(), *arguments[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attachment, "_build_device_pool", failing)
        with contextlib.closing(open_model(Llama, path, n_gpu_layers=99)) as llm:
            prefill(llm, TOKENS)
            return llm.spice.stats()["plan"]


def test_auto_takes_less_when_the_device_refuses(emulated: DeviceProcess, tiny_model) -> None:
    path = tiny_model(**SMALL)
    whole = emulated.run(refused_run, path, 0)
    less = emulated.run(refused_run, path, 1)
    assert 0 < less["vram_budget"] < whole["vram_budget"] and less["vram_reason"] == "what it gave"
    none = emulated.run(refused_run, path, 4)
    assert none["vram_budget"] == 0 and "refused" in none["vram_reason"] and none["device"] == ""


def test_without_a_device(tiny_model) -> None:
    path = tiny_model(**SMALL)
    with pytest.raises(SpiceBudgetError, match="no GPU device"):
        open_model(Llama, path, vram_budget="50%")
    with contextlib.closing(open_model(Llama, path)) as llm:
        assert llm.spice.plan.vram_budget == 0 and llm.spice.plan.vram_reason == "n_gpu_layers is 0"
        assert "GPU" not in str(llm.spice.plan)
    with contextlib.closing(open_model(Llama, path, n_gpu_layers=99)) as llm:
        assert llm.spice.plan.vram_reason == "llama.cpp has no GPU device"
        assert "none on a GPU" in str(llm.spice.plan)


@pytest.mark.parametrize("budget", [-1, "x", 1.5, True, "-3G"])
def test_what_is_no_budget(tiny_model, budget: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"vram_budget|not a size"):
        Llama("model.gguf", vram_budget=budget)


def pinned_run(path: Path, limit: int) -> tuple[Logits, list[str], dict[str, Any], dict[str, Any]]:
    """Prompt logits with a limit of pinned memory; the warnings, SPICE's and the device's counters."""
    device_child.emulator.configure(Speed(pinned_bytes=limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = open_model(Llama, path, n_gpu_layers=99, vram_budget="50%", placement="all-fetch")
    with contextlib.closing(llm):
        prefill(llm, TOKENS)  # reads from disk
        device_child.emulator.reset_counters()
        llm.spice.reset_stats()
        logits = prefill(llm, TOKENS)
        texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert llm.spice.stats()["uploads"] > 0
        return logits, texts, llm.spice.stats(), device_child.emulator.counters()


@pytest.mark.parametrize("limit", [1 << 40, 8 << 20])
def test_copies_come_from_pinned_memory(emulated: DeviceProcess, tiny_model, limit: int) -> None:
    path = tiny_model("qwen2moe", layers=12, expert_type="F16", seed=1)
    logits, texts, stats, counters = emulated.run(pinned_run, path, limit)
    plan = stats["plan"]
    with contextlib.closing(open_model(Stock, path)) as llm:
        assert_same(logits, prefill(llm, TOKENS))
    if limit == 1 << 40:
        assert plan["pinned_bytes"] == plan["ram_budget"] and not texts
        assert counters["pinned_upload_bytes"] >= stats["upload_bytes"]
    else:
        assert plan["pinned_bytes"] == 0 and len(texts) == 1 and "could be pinned" in texts[0]


def timeline_run(path: Path, file: Path) -> dict[str, Any]:
    """Decode with a timeline; the counters."""
    options = dict(n_gpu_layers=99, vram_budget="25%", placement="all-fetch", timeline=file)
    device_child.emulator.configure(Speed(upload_per_second=1e9))
    with contextlib.closing(open_model(Llama, path, **options)) as llm:
        greedy(llm, TOKENS, 4)
        return llm.spice.stats()


def test_timeline(emulated: DeviceProcess, tiny_model, tmp_path: Path) -> None:
    stats = emulated.run(timeline_run, tiny_model(**SMALL), tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    tracks = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    by_track = {name: [e for e in spans if e["tid"] == tid] for name, tid in tracks.items()}
    assert len(by_track["layer calls"]) == stats["layer_calls"]
    assert len(by_track["link to the device"]) == stats["uploads"]
    assert sum("fetch" in e["name"] for e in by_track["link to the device"]) == stats["device_fetched"]
    assert len(by_track["device experts"]) == stats["device_calls"]
    # Uploads take turns: the link is one.
    ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in by_track["link to the device"])
    assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(ends))


def test_a_timeline_in_no_folder(tiny_model) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        open_model(Llama, tiny_model(**SMALL), timeline="/nowhere/t.json")


def test_the_device_error_is_an_exception_of_its_own() -> None:
    assert issubclass(SpiceDeviceError, RuntimeError)
