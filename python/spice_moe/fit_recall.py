"""Recall of predicted experts: what spice-fit chooses by and reports, and bench/prediction.py shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _core, capture
from .fit_stats import Floats, Ids, Router

KINDS = ("adapter", "draft")  #: of fitted heads


def share(predicted: Ids, ids: Ids) -> float:
    """The share of `ids` [rows, k] that is in `predicted` [rows, k]."""
    return float((predicted[:, :, None] == ids[:, None, :]).any(axis=1).mean())


@dataclass
class Recall:
    """Hits and chances of a top-k prediction, by kind, horizon and layer of the target."""

    hits: dict[tuple[str, int, int], int] = field(default_factory=dict)
    total: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def add(self, kind: str, horizon: int, layer: int, predicted: Ids, ids: Ids) -> None:
        """Count which of `ids` [rows, k] are in `predicted` [rows, k]."""
        key = (kind, horizon, layer)
        right = int((predicted[:, :, None] == ids[:, None, :]).any(axis=1).sum())
        self.hits[key] = self.hits.get(key, 0) + right
        self.total[key] = self.total.get(key, 0) + ids.size

    def of(self, kind: str, horizon: int, layer: int | None = None) -> float | None:
        """The share found, over all layers or of one; None when nothing was predicted."""
        keys = [k for k in self.total if k[0] == kind and k[1] == horizon and layer in (None, k[2])]
        total = sum(self.total[k] for k in keys)
        return sum(self.hits[k] for k in keys) / total if total else None

    def table(self, kinds: Sequence[str], horizons: int) -> dict[str, list[float | None]]:
        """By kind: one number per horizon."""
        return {kind: [self.of(kind, h) for h in range(1, horizons + 1)] for kind in kinds}


class Chooser:
    """Top-k choices of a model's gating from raw scores."""

    def __init__(self, heads: Any) -> None:
        g = heads.gating
        self.top_k: int = g["top_k"]
        self._gating = {
            "activation": {"softmax_chosen": "none"}.get(g["kind"], g["kind"]),
            "n_expert_groups": g["n_groups"],
            "n_groups_used": g["n_groups_used"],
        }
        self._grouped = g["n_groups"] > 1

    def by_order(self, router: Router) -> bool:
        """Whether nothing but the order of a row's scores decides."""
        return router.selection_bias.size == 0 and not self._grouped

    def ranking(self, scores: Floats, router: Router) -> Floats:
        """[rows, experts]: scores whose order is that of the model's choice (cpp/policy/gating.h)."""
        raw = np.ascontiguousarray(scores, np.float32)
        return _core.policy.ranking_scores(raw, selection_bias=router.selection_bias, **self._gating)

    def __call__(self, scores: Floats, router: Router) -> Ids:
        """[rows, top_k] expert ids, best first."""
        ranked = self.ranking(scores, router)
        order = np.argsort(-ranked, axis=1, kind="stable")
        return order[:, : min(self.top_k, order.shape[1])].astype(np.int32)


def count(
    recall: Recall,
    heads: Any,
    routers: Mapping[int, Router],
    chooser: Chooser,
    chunk: capture.Chunk,
    group: int,
    horizon: int,
) -> None:
    """Add one chunk's predictions of group + horizon from `group`, of every kind that the heads have."""
    present, target = routers[group], routers[group + horizon]
    if present.layer not in chunk.hidden or target.layer not in chunk.ids:
        return
    ids = chunk.ids[target.layer]
    previous = np.concatenate([np.full_like(ids[:1], -1), ids[:-1]])
    for kind in ("training-free", *KINDS):
        scores = heads.scores(
            kind, group, horizon, chunk.hidden[present.layer], chunk.ids[present.layer], previous
        )
        if scores is not None:
            recall.add(kind, horizon, target.layer, chooser(scores, target), ids)
