"""What a predictor expected of each layer call of a recorded text: by the C++ classes that run with a model.

A `Forecaster` is shown one sequence after the other, token by token, as in decoding, and learns as it goes.
`spice-trace --predictions` writes what it said into the trace, for the simulator; `bench/prediction.py`
judges it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core, capture
from .errors import SpiceUnsupportedError
from .fit_recall import KINDS, Chooser
from .fit_stats import Router
from .llama import Llama

HORIZONS = 6  #: layers ahead, as the runtime looks at most


@dataclass(frozen=True)
class Said:
    """ids: [layers, tokens, horizons, named], the likeliest first, -1 where nothing was said; chances:
    the same shape, 0 .. 1. Horizons past the last layer are the next token's first layers."""

    ids: NDArray[np.int32]
    chances: NDArray[np.float32]


def head_kind(name: str, heads: Any) -> str:
    """The kind of head whose scores the predictor of that name is given; '' for none."""
    source = _core.policy.Predictor(name, n_groups=2, n_experts=4, top_k=2).scores
    fitted = next((kind for kind in ("draft", "adapter") if has_fitted(heads, kind)), "")
    if name in KINDS:
        return name if has_fitted(heads, name) else ""
    return {"frozen": "training-free", "fitted": fitted, "best": fitted or "training-free"}.get(source, "")


def has_fitted(heads: Any, kind: str) -> bool:
    """Whether a sidecar gave the model heads of that kind."""
    return any(
        heads.fitted(kind, group, horizon)
        for group in range(len(heads.layers))
        for horizon in range(1, HORIZONS + 1)
    )


class Forecaster:
    """One predictor on one model. `heads`: `_core.heads.Heads` with at least `HORIZONS` horizons."""

    def __init__(self, heads: Any, name: str) -> None:
        self._heads = heads
        self.kind = head_kind(name, heads)
        if name in KINDS and not self.kind:
            raise SpiceUnsupportedError(
                f"predictor '{name}' needs fitted heads; make them with spice-fit and give the sidecar"
            )
        self._chooser = Chooser(heads)
        self.top_k = self._chooser.top_k
        self.layers: list[int] = list(heads.layers)
        self._routers = {g: Router.read(heads, g) for g in range(len(self.layers)) if heads.has_router(g)}
        self._n_experts = max(heads.n_expert)
        self._predictor = _core.policy.Predictor(
            name,
            n_groups=len(self.layers),
            n_experts=self._n_experts,
            top_k=self._chooser.top_k,
            max_horizon=HORIZONS,
        )

    def play(self, chunk: capture.Chunk, named: int, *, wrap: bool = True) -> Said | None:
        """What it says of one sequence, `named` experts a time; wrap: of the next token's layers, too.

        None for a model with two banks of experts in a layer, or layers that llama.cpp leaves out.
        """
        found = [chunk.ids.get(layer) for layer in self.layers]
        if any(ids is None for ids in found):
            return None
        ids = np.stack([one for one in found if one is not None])
        n_groups, tokens, _ = ids.shape
        named = min(named, self._n_experts)
        scores = {
            (g, h): self._scores(chunk, g, h)
            for g in range(n_groups)
            for h in range(1, min(HORIZONS, n_groups - 1 - g) + 1)
        }
        out = np.full((n_groups, tokens, HORIZONS, named), -1, np.int32)
        chances = np.zeros(out.shape, np.float32)
        for token in range(tokens):
            for group in range(n_groups):
                self._predictor.begin_call(group, ids[group, token : token + 1])
                last = HORIZONS if wrap else min(HORIZONS, n_groups - 1 - group)
                for horizon in range(1, min(last, n_groups - 1) + 1):
                    given = scores.get((group, horizon))
                    row = () if given is None else given[token : token + 1]
                    said = self._predictor.predict(group, horizon, np.asarray(row, np.float32))
                    if said is None:
                        continue
                    order = np.argsort(-said, kind="stable")[:named]
                    out[group, token, horizon - 1] = order
                    chances[group, token, horizon - 1] = said[order]
        return Said(out, chances)

    def _scores(self, chunk: capture.Chunk, group: int, horizon: int) -> Any:
        """Ranking scores [tokens, experts] of group + horizon, or None."""
        target = group + horizon
        if not self.kind or group not in self._routers or target not in self._routers:
            return None
        layer = self.layers[group]
        if layer not in chunk.hidden:
            return None
        ids = chunk.ids[self.layers[target]]
        previous = np.concatenate([np.full_like(ids[:1], -1), ids[:-1]])
        raw = self._heads.scores(self.kind, group, horizon, chunk.hidden[layer], chunk.ids[layer], previous)
        return None if raw is None else self._chooser.ranking(raw, self._routers[target])


def open_forecaster(
    model: str | os.PathLike[str], name: str, sidecar: str | os.PathLike[str] | None = None
) -> Forecaster:
    """A predictor for a model file; `sidecar` has its fitted heads.

    Raises SpiceUnsupportedError where that predictor cannot be asked, and SpiceError subclasses for a model
    or a sidecar that cannot be read.
    """
    known = [one for one in _core.policy.predictor_names() if one != "replay"]
    if name not in known:
        raise SpiceUnsupportedError(f"no predictor is called '{name}' here; choose one of: {' '.join(known)}")
    file = "" if sidecar is None else os.fspath(sidecar)
    heads = _core.heads.Heads(os.fspath(model), sidecar=file, max_horizon=HORIZONS)
    if not heads.layers:
        raise SpiceUnsupportedError(f"{os.fspath(model)}: the model has no routed experts")
    return Forecaster(heads, name)


def record(
    forecaster: Forecaster,
    model: str | os.PathLike[str],
    pieces: Sequence[Sequence[int]],
    ids: Sequence[NDArray[np.integer]],
    *,
    n_threads: int = 0,
) -> Iterator[Said]:
    """What the forecaster says of each sequence of token ids, run through the model in SPICE.

    ids: the experts of each sequence, [layers, tokens, top_k], as they were recorded. Raises
    SpiceUnsupportedError where not every layer can be watched, and what `Llama` raises.
    """
    longest = max(map(len, pieces))
    options: dict[str, Any] = dict(n_ctx=longest, n_batch=longest, prefetch=False, preload=False)
    if n_threads:
        options |= {"n_threads": n_threads, "n_threads_batch": n_threads}
    llm = Llama(model, verbose=False, **options)
    with contextlib.closing(llm), contextlib.closing(capture.run(llm, pieces)) as chunks:
        for chunk, chosen in zip(chunks, ids, strict=True):
            if list(chunk.ids) != forecaster.layers or len(chosen) != len(forecaster.layers):
                raise SpiceUnsupportedError(f"{os.fspath(model)}: not every layer's routing can be watched")
            # What was recorded may differ in the last bits (batches, repacked weights), and so in an expert.
            chunk.ids = dict(zip(forecaster.layers, chosen.astype(np.int32), strict=True))
            said = forecaster.play(chunk, 2 * forecaster.top_k)
            assert said is not None
            yield said
