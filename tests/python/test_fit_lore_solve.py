"""The closed-form stand-ins against what their definition says, solved another way."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from spice_moe.fit_lore_solve import Floats, Problem


def problem(seed: int, n: int, width: int, out: int) -> tuple[Floats, Floats, Floats]:
    """Inputs, outputs that are no linear function of them, and weights."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((n, width)).astype(np.float32) + rng.standard_normal(width).astype(np.float32)
    t = h @ rng.standard_normal((width, out)).astype(np.float32) + rng.standard_normal((n, out)).astype(
        np.float32
    )
    return h, t, rng.uniform(0.1, 2.0, n).astype(np.float32)


def direct(h: Floats, t: Floats, w: Floats, rank: int, ridge: float) -> Floats:
    """Fitted values of the definition: the ridge as further rows, all in doubles, and one SVD."""
    share = np.float64(w) / w.sum()
    h0, t0 = share @ h, share @ t
    x, y = (np.sqrt(share)[:, None] * (v - v0) for v, v0 in ((h, h0), (t, t0)))
    tau = np.square(x).sum() / x.shape[1]
    rows = np.concatenate([x, np.sqrt(ridge * tau) * np.eye(x.shape[1])])
    targets = np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))])
    solution = np.linalg.lstsq(rows, targets, rcond=None)[0]
    _, _, right = np.linalg.svd(rows @ solution, full_matrices=False)
    return t0 + (h - h0) @ solution @ right[:rank].T @ right[:rank]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(3, 60), width=st.integers(1, 30), out=st.integers(1, 70),
    rank=st.integers(0, 8), ridge=st.sampled_from([0.01, 0.3, 3.0]),
)  # fmt: skip
def test_the_stand_in_is_the_penalised_reduced_rank_regression(
    seed: int, n: int, width: int, out: int, rank: int, ridge: float
) -> None:
    """In rows and in columns: n is below the width or above it."""
    h, t, w = problem(seed, n, width, out)
    none = np.zeros((n, 0), np.float32)
    got = Problem(h, none, t, w).solve(rank, ridge)
    assert got.a.shape == (min(rank, n, width, out), width)
    expected = direct(h, t, w, rank, ridge)
    # Directions whose shares are nearly the same may be exchanged, at no loss; so losses are compared.
    loss, least = (float(w @ np.square(t - y).sum(axis=1)) for y in (got(h, none), expected))
    penalty = float(np.square(got.b.T @ got.a).sum())
    assert np.isfinite(penalty)
    total = float(w @ np.square(t - w @ t / w.sum()).sum(axis=1))
    assert loss <= least + 0.02 * total


def test_the_mean_is_what_is_left_without_rank_and_neurons() -> None:
    h, t, w = problem(1, 20, 5, 3)
    none = np.zeros((20, 0), np.float32)
    got = Problem(h, none, t, w).solve(0, 1.0)
    np.testing.assert_allclose(got(h, none), np.broadcast_to(w @ t / w.sum(), t.shape), rtol=1e-5, atol=1e-5)


def test_kept_neurons_explain_what_is_theirs() -> None:
    """An output of two neurons and a line in one direction needs these and rank 1."""
    rng = np.random.default_rng(2)
    h = rng.standard_normal((200, 6)).astype(np.float32)
    p = np.maximum(h[:, :2], 0)
    t = p @ rng.standard_normal((2, 9)).astype(np.float32) + np.outer(h[:, 3], rng.standard_normal(9))
    weights = rng.uniform(0.5, 1.0, 200).astype(np.float32)
    with_neurons = Problem(h, p, t.astype(np.float32), weights).solve(1, 1e-4)
    without = Problem(h, p[:, :0], t.astype(np.float32), weights).solve(1, 1e-4)
    power = np.square(t - t.mean(axis=0)).sum()
    assert np.square(t - with_neurons(h, p)).sum() < 1e-3 * power
    assert np.square(t - without(h, p[:, :0])).sum() > 0.1 * power


def test_offsets_centre_what_the_rank_adds() -> None:
    h, t, w = problem(3, 50, 8, 4)
    p = np.abs(h[:, :2])
    got = Problem(h, p, t, w).solve(3, 0.1)
    z = np.concatenate([p, h @ got.a.T], axis=1) + got.offset
    np.testing.assert_allclose(w @ z / w.sum(), 0, atol=1e-4)
    np.testing.assert_allclose(got.bias, w @ t / w.sum(), rtol=1e-4, atol=1e-4)
