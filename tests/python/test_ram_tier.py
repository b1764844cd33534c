"""A pool smaller than the model: every logit still equals stock llama.cpp's, and the budget is kept.

Each exactness test also asserts by SPICE's counters that experts really left the pool and came back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from spice_moe import Llama, SpiceBudgetError, SpiceFormatError, strategies
from support import (
    Counts,
    Stock,
    assert_same,
    expert_ranges,
    greedy,
    open_model,
    pages_cached,
    prefill,
    prompt,
)
from test_exactness import SecondContext

TOKENS = prompt(40)
BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 4]  # 40 tokens again
DECODED = 24
SMALLEST, WORKING_SET = "smallest", "working set"
BUDGETS = [SMALLEST, WORKING_SET, "50%", 0.9, 1.0]


def qwen(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)


@pytest.fixture(scope="module", params=["qwen2moe-Q4_K", "deepseek2-Q8_0"])
def model(request: pytest.FixtureRequest, tiny_model) -> SimpleNamespace:
    """A model's path, its sizes, and what stock llama.cpp computes with it."""
    arch, kind = request.param.split("-")
    path = tiny_model(arch, layers=3, expert_type=kind, seed=1)
    with contextlib.closing(open_model(Llama, path)) as llm:
        plan = llm.spice.plan
    with contextlib.closing(open_model(Stock, path)) as stock:
        return SimpleNamespace(
            path=path,
            plan=plan,
            whole=prefill(stock, TOKENS),
            pieces=prefill(stock, TOKENS, BATCHES),
            greedy=greedy(stock, TOKENS, DECODED),
        )


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return qwen(tiny_model)


@pytest.fixture(scope="module")
def large(tiny_model) -> Path:
    """80 MB of experts, 1.7 MB each: enough to see in the memory of a process."""
    return tiny_model("qwen2moe", layers=3, experts=16, embd=512, ff=1024, expert_type="Q8_0", row_bank=2)


def open_small(path: Path, ram_budget: Any = SMALLEST, **options: Any) -> Llama:
    """SPICE with a budget by name or value."""
    if ram_budget in (SMALLEST, WORKING_SET):
        with contextlib.closing(open_model(Llama, path)) as llm:
            plan = llm.spice.plan
        ram_budget = plan.smallest_budget if ram_budget == SMALLEST else plan.working_set_bytes
    return open_model(Llama, path, ram_budget=ram_budget, **options)


def hits(llm: Llama) -> int:
    stats = llm.spice.stats()
    return stats["experts_requested"] - stats["experts_missed"]


def assert_evicting(llm: Llama) -> None:
    stats, plan = llm.spice.stats(), llm.spice.plan
    assert stats["failures"] == 0
    assert stats["evictions"] > 0
    assert 0 < stats["resident_bytes"] <= plan.ram_budget
    assert stats["resident_experts"] <= plan.slots < plan.experts_total


@pytest.mark.parametrize("strategy", strategies())
@pytest.mark.parametrize("ram_budget", BUDGETS)
def test_exact_with_any_budget_and_strategy(model: SimpleNamespace, ram_budget: Any, strategy: str) -> None:
    size = {SMALLEST: model.plan.smallest_budget, WORKING_SET: model.plan.working_set_bytes}
    budget = size.get(ram_budget, ram_budget)
    with contextlib.closing(open_model(Llama, model.path, ram_budget=budget, strategy=strategy)) as llm:
        plan = llm.spice.plan
        assert plan.strategy == strategy
        assert plan.ram_budget <= (budget if isinstance(budget, int) else model.plan.ram_budget)

        counts = Counts(llm)
        assert_same(prefill(llm, TOKENS), model.whole)
        counts.expect(batches=1, tokens=40)
        stats = llm.spice.stats()
        assert stats["rows_batched"] > 0
        if plan.slots < plan.experts_per_layer:
            assert stats["waves"] > 3 * plan.moe_layers, "not all experts of a layer fit at once"
        assert stats["resident_bytes"] <= plan.ram_budget

        counts = Counts(llm)
        assert_same(prefill(llm, TOKENS, BATCHES), model.pieces)
        counts.expect(batches=len(BATCHES), tokens=40)
        assert llm.spice.stats()["rows_direct"] > 0

        counts = Counts(llm)
        ids, logits = greedy(llm, TOKENS, DECODED)
        counts.expect(batches=1 + DECODED, tokens=40 + DECODED)
        assert ids == model.greedy[0]
        assert_same(logits, model.greedy[1])
        assert len(set(ids)) > 8, "a text of one token would prove little"
        stats = llm.spice.stats()
        assert stats["rows_direct"] > 0
        assert stats["bytes_read"] > 0 or plan.slots == plan.experts_total
        if plan.slots < plan.experts_total:
            assert_evicting(llm)
        else:
            assert stats["evictions"] == 0


def test_hits_below_the_working_set_and_more_with_more_memory(model: SimpleNamespace) -> None:
    plan = model.plan
    slot = plan.ram_budget // plan.experts_total
    touched = plan.experts_used * plan.moe_layers  # by one token
    assert plan.working_set_bytes == slot * touched
    found = []
    for slots in sorted({2, touched - 1, touched, *range(touched + 2, plan.experts_total + 1, 2)}):
        options = {"ram_budget": slot * slots, "prefetch": False}  # whose hits depend on the clock
        with contextlib.closing(open_model(Llama, model.path, **options)) as llm:
            assert llm.spice.plan.slots == slots
            ids, _ = greedy(llm, TOKENS, 200)
            assert ids[:DECODED] == model.greedy[0]
            found.append(hits(llm))
            if slots < plan.experts_total:
                assert_evicting(llm)
            if slots == touched - 1:
                assert found[-1] > 0, "a token touches more than that, and still something is found"
    assert found == sorted(found), "more memory never finds less"
    assert found[-1] > 2 * found[1]


def test_two_models_with_budgets_at_once(path: Path, tiny_model) -> None:
    other = tiny_model("olmoe", layers=2, expert_type="Q8_0", seed=2)
    with (
        contextlib.closing(open_small(path, "30%")) as one,
        contextlib.closing(open_small(other, "40%")) as two,
        contextlib.closing(open_model(Stock, path)) as stock_one,
        contextlib.closing(open_model(Stock, other)) as stock_two,
    ):
        logits: tuple[list, list] = ([], [])
        for start in range(0, 40, 4):
            for llm, rows in ((one, logits[0]), (two, logits[1])):
                llm.eval(TOKENS[start : start + 4])
                rows.append(llm.scores[start : start + 4].copy())
        for llm, stock, rows in ((one, stock_one, logits[0]), (two, stock_two, logits[1])):
            assert_same(np.concatenate(rows), prefill(stock, TOKENS, [4] * 10))
            assert_evicting(llm)
            assert llm.spice.stats()["layer_calls"] == 10 * llm.spice.plan.moe_layers


@pytest.mark.parametrize("ram_budget", [SMALLEST, "30%", "60%"])
def test_two_threads_with_a_context_each(path: Path, ram_budget: str) -> None:
    """One context decodes token by token, the other prefills in pieces, at the same time."""
    texts = [prompt(48, seed=1), prompt(200, seed=2)]
    sizes = [1, 25]
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = [
            prefill(stock, text, [size] * (len(text) // size))
            for text, size in zip(texts, sizes, strict=True)
        ]
    with (
        contextlib.closing(open_small(path, ram_budget)) as llm,
        contextlib.closing(SecondContext(llm)) as first,
        contextlib.closing(SecondContext(llm)) as second,
    ):
        counts = Counts(llm)
        logits: list[list] = [[], []]
        start = threading.Barrier(2)

        def work(index: int, context: SecondContext) -> None:
            start.wait()
            for at in range(0, len(texts[index]), sizes[index]):
                logits[index].append(context.eval(texts[index][at : at + sizes[index]]))

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in (0, 1):
            assert_same(np.concatenate(logits[index]), expected[index])
        counts.expect(batches=48 + 8, tokens=48 + 200)
        assert_evicting(llm)


def test_prompt_lookup_decoding(path: Path) -> None:
    text = "The time of the people"

    def answer(llm: Any) -> str:
        return llm(f"{text}, {text}, {text}", max_tokens=32, temperature=0)["choices"][0]["text"]

    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    with (
        contextlib.closing(open_model(Stock, path, draft_model=draft)) as stock,
        contextlib.closing(open_small(path, draft_model=draft)) as llm,
    ):
        assert answer(llm) == answer(stock) != ""
        assert_evicting(llm)


def test_state_save_and_load(path: Path) -> None:
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = prefill(stock, [*TOKENS, 400, 401], [40])[40:]
    with contextlib.closing(open_small(path)) as llm:
        prefill(llm, TOKENS)
        state = llm.save_state()
        prefill(llm, prompt(50, seed=9))
        llm.load_state(state)
        llm.eval([400, 401])
        assert_same(llm.scores[40:42], expected)
        assert_evicting(llm)


def test_twenty_prompts_one_after_the_other(path: Path) -> None:
    """Nothing of one prompt is left in the next: each equals a model that has seen nothing else."""
    with contextlib.closing(open_small(path, "40%")) as llm:
        for seed in range(20):
            tokens = prompt(5 + 7 * seed % 60, seed)
            with contextlib.closing(open_small(path, "40%")) as fresh:
                assert_same(prefill(llm, tokens), prefill(fresh, tokens))
        assert_evicting(llm)
        with contextlib.closing(open_model(Stock, path)) as stock:
            assert_same(prefill(llm, tokens), prefill(stock, tokens))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ram_budget", [SMALLEST, "50%"])
def test_a_file_that_is_cut_fails_the_call_and_works_when_restored(
    path: Path, tmp_path: Path, ram_budget: str, direct: bool
) -> None:
    copy = Path(shutil.copy(path, tmp_path / "cut-me.gguf"))
    data = copy.read_bytes()
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = prefill(stock, TOKENS)
    with contextlib.closing(open_small(copy, ram_budget, direct_io=direct)) as llm:
        assert_same(prefill(llm, TOKENS), expected)
        for _ in range(3):
            cut = expert_ranges(copy)[-1].start  # the last tensor of experts is gone
            os.truncate(copy, cut)
            for _ in range(2):
                with pytest.raises(SpiceFormatError, match=r"cut-me\.gguf.*ends before byte") as caught:
                    prefill(llm, prompt(40, seed=3))
                assert "\n" not in str(caught.value)
            with copy.open("r+b") as file:
                file.seek(cut)
                file.write(data[cut:])
            llm.spice.reset_stats()
            assert_same(prefill(llm, TOKENS), expected)
            assert_evicting(llm)


def test_a_file_that_is_replaced_or_deleted_stays_as_it_was(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path / "model.gguf"))
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = prefill(stock, TOKENS)
    with contextlib.closing(open_small(copy)) as llm:
        assert_same(prefill(llm, TOKENS), expected)
        (tmp_path / "other").write_bytes(bytes(copy.stat().st_size))
        (tmp_path / "other").rename(copy)
        assert_same(prefill(llm, TOKENS), expected)
        copy.unlink()
        assert_same(prefill(llm, TOKENS), expected)
        assert_evicting(llm)


def test_too_small_is_refused_before_the_load_and_the_smallest_works(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path)) as llm:
        smallest = llm.spice.plan.smallest_budget
    for budget in (smallest - 1, 1, "1K", 1e-9):
        fractions: list[float] = []
        began = time.perf_counter()
        with pytest.raises(SpiceBudgetError, match=rf"give at least {smallest} bytes") as caught:
            open_model(Llama, path, ram_budget=budget, progress=fractions.append)
        assert time.perf_counter() - began < 0.5
        assert fractions == [], "nothing was loaded"
        assert str(path) in str(caught.value)
        assert f"ram_budget={budget!r}" in str(caught.value)
    with contextlib.closing(open_model(Llama, path, ram_budget=smallest)) as llm:
        plan = llm.spice.plan
        assert plan.slots == 2
        assert plan.ram_budget == smallest
        assert "slow: one token touches" in str(plan)


@pytest.mark.parametrize("given", ["1MiB", "0.5G", "50%", 0.25, 2**20, "auto", "AUTO"])
def test_the_plan_has_the_resolved_number(path: Path, given: Any) -> None:
    with contextlib.closing(open_model(Llama, path)) as llm:
        everything = llm.spice.plan.ram_budget
    asked = {"1MiB": 2**20, "50%": everything // 2, 0.25: everything // 4, 2**20: 2**20}.get(
        given, everything
    )
    with contextlib.closing(open_model(Llama, path, ram_budget=given)) as llm:
        plan = llm.spice.plan
        slot = plan.ram_budget // plan.slots
        fields = json.loads(json.dumps(plan.to_dict()))
    assert asked - slot < fields["ram_budget"] <= asked
    assert fields["ram_budget"] == fields["slots"] * slot > 0
    if plan.slots < plan.experts_total:
        assert f"{plan.slots} of {plan.experts_total} experts, strategy {strategies()[0]}" in str(plan)


def test_buffered_reads_are_exact_labelled_and_leave_the_page_cache(large: Path) -> None:
    tokens = prompt(200)
    with contextlib.closing(open_model(Stock, large)) as stock:
        expected = prefill(stock, tokens)
    ranges = expert_ranges(large)
    with large.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.closing(open_small(large, "30%", direct_io=False)) as llm:
        plan = llm.spice.plan
        assert not plan.direct_io
        assert "buffered" in str(plan)
        assert_same(prefill(llm, tokens), expected)
        stats = llm.spice.stats()
        assert stats["slabs_read"] >= plan.experts_total, "all experts went through"
        assert_evicting(llm)
    assert pages_cached(large, ranges) < 0.1


PEAK = """
import json, sys
from spice_moe import Llama
budget = float(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, ram_budget=budget)
llm.eval([1, *range(261, 461)])
for token in range(300, 310):
    llm.eval([token])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([1024 * int(status["VmHWM"].split()[0]), llm.spice.plan.ram_budget, llm.spice.stats()]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_peak_memory_falls_with_the_budget(large: Path) -> None:
    def run(share: float) -> tuple[int, int, dict[str, Any]]:
        command = [sys.executable, "-c", PEAK, str(large), str(share)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return tuple(json.loads(done.stdout))

    all_peak, all_budget, stats = run(1.0)
    assert stats["resident_bytes"] > 0.9 * all_budget
    peak, budget, stats = run(0.25)
    assert budget < all_budget // 3
    assert stats["resident_bytes"] <= budget
    assert stats["evictions"] > 0
    assert all_peak - peak > (all_budget - budget) // 2


def spice_run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spice_moe", *map(str, args), "-t", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_command_line(path: Path) -> None:
    options = ("-p", "hi", "-n", 4, "--temp", 0, "--json")
    reports = [json.loads(spice_run(path, *options, *ram).stdout) for ram in ((), ("--ram", "50%"))]
    everything, half = (report["plan"]["ram_budget"] for report in reports)
    assert reports[0]["text"] == reports[1]["text"] != ""
    assert 0 < half <= everything // 2
    assert reports[1]["plan"]["slots"] == 12
    assert reports[1]["stats"]["evictions"] > 0


@pytest.mark.parametrize(("ram", "code"), [("10", 6), ("0.0001%", 6), ("lots", 2), ("0", 2), ("200%", 2)])
def test_command_line_with_a_budget_that_cannot_work(path: Path, ram: str, code: int) -> None:
    done = spice_run(path, "-p", "hi", "--ram", ram)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    message = done.stderr.splitlines()[-1]
    assert message.startswith("spice-run: error: ")
    assert "Traceback" not in done.stderr
    if code == 6:
        assert "give at least" in message
        assert len(done.stderr.splitlines()) == 1
    else:
        assert "--ram" in message
