"""Prediction and prefetch on random input: bounds, calibration, determinism, recall of planted structure.

The hand-worked cases are in tests/cpp/test_predict.cpp and test_prefetch.cpp.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spice_moe._core import policy

NAMES = policy.predictor_names()
LEARNED = [name for name in NAMES if name != "replay"]
SEEDS = st.integers(0, 2**32 - 1)


def random_rows(rng: np.random.Generator, rows: int, n_experts: int, k: int) -> np.ndarray:
    """Distinct experts for each row: [rows, k]."""
    return np.argsort(rng.random((rows, n_experts)), axis=1)[:, :k].astype(np.int32)


def planted(seed: int, tokens: int, layers: int, n_experts: int, k: int) -> np.ndarray:
    """Routing where a hidden topic per token says most of what every layer uses: [layers, tokens, k]."""
    rng = np.random.default_rng(seed)
    taste = 3.0 * rng.standard_normal((layers, 12, n_experts))
    topics = rng.integers(0, 12, tokens)
    noise = rng.gumbel(size=(layers, tokens, n_experts))
    return np.argsort(-(taste[:, topics] + noise), axis=2)[:, :, :k].astype(np.int32)


# ---- gating


def model_choice(raw, activation, router_bias, selection_bias, n_groups, used, k) -> list[int]:
    """The experts that a model chooses, in order, from plain numpy; ties are not expected."""
    x = raw.astype(np.float64) + router_bias
    chances = {
        "softmax": lambda: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "none": lambda: x,
        "sqrt_softplus": lambda: np.sqrt(np.logaddexp(0, x)),
    }[activation]()
    scores = chances + selection_bias
    if n_groups > 1:
        parts = scores.reshape(n_groups, -1)
        best = np.argsort(-np.sort(parts, axis=1)[:, -2:].sum(axis=1))[:used]
        keep = np.isin(np.arange(n_groups), best)
        scores = np.where(np.repeat(keep, parts.shape[1]), scores, -np.inf)
    return [int(e) for e in np.argsort(-scores)[:k]]


@given(
    SEEDS,
    st.sampled_from(["softmax", "sigmoid", "none", "sqrt_softplus"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=150, deadline=None)
def test_ranking_follows_the_models_choice(seed, activation, router, selection, n_groups) -> None:
    rng = np.random.default_rng(seed)
    n = 16
    used = int(rng.integers(1, n_groups + 1))
    k = 3
    raw = rng.standard_normal(n).astype(np.float32)
    router_bias = rng.standard_normal(n).astype(np.float32) if router else np.zeros(0, np.float32)
    selection_bias = rng.random(n).astype(np.float32) if selection else np.zeros(0, np.float32)
    scores = policy.ranking_scores(
        raw,
        activation=activation,
        router_bias=router_bias,
        selection_bias=selection_bias,
        n_expert_groups=n_groups,
        n_groups_used=used,
    )
    expected = model_choice(
        raw,
        activation,
        router_bias if router else 0.0,
        selection_bias if selection else 0.0,
        n_groups,
        used,
        k,
    )
    assert [int(e) for e in np.argsort(-scores)[:k]] == expected


def test_gating_refuses_what_does_not_fit() -> None:
    for bad in ({"n_expert_groups": 5}, {"activation": "relu"}, {"router_bias": np.zeros(3)}):
        with pytest.raises(ValueError):
            policy.ranking_scores(np.zeros(16, np.float32), **bad)


# ---- predictors


@given(SEEDS, st.sampled_from(LEARNED), st.integers(1, 4), st.integers(1, 20), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_chances_are_chances(seed: int, name: str, n_groups: int, n_experts: int, horizon: int) -> None:
    """Any calls, skipped groups, rows that come and go, scores with infinities: p stays in [0, 1], and two
    predictors that see the same say the same."""
    rng = np.random.default_rng(seed)
    k_max = int(rng.integers(1, min(n_experts, 4) + 1))
    shape = {"n_groups": n_groups, "n_experts": n_experts, "top_k": k_max, "max_horizon": horizon}
    twins = [policy.Predictor(name, **shape) for _ in range(2)]
    for _ in range(25):
        group = int(rng.integers(0, n_groups))
        rows = int(rng.choice([1, 1, 1, 2, 8, 9, 70]))
        ids = random_rows(rng, rows, n_experts, int(rng.integers(1, k_max + 1)))
        for twin in twins:
            twin.begin_call(group, ids)
        for h in range(1, horizon + 1):
            if rng.random() < 0.2:
                continue
            scores = 10.0 ** rng.integers(-3, 4) * rng.standard_normal((rows, n_experts)).astype(np.float32)
            scores[rng.random(scores.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
            if rng.random() < 0.4:
                scores = np.zeros(0, np.float32)
            one, other = (twin.predict(group, h, scores) for twin in twins)
            if rows > 8:
                assert one is None
                assert other is None
                continue
            assert np.all((one >= 0) & (one <= 1))
            assert np.array_equal(one, other)


def test_wrong_calls_are_refused_by_the_binding() -> None:
    p = policy.Predictor("history", n_groups=2, n_experts=4, top_k=2)
    for group, ids in ((2, [[0]]), (-1, [[0]]), (0, [[4]]), (0, [[0, 0]]), (0, [[0, 1, 2]])):
        with pytest.raises(ValueError):
            p.begin_call(group, np.array(ids, np.int32))
    p.begin_call(0, np.array([[0]], np.int32))
    for group, horizon in ((1, 1), (0, 0), (0, 7)):
        with pytest.raises(ValueError):
            p.predict(group, horizon)


@pytest.mark.parametrize("k", [2, 4])
def test_history_finds_planted_structure_and_is_calibrated(k: int) -> None:
    ids = planted(k, 900, 6, 32, k)
    p = policy.Predictor("history", n_groups=6, n_experts=32, top_k=k, max_horizon=4)
    out = p.replay(ids, skip=300)
    within = slice(1, None)  # layer 0 is predicted from the token before, which says nothing here
    recall = out["hits"][1, within].sum() / out["asked"][1, within].sum()
    popular = np.mean(
        [np.sort(np.bincount(layer.ravel(), minlength=32))[-k:].sum() / layer.size for layer in ids]
    )
    assert recall > popular + 0.25
    told, happened, number = (out[name][1] for name in ("told", "happened", "number"))
    for bin_told, bin_happened, bin_number in zip(told, happened, number, strict=True):
        if bin_number >= 300:
            error = math.sqrt(0.25 / bin_number)
            assert abs(bin_told - bin_happened) / bin_number < 0.12 + 3 * error


def noisy_run(name: str, noise: list[float], tokens: int = 260, layers: int = 6) -> dict[str, list[float]]:
    """Recall and the sum of (p - used)^2 per horizon, with scores that are the true ones plus noise."""
    rng = np.random.default_rng(5)
    n, k = 32, 4
    true = rng.standard_normal((tokens, layers, n)).astype(np.float32)
    p = policy.Predictor(name, n_groups=layers, n_experts=n, top_k=k, max_horizon=len(noise))
    hits, squares, calls = [0.0] * len(noise), [0.0] * len(noise), [0] * len(noise)
    for t in range(tokens):
        for g in range(layers):
            p.begin_call(g, np.argsort(-true[t, g])[None, :k].astype(np.int32))
            for h, sd in enumerate(noise, 1):
                if g + h >= layers:
                    continue
                target = true[t, g + h]
                scores = target + sd * rng.standard_normal(n).astype(np.float32)
                chances = p.predict(g, h, scores[None])
                if t < tokens // 2:
                    continue
                used = np.zeros(n)
                used[np.argsort(-target)[:k]] = 1
                hits[h - 1] += used[np.argsort(-chances)[:k]].sum() / k
                squares[h - 1] += ((chances - used) ** 2).sum()
                calls[h - 1] += 1
    return {
        "recall": [a / b for a, b in zip(hits, calls, strict=True)],
        "squares": [a / b for a, b in zip(squares, calls, strict=True)],
    }


@pytest.mark.parametrize("name", ["router", "ensemble"])
def test_confidence_in_scores_is_learned_per_horizon(name: str) -> None:
    """The noisier a horizon's scores, the less they are believed: better than any fixed belief."""
    run = noisy_run(name, [0.05, 0.5, 3.0])
    assert run["recall"][0] > 0.9
    assert run["recall"][0] > run["recall"][1] > run["recall"][2]
    base = 4 * (1 - 4 / 32)  # of saying k / n for every expert
    assert run["squares"][0] < 0.3 * base
    assert run["squares"][1] < 0.85 * base
    assert run["squares"][2] < 1.03 * base  # as bad as knowing nothing, not worse


@given(SEEDS, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_replay_tells_what_was_asked_for(seed: int, recall: float) -> None:
    rng = np.random.default_rng(seed)
    calls = [(t % 3, random_rows(rng, 1, 12, 4)) for t in range(30)]
    p = policy.Predictor("replay", n_groups=3, n_experts=12, top_k=4, max_horizon=2)
    p.set_future(calls, recall=[1.0, recall], seed=seed)
    for at, (group, ids) in enumerate(calls):
        p.begin_call(group, ids)
        for h in (1, 2):
            chances = p.predict(group, h)
            if at + h >= len(calls):
                assert chances is None
                continue
            assert np.count_nonzero(chances) == (4 if h == 1 or np.float32(recall) > 0 else 0)
            if h == 1:
                assert set(np.flatnonzero(chances)) == set(calls[at + h][1][0].tolist())


# ---- the plan


@st.composite
def situations(draw: st.DrawFn) -> dict:
    rng = np.random.default_rng(draw(SEEDS))
    n_layers, n = draw(st.integers(0, 4)), draw(st.integers(1, 10))
    seconds = np.cumsum(rng.random(n_layers) * draw(st.sampled_from([0.001, 0.01])))
    layers = [(i, float(s), rng.random(n).tolist()) for i, s in enumerate(seconds)]
    present = {(int(rng.integers(0, 4)), int(rng.integers(0, n))) for _ in range(draw(st.integers(0, 9)))}
    return {
        "layers": layers,
        "present": present,
        "bytes_per_second": draw(st.sampled_from([0.0, 5e8, 2e9])),
        "queued_bytes": draw(st.sampled_from([0.0, 1e6, 2e7])),
        "n_queued": draw(st.integers(0, 5)),
        "slab_bytes": (rng.random(4) * 3e6 + 1e5).tolist(),
        "victim_values": sorted(rng.random(draw(st.integers(0, 6))).tolist()),
        "p_min": draw(st.sampled_from([0.0, 0.3])),
        "max_queue": draw(st.integers(0, 8)),
        "share": draw(st.sampled_from([0.5, 1.0])),
    }


@given(situations())
@settings(max_examples=300, deadline=None)
def test_a_plan_keeps_its_promises(s: dict) -> None:
    plan = policy.plan_prefetch(**s)
    assert plan == policy.plan_prefetch(**s)
    assert len(plan) <= max(s["max_queue"] - s["n_queued"], 0)
    assert len({(load["group"], load["expert"]) for load in plan}) == len(plan)
    assert [load["horizon"] for load in plan] == sorted(load["horizon"] for load in plan)
    bytes_ahead = s["queued_bytes"]
    for load in plan:
        _, seconds, chances = s["layers"][load["horizon"] - 1]
        assert (load["group"], load["expert"]) not in s["present"]
        assert load["chance"] == pytest.approx(chances[load["expert"]])
        assert load["chance"] >= s["p_min"]
        assert load["priority"] > 0
        bytes_ahead += s["slab_bytes"][load["group"]]  # the plan's order is the link's
        assert bytes_ahead <= s["share"] * seconds * s["bytes_per_second"] * (1 + 1e-9)
    taken = len(plan)
    if taken and s["victim_values"]:
        worth = s["victim_values"][min(taken, len(s["victim_values"])) - 1]
        assert sum(load["chance"] > worth for load in plan) >= 1
    if s["bytes_per_second"] == 0:
        assert not plan


@given(SEEDS, st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_confidence_and_depth(seed: int, n: int) -> None:
    chances = np.random.default_rng(seed).random(n).astype(np.float32)
    confidence = policy.confidence(chances)
    assert 0 <= confidence <= 1
    best = max(1, int(np.round(chances.sum())))
    assert confidence == pytest.approx(np.sort(chances)[-best:].mean(), abs=0.03)
    depth = 1
    while policy.look_further(depth, 2, confidence, tau=0.7, l_max=5):
        depth += 1
    assert depth == (5 if confidence >= 0.7 else 2)


# ---- the meter


@given(SEEDS, st.floats(0.5, 1.6), st.floats(0, 0.2))
@settings(max_examples=40, deadline=None)
def test_prefetching_that_costs_is_turned_off(seed: int, on_seconds: float, noise: float) -> None:
    """Whatever prefetching costs or saves: the whole run takes at most 2 % more than the better mode."""
    rng = np.random.default_rng(seed)
    meter = policy.BenefitMeter()
    passes, spent = 3000, 0.0
    for _ in range(passes):
        seconds = on_seconds if meter.on else 1.0
        spent += seconds
        meter.end_pass(seconds * float(np.exp(noise * rng.standard_normal())), missed_bytes=1)
    # Differences below the noise cannot be seen in time, and matter as little.
    assert spent / passes < min(on_seconds, 1.0) * (1.02 + 0.15 * noise)
