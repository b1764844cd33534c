"""Streaming sums for fitting prediction heads: what a ridge regression needs, however long the text.

For one present layer with inputs h [rows, width] and routed experts p (indicators), and for each horizon with
the previous token's experts of the target layer q (indicators) and targets T, the sums are those of the
normal equations of  T ~ [h, p, 1, q]. The target's router is known, so its true logits are computed from what
it read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Ids = NDArray[np.int32]

_TINY = 1e-3  # of a norm's root mean square; as in cpp/compute/router_heads.cpp


@dataclass(frozen=True)
class Router:
    """One layer's router: logits = weight (x * scale + shift) + bias, of the normalised stream x; the
    experts read x * input_scale + input_shift. weight: [n_out, width]; scales and shifts: [width]; biases:
    [n_out]."""

    layer: int
    weight: Floats
    bias: Floats
    scale: Floats
    shift: Floats
    input_scale: Floats
    input_shift: Floats
    selection_bias: Floats  # [n_out], or [0] for none

    @classmethod
    def read(cls, heads: Any, group: int) -> Router:
        """The router of a group of `_core.heads.Heads`."""
        r = heads.router(group)
        n_out, width = r["weight"].shape

        def whole(name: str, size: int, default: float) -> Floats:
            return r[name] if r[name].size else np.full(size, default, np.float32)

        return cls(
            layer=heads.layers[group],
            weight=r["weight"],
            bias=whole("bias", n_out, 0.0),
            scale=whole("router_scale", width, 1.0),
            shift=whole("router_shift", width, 0.0),
            input_scale=whole("input_scale", width, 1.0),
            input_shift=whole("input_shift", width, 0.0),
            selection_bias=r["selection_bias"],
        )

    def seen_from(self, present: Router) -> tuple[Floats, Floats]:
        """The training-free head on `present`'s expert input h: (map [n_out, width], constant [n_out])."""
        tiny = _TINY * np.sqrt(np.mean(np.square(present.input_scale, dtype=np.float64)))
        kept = np.abs(present.input_scale) > tiny
        ratio = np.where(kept, self.scale / np.where(kept, present.input_scale, 1.0), 0.0)
        rows = (self.weight * ratio).astype(np.float32)
        constant = self.weight @ self.shift + self.bias - rows @ present.input_shift
        return rows, constant.astype(np.float32)

    def logits(self, hidden: Floats) -> Floats:
        """[rows, n_out] from what this layer's own experts read."""
        rows, constant = self.seen_from(self)
        return hidden @ rows.T + constant


def indicators(ids: Ids, n: int) -> Floats:
    """[rows, n]: 1 where the row's ids name the expert."""
    out = np.zeros((len(ids), n), dtype=np.float32)
    np.put_along_axis(out, ids.astype(np.int64), 1.0, axis=1)
    return out


def shifted(rows: Floats) -> Floats:
    """Each row's predecessor; the first has none, so zeros."""
    out = np.zeros_like(rows)
    out[1:] = rows[:-1]
    return out


def centred(values: Floats, wanted: bool) -> Floats:
    """Without each row's mean, which no choice by order depends on."""
    return values - values.mean(axis=1, keepdims=True) if wanted else values


@dataclass
class HorizonSums:
    """Sums of one horizon, next to the x of its MomentSums: targets are [T | M | S] of n_out columns each:
    true logits minus training-free ones, membership of the top k, training-free scores."""

    xq: Sums  # [x, n_out]
    qq: Sums  # [n_out, n_out]
    xt: Sums  # [x, 3 n_out]
    qt: Sums  # [n_out, 3 n_out]
    member_base: float = 0.0  # sums for the regression of membership on training-free scores
    base_base: float = 0.0
    logit_square: float = 0.0


@dataclass
class MomentSums:
    """Sums of one present layer. x = [h, p, 1], of width + experts + 1 columns."""

    present: Router
    targets: dict[int, Router]  # by horizon
    centre: bool
    rows: int = 0
    xx: Sums = field(init=False)
    horizons: dict[int, HorizonSums] = field(init=False)

    def __post_init__(self) -> None:
        n = self.present.weight.shape[1] + self.present.weight.shape[0] + 1
        self.xx = np.zeros((n, n))
        self.horizons = {}
        for horizon, target in self.targets.items():
            m = target.weight.shape[0]
            self.horizons[horizon] = HorizonSums(
                np.zeros((n, m)), np.zeros((m, m)), np.zeros((n, 3 * m)), np.zeros((m, 3 * m))
            )

    @staticmethod
    def bytes_for(width: int, experts: int, horizons: int) -> int:
        """Memory of the sums and of the solution's working copies, for planning passes."""
        n = width + experts + 1
        return 8 * (3 * n * n + horizons * 8 * (n + experts) * experts)

    def add(self, hidden: dict[int, Floats], ids: dict[int, Ids]) -> None:
        """Add one sequence: inputs and routed experts of all layers, by layer."""
        h, mine = hidden[self.present.layer], ids[self.present.layer]
        x = design(h, mine, self.present.weight.shape[0])
        self.xx += x.T @ x
        self.rows += len(x)
        for horizon, target in self.targets.items():
            sums = self.horizons[horizon]
            member = indicators(ids[target.layer], target.weight.shape[0])
            rows, constant = target.seen_from(self.present)
            base = centred(h @ rows.T + constant, self.centre)
            logits = centred(target.logits(hidden[target.layer]), self.centre)
            q = shifted(member)
            t = np.concatenate([logits - base, member, base], axis=1)
            sums.xq += x.T @ q
            sums.qq += q.T @ q
            sums.xt += x.T @ t
            sums.qt += q.T @ t
            mean = member.mean(axis=1, keepdims=True)
            sums.member_base += float(np.sum((member - mean) * base, dtype=np.float64))
            sums.base_base += float(np.sum(centred(base, True) ** 2, dtype=np.float64))
            sums.logit_square += float(np.sum(centred(logits, True) ** 2, dtype=np.float64))


def design(hidden: Floats, ids: Ids, n_expert: int) -> Floats:
    """x = [h, p, 1], [rows, width + experts + 1]."""
    ones = np.ones((len(hidden), 1), dtype=np.float32)
    return np.concatenate([hidden, indicators(ids, n_expert), ones], axis=1)
