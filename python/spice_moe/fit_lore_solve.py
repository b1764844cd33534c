"""Closed-form stand-ins for one expert: reduced-rank ridge regression of its output on its input.

With rows h [n, width], outputs T [n, width_out] and weights w, the stand-in y = bias + b^T (a h) of rank r
minimises  sum_t w_t |T_t - y(h_t)|^2 + ridge * tau * |b^T a|^2,  tau the mean square of a centred input. Its
solution is the full ridge solution W projected on the top r eigenvectors of the fitted outputs' second
moment in the metric of the penalised problem (whitened reduced-rank regression; Izenman 1975). Neurons of
the expert itself can be kept beside it: their activations are regressors without a rank limit or a ridge to
speak of, and what is left is fitted by the low rank (partial reduced-rank regression).

All of it is solved in the smaller of the two spaces: with fewer rows than width, in the space of rows (dual).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_OVERSAMPLE, _ITERATIONS = 8, 4
_KEPT_RIDGE = 1e-3  # of the kept neurons' mean square: they are the expert's own


@dataclass(frozen=True)
class StandIn:
    """y = bias + sum_r z_r b_r with z = [p, h a^T] + offset, for h [rows, width] and the activations p [rows,
    neurons] of the kept neurons. a: [rank, width]; b: [neurons + rank, width_out]; offset: [neurons + rank],
    so that z is zero on average and bias: [width_out] the mean output."""

    a: Floats
    b: Floats
    offset: Floats
    bias: Floats

    def __call__(self, h: Floats, p: Floats) -> Floats:
        return self.bias + (np.concatenate([p, h @ self.a.T], axis=1) + self.offset) @ self.b


class Problem:
    """One expert's regression; several ranks and ridges can be tried on it."""

    def __init__(self, h: Floats, kept: Floats, outputs: Floats, weights: Floats) -> None:
        """h: [n, width]; kept: [n, neurons], possibly none; outputs: [n, width_out]; weights: [n], >= 0."""
        share = (weights / weights.sum()).astype(np.float32)
        root = np.sqrt(share)[:, None]
        self._h0, self._p0, self._y0 = share @ h, share @ kept, share @ outputs
        x, q, t = (h - self._h0) * root, (kept - self._p0) * root, (outputs - self._y0) * root
        self._tau = float(np.square(x, dtype=np.float64).sum()) / x.shape[1] + 1e-30
        if q.shape[1]:
            moments = q.T @ q
            moments[np.diag_indices_from(moments)] += (
                _KEPT_RIDGE * float(np.trace(moments)) / len(moments) + 1e-30
            )
            on = np.linalg.solve(moments, q.T @ np.concatenate([x, t], axis=1)).astype(np.float32)
            self._on_x, self._on_t = on[:, : x.shape[1]], on[:, x.shape[1] :]
            x, t = x - q @ self._on_x, t - q @ self._on_t
        else:
            self._on_x, self._on_t = (np.zeros((0, v.shape[1]), np.float32) for v in (x, t))
        self._x, self._t = x, t
        self._dual = x.shape[0] < x.shape[1]
        self._moments = x @ x.T if self._dual else x.T @ x
        self._right = t if self._dual else x.T @ t

    def solve(self, rank: int, ridge: float) -> StandIn:
        """The stand-in of this rank (0: the mean and the kept neurons alone) and ridge, a share of tau."""
        width, width_out = self._x.shape[1], self._t.shape[1]
        rank = min(rank, width_out, width, len(self._x))
        a, b = np.zeros((rank, width), np.float32), np.zeros((rank, width_out), np.float32)
        if rank:
            system = self._moments.copy()
            system[np.diag_indices_from(system)] += np.float32(ridge * self._tau)
            solved = np.linalg.solve(system, self._right)
            if self._dual:
                fitted = self._t - np.float32(ridge * self._tau) * solved
                b = _top(self._t, fitted, rank)
                a = (self._x.T @ (solved @ b.T)).T
            else:
                b = _top(self._right, solved, rank)
                a = (solved @ b.T).T
        kept = self._on_t - (self._on_x @ a.T) @ b
        offset = -np.concatenate([self._p0, a @ self._h0])
        parts = (a, np.concatenate([kept, b]), offset, self._y0)
        return StandIn(*(np.ascontiguousarray(v, dtype=np.float32) for v in parts))


def _top(left: Floats, right: Floats, rank: int) -> Floats:
    """The top eigenvectors [rank, m] of left^T right [m, m], symmetric, by subspace iteration."""
    m = left.shape[1]
    if m <= 2 * rank + _OVERSAMPLE:
        return np.linalg.eigh(left.T @ right)[1][:, ::-1][:, :rank].T.astype(np.float32)
    # From the outputs themselves, which the fitted outputs mostly follow.
    start = np.random.default_rng(0).standard_normal((left.shape[0], rank + _OVERSAMPLE)).astype(np.float32)
    basis = np.linalg.qr(right.T @ start)[0]
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(left.T @ (right @ basis))[0]
    small = (left @ basis).T @ (right @ basis)
    values, turn = np.linalg.eigh((small + small.T) / 2)
    return (basis @ turn[:, np.argsort(values)[::-1][:rank]]).T.astype(np.float32)
