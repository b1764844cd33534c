"""Experts that are read ahead of need: every logit still equals stock llama.cpp's, by whatever predictor.

Each exactness test also asserts by SPICE's counters that experts really were read ahead and used.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from spice_moe import Llama, SpiceError, _core, predictors
from support import Stock, assert_same, greedy, open_model, prompt

TOKENS = prompt(12)
DECODED = 40
UNFITTED = [name for name in predictors() if name not in ("adapter", "draft", "replay")]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=4, expert_type="Q4_K", seed=1)


@pytest.fixture(scope="module")
def stock(model: Path):
    with contextlib.closing(open_model(Stock, model)) as llm:
        return greedy(llm, TOKENS, DECODED)


def check(stats: dict, *, used: bool = True) -> None:
    """The counters tell one story."""
    settled = stats["prefetch_ready"] + stats["prefetch_late"] + stats["prefetch_wasted"]
    assert settled <= stats["prefetched"] <= settled + stats["resident_experts"]
    assert stats["resident_bytes"] <= stats["plan"]["ram_budget"]
    assert stats["prefetch_bytes"] <= stats["bytes_read"]
    if used:
        assert stats["prefetch_ready"] + stats["prefetch_late"] > 0
        assert stats["prefetch_bytes"] > 0


@pytest.mark.parametrize("predictor", UNFITTED)
@pytest.mark.parametrize("budget", ["35%", "60%"])
def test_reading_ahead_changes_no_logit(model: Path, stock, predictor: str, budget: str) -> None:
    options = {"ram_budget": budget, "prefetch": "always", "predictor": predictor}
    with contextlib.closing(open_model(Llama, model, **options)) as llm:
        ids, logits = greedy(llm, TOKENS, DECODED)
        stats = llm.spice.stats()
    assert ids == stock[0]
    assert_same(logits, stock[1])
    assert stats["plan"]["predictor"] == predictor
    assert stats["evictions"] > 0
    check(stats, used=predictor != "history")  # random weights repeat nothing that it could learn


def test_an_oracle_leaves_less_to_wait_for(model: Path, stock) -> None:
    with contextlib.closing(open_model(Llama, model, ram_budget="60%", prefetch=False)) as llm:
        llm.spice._core.start_capture()
        greedy(llm, TOKENS, DECODED)
        calls = [(layer, ids) for layer, _, ids, *_ in llm.spice._core.take_capture()]
        without = llm.spice.stats()
    options = {"ram_budget": "60%", "prefetch": "always", "predictor": "replay"}
    with contextlib.closing(open_model(Llama, model, **options)) as llm:
        llm.spice._core.set_future(calls)
        ids, logits = greedy(llm, TOKENS, DECODED)
        stats = llm.spice.stats()
    assert ids == stock[0]
    assert_same(logits, stock[1])
    check(stats)
    assert stats["predicted_right"] == stats["predicted_experts"] > 0
    assert without["prefetched"] == 0
    assert stats["experts_missed"] < without["experts_missed"]


@pytest.mark.parametrize("expert", [-1, 60, 2**31 - 1])
def test_a_future_of_experts_that_do_not_exist_is_refused(model: Path, expert: int) -> None:
    with contextlib.closing(open_model(Llama, model, predictor="replay")) as llm:
        layer = next(iter(llm.spice._core.uses()))
        with pytest.raises(SpiceError, match=f"expert {expert} of"):
            llm.spice._core.set_future([(layer, np.array([[0, expert]], np.int32))])


def test_nothing_is_predicted_where_everything_is_in_memory(model: Path) -> None:
    with contextlib.closing(open_model(Llama, model, prefetch="always")) as llm:
        for _ in range(2):
            llm.reset()
            llm.eval(list(range(3, 400)))  # touches every expert
            llm.eval([5])
        if llm.spice.stats()["resident_experts"] < llm.spice.plan.experts_total:
            pytest.skip("the router left some experts out")
        llm.spice.reset_stats()
        greedy(llm, TOKENS, 10)
        stats = llm.spice.stats()
    assert stats["predicted_calls"] == stats["prefetched"] == stats["bytes_read"] == 0


def test_asking_for_the_headers_reads_no_router(model: Path) -> None:
    with contextlib.closing(_core.Model(str(model))) as core:
        assert core.pool()["predictor"] == ""
        assert core.pool()["head_bytes"] == 0


def test_it_can_be_turned_off(model: Path, stock) -> None:
    with contextlib.closing(open_model(Llama, model, ram_budget="50%", prefetch=False)) as llm:
        _, logits = greedy(llm, TOKENS, DECODED)
        stats = llm.spice.stats()
    assert_same(logits, stock[1])
    assert stats["predicted_calls"] == stats["prefetched"] == 0
    assert stats["plan"]["predictor"] == ""
    assert "read when needed" in str(llm.spice.plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"predictor": "tea leaves"}, "choose one of: ensemble"),
        ({"predictor": "adapter"}, "spice-fit"),
        ({"sidecar": "/nowhere/m.spice.gguf"}, "/nowhere/m.spice.gguf"),
    ],
)
def test_what_cannot_be_had_is_named(model: Path, options: dict, words: str) -> None:
    with pytest.raises(SpiceError, match=words):
        open_model(Llama, model, **options)


@pytest.mark.parametrize("field", ["prefetch", "predictor", "sidecar"])
def test_wrong_types_are_refused(model: Path, field: str) -> None:
    with pytest.raises(TypeError, match=field):
        open_model(Llama, model, **{field: 3.5})


def test_a_sidecar_beside_the_model_is_used_or_explained(tiny_model, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(tiny_model("qwen2moe", layers=4, expert_type="Q4_K", seed=1).read_bytes())
    (tmp_path / "m.spice.gguf").write_bytes(b"not a sidecar")
    with contextlib.closing(open_model(Llama, model)) as llm:  # nobody asked for it: no error
        assert llm.spice.plan.sidecar == ""
        assert "m.spice.gguf" in llm.spice.plan.predictor_note
    with pytest.raises(SpiceError, match=r"m\.spice\.gguf"):
        open_model(Llama, model, sidecar=tmp_path / "m.spice.gguf")
