"""Routing statistics against brute force, hand-made examples, and each other; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from spice_moe.trace import Trace

from models import routing, routing_stats


@st.composite
def traces(draw: st.DrawFn) -> tuple[NDArray[np.int64], list[int], int]:
    """Small ids [layers, tokens, k] without repeats in a token, the sequences' lengths, and n_expert."""
    n_expert = draw(st.integers(2, 9))
    k = draw(st.integers(1, n_expert))
    lens = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    favourite = rng.random(n_expert) * draw(st.sampled_from([0.0, 1.0]))
    scores = rng.random((layers, sum(lens), n_expert)) + favourite
    return np.argsort(-scores, axis=-1)[:, :, :k], lens, n_expert


def pieces(ids: NDArray, lens: list[int]) -> list[list[list[int]]]:
    """Each layer of each sequence by itself: a list of tokens' lists of experts."""
    ends = np.cumsum(lens)
    return [layer[e - n : e].tolist() for layer in ids for e, n in zip(ends, lens, strict=True)]


def brute_hits(steps: list[list[int]], slots: int, policy: str) -> int:
    """Hits of one cold cache, played one access at a time by lists."""
    held: list[int] = []  # least recent first
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    hits = 0
    for t, step in enumerate(steps):
        hits += sum(e in held for e in step)
        for e in reversed(step):  # the best expert is the most recent
            uses[e], last[e] = uses.get(e, 0) + 1, t
            if e in held:
                held.remove(e)
            held.append(e)
        while len(held) > slots:
            others = [e for e in held if e not in step]
            if policy == "lru":
                victim = held[0]
            elif policy == "lfu":
                victim = min(others, key=lambda e: (uses[e], last[e]))
            else:
                future = {
                    e: next((u for u in range(t + 1, len(steps)) if e in steps[u]), 999) for e in others
                }
                victim = max(others, key=lambda e: future[e])
            held.remove(victim)
    return hits


@given(traces(), st.data())
@settings(deadline=None, max_examples=60)
def test_hit_rates_are_brute_forces(trace: tuple, data: st.DataObject) -> None:
    ids, lens, n_expert = trace
    k = ids.shape[2]
    slots = data.draw(st.integers(k, n_expert))
    total = ids.size
    cases = pieces(ids, lens)
    for policy in ("lru", "belady"):
        expected = sum(brute_hits(steps, slots, policy) for steps in cases) / total
        assert routing.hit_rate(ids, lens, n_expert, slots, policy) == pytest.approx(expected), policy
    lru = routing.lru(ids, lens, n_expert)
    assert (np.diff(lru) >= -1e-12).all()
    for policy in ("lru", "lfu"):
        rate = routing.hit_rate(ids, lens, n_expert, slots, policy)
        assert rate <= routing.hit_rate(ids, lens, n_expert, slots, "belady") + 1e-12
    unlimited = 1 - sum(len({e for step in steps for e in step}) for steps in cases) / total
    assert lru[n_expert] == pytest.approx(unlimited)


@given(traces())
@settings(deadline=None, max_examples=40)
def test_counts_are_brute_forces(trace: tuple) -> None:
    ids, lens, n_expert = trace
    cases = pieces(ids, lens)
    for lag in (1, 2):
        pairs = [(a, b) for s in cases for a, b in zip(s, s[lag:], strict=False)]
        found = routing.repeat(ids, lens, n_expert, lag)
        if pairs:
            assert found == pytest.approx(np.mean([e in b for a, b in pairs for e in a]))
        else:
            assert np.isnan(found)
    for window in (1, 3):
        parts = [s[i : i + window] for s in cases for i in range(len(s) - window + 1)]
        found = routing.unique(ids, lens, n_expert, window)
        if parts:
            assert found == pytest.approx(np.mean([len({e for step in p for e in step}) for p in parts]))
        else:
            assert np.isnan(found)
    assert routing.counts(ids, n_expert).sum() == ids.size


def test_lfu_keeps_the_frequent() -> None:
    # 0 is used three times, then 1 and 2 once each: with two slots 0 stays.
    ids = np.array([[[0], [0], [0], [1], [2], [0]]])
    assert routing.hit_rate(ids, [6], 3, 2, "lfu") == pytest.approx(3 / 6)
    assert routing.hit_rate(ids, [6], 3, 2, "lru") == pytest.approx(2 / 6)
    assert brute_hits(ids[0].tolist(), 2, "lfu") == 3


def test_repeat_by_hand() -> None:
    ids = np.array([[[0, 1], [1, 2], [0, 3]]])
    assert routing.repeat(ids, [3], 4, 1) == pytest.approx(1 / 4)  # 1 is used again, 0, 1, 2 are not
    assert routing.repeat(ids, [3], 4, 2) == pytest.approx(1 / 2)
    assert np.isnan(routing.repeat(ids, [1, 2], 4, 2))  # nothing reaches into the next sequence


def test_gini_by_hand() -> None:
    assert routing.gini(np.array([3, 3, 3])) == pytest.approx(0)
    assert routing.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    assert routing.gini(np.array([1, 3])) == pytest.approx(0.25)
    assert routing.gini(np.zeros(4)) == 0
    ids = np.array([[[0], [0], [1], [1]]])
    assert routing.gini_in_sequence(ids, [2, 2], 2) == pytest.approx(0.5)
    assert routing.gini_corpus(ids, 2) == pytest.approx(0)


def test_cyclic_scan_defeats_lru() -> None:
    """One fewer slot than a cycle needs: LRU never hits, Belady does."""
    ids = np.tile(np.arange(4), 5)[None, :, None]
    assert routing.lru(ids, [20], 4)[3] == 0
    assert routing.hit_rate(ids, [20], 4, 3, "belady") > 0.5
    assert routing.lru(ids, [20], 4)[4] == pytest.approx(16 / 20)


def test_independent_routing_has_its_known_figures() -> None:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 3000, 16)), axis=-1)[:, :, :4]
    assert routing.repeat(ids, [3000], 16, 1) == pytest.approx(0.25, abs=0.01)
    assert routing.unique(ids, [3000], 16, 4) == pytest.approx(routing.unique_iid(4, 16, 4), abs=0.1)
    assert routing.recall_from_ids(ids, [3000], 16) == pytest.approx(0.25, abs=0.03)


def test_recall_of_routers() -> None:
    """Inputs that do not change make the next router's guess perfect; biases are honoured."""
    rng = np.random.default_rng(1)
    x = np.repeat(rng.standard_normal((1, 50, 8)), 3, axis=0)
    routers = rng.standard_normal((3, 6, 8))
    bias = rng.standard_normal((3, 6)) * 3
    logits = np.einsum("ltd,led->lte", x, routers)
    plain, biased = routing.top_k(logits, 2), routing.top_k(logits + bias[:, None], 2)
    chosen = routing.top_k(1 / (1 + np.exp(-logits)) + bias[:, None], 2)
    for ahead in (1, 2):
        assert routing.recall_ahead(plain, x, routers, ahead) == 1
        assert routing.recall_ahead(biased, x, routers, ahead, bias=bias) == 1
        assert routing.recall_ahead(biased, x, routers, ahead) < 1
        assert routing.recall_ahead(chosen, x, routers, ahead, selection_bias=bias) == 1
    assert np.isnan(routing.recall_ahead(plain, x, routers, 3))


def test_ids_foretell_a_permuted_next_layer() -> None:
    rng = np.random.default_rng(2)
    first = rng.integers(0, 8, (400, 1))
    ids = np.stack([first, (first + 3) % 8])
    assert routing.recall_from_ids(ids, [200, 200], 8) == 1
    assert routing.recall_from_ids(ids, [400], 8) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: routing.hit_rate(i, [3], 4, 1, "lru"), "1 slots"),
        (lambda i: routing.hit_rate(i, [3], 4, 5, "lru"), "5 slots"),
        (lambda i: routing.hit_rate(i, [3], 4, 2, "random"), "unknown policy"),
        (lambda i: routing.repeat(i, [2], 4, 1), "sequences of 2 tokens"),
        (lambda i: routing.cut(i, [3], first=2, at_least=9), "no sequence has 9"),
    ],
)
def test_refuses(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.array([[[0, 1], [1, 2], [0, 3]]]))


def saved(path: Path, n_expert: int = 64, k: int = 6) -> Path:
    ids = np.argsort(np.random.default_rng(0).random((3, 80, n_expert)), axis=-1)[:, :, :k].astype(np.uint8)
    parts = {"lens": np.array([50, 30]), "layers": np.arange(3)}
    return Trace(ids=ids, n_expert=n_expert, **parts).save(path)


def test_command_prints_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "t.npz")
    monkeypatch.setattr(routing_stats, "_TRACES", tmp_path / "none")
    assert routing_stats.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "target: deepseek-v2-lite" in out and "LRU hit, slots 16" in out and "difference" in out
    assert routing_stats.main([str(path), "--json", "--target", "none", "--top", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["target"] is None
    assert answer["measured"]["unique in 2"] < 4.01
    assert routing_stats.main([str(path), "--top", "7"]) == 1
    assert routing_stats.main([str(tmp_path / "missing.npz")]) == 1
    assert routing_stats.main([str(tmp_path / "model.gguf")]) == 1
    assert "--text" in capsys.readouterr().err


def test_published_targets_are_used_without_traces(tmp_path: Path) -> None:
    for name, published in routing.TARGETS.items():
        assert routing_stats.target(name, tmp_path) is published
    path = saved(tmp_path / "deepseek-v2-lite.npz")
    assert path.exists()
    with pytest.raises(ValueError, match="no sequence has 128"):
        routing_stats.target("deepseek-v2-lite", tmp_path)
