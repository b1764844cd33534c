"""What earlier runs used most is read before the first token; nothing ever depends on it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spice_moe import Llama, SpiceOptions, attachment
from spice_moe.usage import add_run, hottest_first, read_uses, usage_file, write_uses
from support import Stock, assert_same, open_model, prefill, prompt

TOKENS = prompt(40)
ROWS = st.lists(st.integers(0, 2**40), min_size=4, max_size=4)
RUNS = st.dictionaries(st.integers(0, 5), ROWS, max_size=4)


@given(before=st.none() | RUNS, run=RUNS)
def test_a_joined_run_has_its_shape_and_the_hottest_are_those_of_each_layer(before, run) -> None:
    joined = add_run(before, run)
    assert joined.keys() == run.keys()
    for row in joined.values():
        assert len(row) == 4
        assert math.isclose(sum(row), 1.0, rel_tol=1e-9) or not any(row)
    order = hottest_first(joined, run)
    assert sorted(order) == [(layer, e) for layer in sorted(joined) for e in range(4) if joined[layer][e] > 0]
    for layer, row in joined.items():
        own = [row[e] for of, e in order if of == layer]
        assert own == sorted(own, reverse=True)
    seen: dict[int, int] = {}
    ranks = []
    for layer, _ in order:
        seen[layer] = seen.get(layer, 0) + 1
        ranks.append(seen[layer])
    assert ranks == sorted(ranks), "an equal share of every layer comes first"


def test_earlier_runs_fade() -> None:
    uses = add_run(None, {0: [10, 0, 0]})
    uses = add_run(uses, {0: [0, 3, 1]})
    assert uses == {0: [0.5, 0.375, 0.125]}
    assert add_run(uses, {0: [0, 0, 0]}) == uses, "a run without a token changes nothing"
    assert add_run(uses, {0: [1, 1]}) == {0: [0.5, 0.5]}, "another shape"
    assert hottest_first({0: [0.1, 0.9], 7: [1.0]}, {0: [0]}) == [(0, 0)], "only what exists"


def test_the_file_is_of_one_path_size_and_time(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"1")
    first = usage_file([model])
    assert first == usage_file([tmp_path / "." / "m.gguf"])
    model.write_bytes(b"12")
    assert usage_file([model]) != first
    with pytest.raises(OSError, match=r"nothing\.gguf"):
        usage_file([tmp_path / "nothing.gguf"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(attachment, "WORTH_PRELOADING", 0)
    return tmp_path / "cache" / "spice-moe"


@pytest.fixture
def path(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)


def run(path: Path, **options: object) -> tuple[int, str, object]:
    """(experts preloaded, what the plan says, logits) of one run that waits for its preload."""
    with contextlib.closing(open_model(Llama, path, **options)) as llm:
        plan = llm.spice.plan
        if plan.preload.split()[0].isdigit():
            expected = int(plan.preload.split()[0])
            until = time.monotonic() + 20
            while llm.spice.stats()["preloaded"] < expected and time.monotonic() < until:
                time.sleep(0.01)
            assert llm.spice.stats()["resident_experts"] == expected
        preloaded = llm.spice.stats()["preloaded"]
        assert llm.spice.stats()["resident_bytes"] <= plan.ram_budget
        return preloaded, plan.preload, prefill(llm, TOKENS)


@pytest.mark.parametrize("ram_budget", ["30%", 1.0])
def test_the_second_run_finds_the_experts_of_the_first(path: Path, cache: Path, ram_budget: object) -> None:
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = prefill(stock, TOKENS)
    preloaded, plan, logits = run(path, ram_budget=ram_budget)
    assert (preloaded, plan) == (0, "nothing: no earlier run")
    assert_same(logits, expected)
    (file,) = cache.iterdir()
    assert file.stat().st_size < 4096

    preloaded, plan, logits = run(path, ram_budget=ram_budget)
    assert preloaded > 0
    assert plan == f"{preloaded} experts that earlier runs used most, until the first token"
    assert_same(logits, expected)
    with contextlib.closing(open_model(Llama, path, ram_budget=ram_budget)) as llm:
        assert llm.spice.plan.preload in str(llm.spice.plan)
        assert_same(prefill(llm, TOKENS), expected)  # without waiting: in the middle of it


def test_off_reads_and_writes_nothing(path: Path, cache: Path) -> None:
    assert run(path, preload=False)[:2] == (0, "off")
    assert not cache.exists()
    with pytest.raises(TypeError, match="preload"):
        SpiceOptions(preload="yes")  # type: ignore[arg-type]


def test_small_models_are_left_alone(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "WORTH_PRELOADING", 2**30)
    assert run(path)[:2] == (0, "off: the model is small")
    assert not cache.exists()


DAMAGED = ["", "[]", "{}", '{"format": 9, "uses": {}}', '{"format": 1, "uses": {"0": [-1]}}',
           '{"format": 1, "uses": {"x": [1]}}', '{"format": 1, "uses": {"0": ["a"]}}',
           '{"format": 1, "uses": {"0": [NaN]}}', '{"format": 1, "uses": {"0": 1}}', "\x00\xff"]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_named_in_the_plan_and_replaced(path: Path, cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    file = usage_file([path])
    file.write_text(text, encoding="latin-1")
    preloaded, plan, _ = run(path)
    assert preloaded == 0
    assert plan.startswith("nothing: ")
    assert read_uses(file) is not None
    assert list(cache.iterdir()) == [file], "no drafts are left"


def test_uses_of_another_shape_are_ignored(path: Path, cache: Path) -> None:
    write_uses(usage_file([path]), {0: [1.0] * 999, 77: [1.0]})
    with contextlib.closing(open_model(Llama, path)) as llm:
        assert llm.spice.plan.preload.startswith(f"{llm.spice.plan.experts_per_layer} experts")


def test_a_cache_folder_that_cannot_be_had(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(attachment, "WORTH_PRELOADING", 0)
    preloaded, plan, _ = run(path)
    assert preloaded == 0
    assert plan.startswith("nothing: ")


def test_the_format(path: Path, cache: Path) -> None:
    run(path)
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    assert found["format"] == 1
    assert all(len(row) == 8 for row in found["uses"].values())
