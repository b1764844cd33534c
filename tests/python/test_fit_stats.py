"""The sums and solutions of spice-fit on synthetic routers, where the right answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spice_moe import fit_solve
from spice_moe.fit_stats import MomentSums, Router, design, indicators, shifted

WIDTH, EXPERTS, K = 24, 8, 2


def router(layer: int, rng: np.random.Generator, **fields: Any) -> Router:
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    scale = (1.0 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)
    values: dict[str, Any] = dict(
        layer=layer,
        weight=rng.standard_normal((EXPERTS, WIDTH)).astype(np.float32),
        bias=np.zeros(EXPERTS, np.float32),
        scale=scale,
        shift=zeros,
        input_scale=scale,
        input_shift=zeros,
        selection_bias=np.zeros(0, np.float32),
    )
    assert ones.shape == (WIDTH,)
    return Router(**(values | fields))


def top(scores: Any) -> Any:
    return np.argsort(-scores, axis=1)[:, :K].astype(np.int32)


class Chain:
    """Two layers whose streams differ by a fixed rotation: the training-free guess is good, not perfect."""

    def __init__(self, seed: int, turn: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.routers = [router(3, self.rng), router(5, self.rng)]
        self.turn = np.eye(WIDTH) + turn * self.rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5

    def rows(self, n: int) -> tuple[dict[int, Any], dict[int, Any]]:
        x = self.rng.standard_normal((n, WIDTH))
        streams = [x, x @ self.turn]
        hidden = {
            r.layer: (s * r.input_scale).astype(np.float32)
            for r, s in zip(self.routers, streams, strict=True)
        }
        return hidden, {r.layer: top(r.logits(hidden[r.layer])) for r in self.routers}

    def sums(self, chunks: int, rows: int = 64) -> MomentSums:
        sums = MomentSums(self.routers[0], {1: self.routers[1]}, True)
        for _ in range(chunks):
            sums.add(*self.rows(rows))
        return sums


def test_the_sums_are_those_of_the_whole_text() -> None:
    chain = Chain(0, 0.3)
    sums = MomentSums(chain.routers[0], {1: chain.routers[1]}, True)
    whole_x, whole_q = [], []
    for rows in (5, 1, 17):
        hidden, ids = chain.rows(rows)
        sums.add(hidden, ids)
        whole_x.append(design(hidden[3], ids[3], EXPERTS))
        whole_q.append(shifted(indicators(ids[5], EXPERTS)))
        assert not whole_q[-1][0].any()  # a sequence's first token has no token before it
    x, q = np.concatenate(whole_x), np.concatenate(whole_q)
    np.testing.assert_allclose(sums.xx, x.T @ x, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(sums.horizons[1].xq, x.T @ q, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(sums.horizons[1].qq, q.T @ q)
    assert sums.rows == 23


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.floats(0.2, 1.0))
def test_the_small_system_gives_the_solution_of_the_whole_one(seed: int, turn: float) -> None:
    """The previous-token block is eliminated by its Schur complement; compare with one big ridge system."""
    sums = Chain(seed, turn).sums(6)
    s = sums.horizons[1]
    n, m = sums.xx.shape[0], EXPERTS
    whole = np.block([[sums.xx, s.xq], [s.xq.T, s.qq]])
    penalty = fit_solve._penalised(whole, 0.0, last_free=False) - whole
    assert np.all(np.diag(penalty) > 0)
    for candidate in fit_solve.drafts(sums):
        if candidate.target != "logits":
            continue
        system = whole.copy()
        system[:n, :n] = fit_solve._penalised(sums.xx, candidate.ridge)
        system[n:, n:] = fit_solve._penalised(s.qq, candidate.ridge, last_free=False)
        right = np.concatenate([s.xt[:, :m], s.qt[:, :m]])
        solved = np.linalg.solve(system, right)
        rows, _ = sums.targets[1].seen_from(sums.present)
        np.testing.assert_allclose(candidate.full, rows + solved[:WIDTH].T, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(candidate.present, solved[WIDTH : n - 1], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(candidate.previous, solved[n:], rtol=1e-3, atol=1e-3)


def test_a_rotation_is_learned() -> None:
    chain = Chain(1, 0.8)
    sums = chain.sums(40)
    hidden, ids = chain.rows(500)
    h, p = hidden[3], indicators(ids[3], EXPERTS)
    q = np.zeros((500, EXPERTS), np.float32)
    rows, constant = chain.routers[1].seen_from(chain.routers[0])

    def recall(scores: Any) -> float:
        return float((top(scores)[:, :, None] == ids[5][:, None, :]).any(1).mean())

    frozen = recall(h @ rows.T + constant)
    for make in (fit_solve.adapters, fit_solve.drafts):
        best = max(recall(c.scores(h, p, q)) for c in make(sums))
        assert best > max(0.9, frozen + 0.1)


def test_a_strong_ridge_is_the_training_free_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_solve, "RIDGES", (1e9,))
    sums = Chain(2, 0.5).sums(4)
    rows, _ = sums.targets[1].seen_from(sums.present)
    candidate = next(c for c in fit_solve.drafts(sums) if c.target == "logits")
    np.testing.assert_allclose(candidate.full, rows, atol=1e-3)


def test_a_full_rank_reduction_changes_nothing_and_a_small_one_little() -> None:
    sums = Chain(3, 0.5).sums(40)
    for candidate in fit_solve.adapters(sums):
        whole = fit_solve.reduce(candidate, sums, EXPERTS)
        assert whole is not None
        reduced, a, b = whole
        assert a.shape == (EXPERTS, WIDTH) and b.shape == (EXPERTS, EXPERTS)
        np.testing.assert_allclose(reduced.full * candidate.base, candidate.full, rtol=1e-3, atol=1e-3)
        small = fit_solve.reduce(candidate, sums, 2)
        assert small is not None and small[1].shape == (2, WIDTH)


def test_scores_are_as_far_apart_as_the_routers_own() -> None:
    chain = Chain(4, 0.3)
    sums = chain.sums(40)
    hidden, ids = chain.rows(400)
    true = chain.routers[1].logits(hidden[5])
    for candidate in fit_solve.adapters(sums):
        scores = candidate.scores(
            hidden[3], indicators(ids[3], EXPERTS), np.zeros((400, EXPERTS), np.float32)
        )
        ratio = np.std(scores - scores.mean(1, keepdims=True)) / np.std(true - true.mean(1, keepdims=True))
        assert 0.2 < ratio < 1.5


def test_too_few_rows_give_finite_candidates() -> None:
    for candidate in fit_solve.drafts(Chain(5, 0.5).sums(1, rows=3)):
        for part in (candidate.full, candidate.present, candidate.previous, candidate.bias):
            assert part is not None and np.isfinite(part).all()


def test_channels_that_a_norm_removes_are_left_out() -> None:
    rng = np.random.default_rng(0)
    present = router(0, rng)
    scale = present.input_scale.copy()
    scale[3] = 1e-7
    present = router(0, rng, input_scale=scale, scale=scale)
    rows, _ = router(1, rng).seen_from(present)
    assert not rows[:, 3].any() and np.isfinite(rows).all() and rows[:, 4].any()
