"""Ridge solutions of the sums of fit_stats, shrunk towards the training-free head, as candidate heads.

Two targets are tried, and the better is kept by recall on held-out rows:

* logits: the target router's true logits minus the training-free ones, so that ridge pulls towards the
  training-free head;
* membership of the top k, minus the training-free scores times the factor that predicts membership best.

The penalty of each coefficient is a share of its feature's mean square. A reduced rank keeps the directions
of the fitted values with the most variance (reduced-rank regression); SpecPrefetch's adapter has rank 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .fit_stats import Floats, HorizonSums, MomentSums, Sums

RIDGES = (3e-4, 3e-3, 3e-2, 3e-1, 3.0)


@dataclass(frozen=True)
class Candidate:
    """Scores = full h + present rows + previous rows + bias, in the scale of the router's logits.

    full: [n_out, width]; present: [experts, n_out] and previous: [n_out, n_out], or None; bias: [n_out].
    base: the share of the training-free map in `full`, 0 if its sign is wrong.
    """

    horizon: int
    target: str
    ridge: float
    full: Floats
    present: Floats | None
    previous: Floats | None
    bias: Floats
    base: float

    def scores(self, h: Floats, p: Floats, q: Floats) -> Floats:
        """[rows, n_out] from inputs [rows, width] and indicators [rows, experts], [rows, n_out]."""
        out = h @ self.full.T + self.bias
        if self.present is not None:
            out += p @ self.present
        if self.previous is not None:
            out += q @ self.previous
        return out


def drafts(sums: MomentSums) -> Iterator[Candidate]:
    """Candidates on [h, p, 1, q], for every horizon, target and ridge."""
    width = sums.present.weight.shape[1]
    for ridge in RIDGES:
        system = _penalised(sums.xx, ridge)
        right = [part for s in sums.horizons.values() for part in (s.xq, s.xt)]
        solved = _solve(system, np.concatenate(right, axis=1))
        at = 0
        for horizon, s in sums.horizons.items():
            m = s.qq.shape[0]
            on_q, on_t = solved[:, at : at + m], solved[:, at + m : at + 4 * m]
            at += 4 * m
            rest = _penalised(s.qq, ridge, last_free=False) - s.xq.T @ on_q  # Schur complement
            v = _solve(rest, s.qt - s.xq.T @ on_t)
            w = on_t - on_q @ v
            for target, coefficients, base in _targets(s, w, v):
                wide, previous = coefficients
                yield _candidate(
                    sums, horizon, target, ridge, wide[:width], wide[width:-1], previous, wide[-1], base, s
                )


def adapters(sums: MomentSums) -> Iterator[Candidate]:
    """Candidates on the hidden state alone."""
    width = sums.present.weight.shape[1]
    kept = [*range(width), sums.xx.shape[0] - 1]
    xx = sums.xx[np.ix_(kept, kept)]
    for ridge in RIDGES:
        right = np.concatenate([s.xt[kept] for s in sums.horizons.values()], axis=1)
        solved = _solve(_penalised(xx, ridge), right)
        at = 0
        for horizon, s in sums.horizons.items():
            m = s.qq.shape[0]
            w = solved[:, at : at + 3 * m]
            at += 3 * m
            for target, (wide, _), base in _targets(s, w, None):
                yield _candidate(sums, horizon, target, ridge, wide[:width], None, None, wide[-1], base, s)


def reduce(candidate: Candidate, sums: MomentSums, rank: int) -> tuple[Candidate, Floats, Floats] | None:
    """The candidate with its map brought to "router + rank `rank`", and that low rank as a [rank, width], b
    [rank, n_out]; None when the training-free part has no share in it."""
    if candidate.base <= 0.0:
        return None
    rows, _ = sums.targets[candidate.horizon].seen_from(sums.present)
    width = rows.shape[1]
    delta = (candidate.full / candidate.base - rows).astype(np.float64)  # [n_out, width]
    _, vectors = np.linalg.eigh(delta @ sums.xx[:width, :width] @ delta.T)
    top = vectors[:, ::-1][:, :rank]
    a, b = (top.T @ delta).astype(np.float32), top.T.astype(np.float32)
    scale = np.float32(1.0 / candidate.base)
    reduced = Candidate(
        candidate.horizon,
        candidate.target,
        candidate.ridge,
        rows + b.T @ a,
        None if candidate.present is None else candidate.present * scale,
        None if candidate.previous is None else candidate.previous * scale,
        candidate.bias * scale,
        1.0,
    )
    return reduced, a, b


def _targets(
    s: HorizonSums, w: Sums, v: Sums | None
) -> Iterator[tuple[str, tuple[Sums, Sums | None], float]]:
    """Each target's coefficients and its factor on the training-free scores."""
    m = s.qq.shape[0]

    def mix(part: Sums | None, one: int, factor: float) -> Sums | None:
        if part is None:
            return None
        return part[:, one * m : (one + 1) * m] - factor * part[:, 2 * m :]

    yield "logits", (mix(w, 0, 0.0), mix(v, 0, 0.0)), 1.0  # type: ignore[misc]
    factor = max(0.0, s.member_base / s.base_base) if s.base_base > 0 else 0.0
    yield "membership", (mix(w, 1, factor), mix(v, 1, factor)), factor  # type: ignore[misc]


def _candidate(
    sums: MomentSums,
    horizon: int,
    target: str,
    ridge: float,
    on_h: Sums,
    on_p: Sums | None,
    on_q: Sums | None,
    constant: Sums,
    base: float,
    s: HorizonSums,
) -> Candidate:
    rows, shift = sums.targets[horizon].seen_from(sums.present)
    full = base * rows + on_h.T
    # The spread that the router's own logits have: whoever turns scores into chances starts from there.
    scale = 1.0
    if target == "membership":
        width = rows.shape[1]
        centre = full - full.mean(axis=0)
        xx = sums.xx[:width, :width]
        spread = float(np.einsum("ij,jk,ik->", centre, xx, centre, optimize=True))
        scale = float(np.sqrt(s.logit_square / spread)) if spread > 0 else 1.0

    def out(values: Sums | None) -> Floats | None:
        return None if values is None else (scale * values).astype(np.float32)

    bias = out(base * shift + constant)
    whole = out(full)
    assert bias is not None and whole is not None
    return Candidate(horizon, target, ridge, whole, out(on_p), out(on_q), bias, scale * base)


def _penalised(moments: Sums, ridge: float, *, last_free: bool = True) -> Sums:
    """Moments plus `ridge` times their diagonal; the last feature, the constant, goes almost free."""
    diagonal = np.diag(moments).copy()
    floor = 1e-6 * max(float(diagonal.mean()), 1e-12)  # features that never occurred
    penalty = ridge * diagonal + floor
    if last_free:
        penalty[-1] = 1e-6 * diagonal[-1] + 1e-12
    out = moments.copy()
    out[np.diag_indices_from(out)] += penalty
    return out


def _solve(system: Sums, right: Sums) -> Sums:
    """The solution of a symmetric system; the least-squares one where rounding has made it singular."""
    try:
        return np.linalg.solve(system, right)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(system, right, rcond=None)[0]
