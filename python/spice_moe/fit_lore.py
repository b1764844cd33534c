"""Fits LoRE, low-rank stand-ins for experts that are not in memory when they are needed (docs/lore.md).

For each layer: the experts' inputs on the text, kept in a temporary file, go through each expert's own
weights (`fit_lore_experts`), and a stand-in is solved in closed form (`fit_lore_solve`). What a substitution
costs is the error times the gate, squared: rows count by their squared gate. A token's first expert is never
substituted; that row, and rows that were routed elsewhere, count little. How many neurons of the expert
itself are kept in place of rank, and the ridge, are chosen for each layer on rows that are not fitted; errors
are reported on further rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import capture, sidecar
from .errors import SpiceUnsupportedError
from .fit_lore_experts import Expert, ExpertFile, Formula
from .fit_lore_solve import Floats, Problem, StandIn
from .llama import Llama
from .sidecar import Bytes

RIDGES = (3e-3, 3e-2, 3e-1)
OTHERS = 0.02  # weight of all rows in which the expert cannot be substituted, relative to those where it can
_TRIED = 3  # experts of a layer that the choice is made on
_PRIOR_ROWS = 8.0  # with few rows, an expert's error leans on its layer's
_CHECKED = 16  # tokens that the formula is checked on
_F16_MAX = 65504.0


@dataclass
class Rows:
    """What one layer's experts did on the text, tokens in the order fit, choice, report. hidden: [tokens,
    width]; ids, gates: [tokens, top_k]; fit, choice: tokens of those parts."""

    hidden: NDArray[np.float16]
    ids: NDArray[np.int32]
    gates: Floats
    fit: int
    choice: int

    def __post_init__(self) -> None:
        self.first = self.ids[np.arange(len(self.ids)), self.gates.argmax(axis=1)]
        self.tokens = np.arange(len(self.ids))


def collect(
    llm: Llama, fit: list[list[int]], choose: list[list[int]], report: list[list[int]], folder: Path,
    step: Callable[[], None],
) -> dict[int, Rows]:  # fmt: skip
    """Evaluate the pieces and keep, by layer, what its experts read; a layer that hides it is left out."""
    pieces = [*fit, *choose, *report]
    total, at = sum(map(len, pieces)), 0
    out: dict[int, Rows] = {}
    parts: dict[int, tuple[NDArray[np.float16], NDArray[np.int32], Floats]] = {}
    with contextlib.closing(capture.run(llm, pieces)) as chunks:
        for chunk in chunks:
            for layer in chunk.hidden.keys() & chunk.gates.keys():
                h, ids, gates = chunk.hidden[layer], chunk.ids[layer], chunk.gates[layer]
                if layer not in parts:
                    shape = (total, h.shape[1])
                    kept = np.memmap(folder / f"{layer}.f16", dtype=np.float16, mode="w+", shape=shape)
                    wide = (total, ids.shape[1])
                    parts[layer] = kept, np.zeros(wide, np.int32), np.zeros(wide, np.float32)
                now = slice(at, at + chunk.tokens)
                for place, values in zip(
                    parts[layer], (np.clip(h, -_F16_MAX, _F16_MAX), ids, gates), strict=True
                ):
                    place[now] = values
            at += chunk.tokens
            step()
    n_fit, n_choice = (sum(map(len, p)) for p in (fit, choose))
    for layer, (h, ids, gates) in sorted(parts.items()):
        out[layer] = Rows(h, ids, gates, n_fit, n_choice)
    return out


def formulas(llm: Llama, file: ExpertFile, piece: Sequence[int]) -> dict[int, Formula]:
    """What each layer's experts compute, found by trial against the running model on a few tokens.

    Raises SpiceUnsupportedError, naming the layer, where no known formula fits.
    """
    with contextlib.closing(capture.run(llm, [piece[:_CHECKED]], outputs=True)) as chunks:
        chunk = next(iter(chunks))
    return {
        layer: file.formula(layer, chunk.hidden[layer], chunk.ids[layer], down)
        for layer, down in sorted(chunk.down.items())
        if layer in chunk.hidden
    }


@dataclass
class _Data:
    """One expert's regression. The rows of `fit` come first."""

    h: Floats
    outputs: Floats
    activations: Floats
    weights: Floats  # of the rows of `fit`
    token: NDArray[np.int64]
    place: NDArray[np.int64]  # in the token's top_k; -1: not routed
    square: Floats  # squared gate where it can be substituted, else 0
    importance: Floats  # of its neurons
    n_fit: int
    expert: Expert


class LayerFit:
    """Fits the stand-ins of one layer's experts. rank: the budget, as of rows of F16; in 8 bits there are
    twice as many, and a kept neuron costs 1.5."""

    def __init__(self, file: ExpertFile, layer: int, rows: Rows, formula: Formula, rank: int) -> None:
        self._file, self._layer, self._rows, self._formula = file, layer, rows, formula
        self.n_experts = file.n_experts(layer)
        self._random = np.random.default_rng(layer)
        rank *= 2  # rows take 8 bits, `rank` is of 16
        most = min(2 * rank // 3, file.expert(layer, 0).up.shape[0])
        shares = (0, rank // 4, rank // 2, 2 * rank // 3) if formula.plain else (0,)
        # A gated neuron needs three rows where one of the rank needs two.
        self._sizes = sorted({(n, rank - (3 * n + 1) // 2) for n in (min(n, most) for n in shares)})
        self._used = np.bincount(rows.ids.ravel(), minlength=self.n_experts)

    def choose(self) -> tuple[int, int, float]:
        """Neurons to keep, rank beside them, ridge: the least error on the rows for the choice."""
        best: dict[tuple[int, int, float], float] = {}
        for number in np.argsort(-self._used)[:_TRIED]:
            data = self._data(int(number))
            held = (
                data.square
                * (data.token >= self._rows.fit)
                * (data.token < self._rows.fit + self._rows.choice)
            )
            for neurons, rank in self._sizes:
                keep, problem = self._problem(data, neurons)
                for ridge in RIDGES if rank else RIDGES[:1]:
                    wrong = self._wrong(problem.solve(rank, ridge), data, keep, held)
                    key = (neurons, rank, ridge)
                    best[key] = best.get(key, 0.0) + wrong / max(_power(data, held), 1e-30)
        return min(best, key=best.__getitem__)

    def run(self, step: Callable[[], None]) -> tuple[sidecar.Lore, dict[str, Any]]:
        """The stand-ins, and what they are worth on rows that were not fitted."""
        neurons, rank, ridge = self.choose()
        width, count = self._rows.hidden.shape[1], neurons + rank
        n, first = self.n_experts, self._rows.fit + self._rows.choice
        width_out = self._file.expert(self._layer, 0).down.shape[0]
        a, b = np.zeros((n, count, width), np.int8), np.zeros((n, count, width_out), np.int8)
        gate, gate_scale = np.zeros((n, neurons, width), np.int8), np.zeros((n, neurons), np.float32)
        scale, offset = np.zeros((n, count), np.float32), np.zeros((n, count), np.float32)
        bias = np.zeros((n, width_out), np.float16)
        wrong, base, power, norm = (np.zeros(n) for _ in range(4))
        # Of the whole block on the rows of the report: its output, and what substitution adds to it.
        block = {
            k: np.zeros((len(self._rows.ids) - first, width_out), np.float32)
            for k in ("output", "drop", "base", "lore")
        }
        fallback = 0
        for number in range(n):
            data = self._data(number)
            keep, problem = self._problem(data, neurons)
            fitted, mean = problem.solve(rank, ridge), self._mean(data)
            held = data.square * (data.token >= self._rows.fit)
            choice = held * (data.token < first)
            if self._wrong(fitted, data, keep, choice) > self._wrong(mean, data, keep[:0], choice):
                fallback += 1  # so little was seen of it that its mean output is the better guess
            else:
                parts = _as_bytes(fitted, data.expert, keep)
                for place, values in zip((a, b, gate, scale, gate_scale, offset), parts, strict=True):
                    place[number] = values
            bias[number] = np.clip(mean.bias, -_F16_MAX, _F16_MAX)
            stored = (v[number] for v in (a, b, gate, scale, gate_scale, offset))
            y = bias[number].astype(np.float32) + _evaluate(self._formula, data.h, *stored)
            held = held * (data.token >= first)
            lost = np.square(data.outputs - y).sum(axis=1)
            wrong[number], power[number] = float(held @ lost), _power(data, held)
            base[number] = float(held @ np.square(data.outputs - bias[number].astype(np.float32)).sum(axis=1))
            squares = data.square if data.square.any() else (data.place >= 0).astype(np.float32)
            norm[number] = _power(data, squares) / max(float(squares.sum()), 1e-30)
            self._add_to_block(block, data, y, bias[number].astype(np.float32), first)
            step()
        ratio = wrong.sum() / max(power.sum(), 1e-30)
        prior = (
            _PRIOR_ROWS
            * power.sum()
            / max(1, int((self._rows.tokens >= first).sum()) * self._rows.ids.shape[1])
        )
        error = (wrong + prior * ratio) / (power + prior + 1e-30)
        squares = {k: float(np.square(v, dtype=np.float64).sum(axis=1).mean()) for k, v in block.items()}
        output = max(squares["output"], 1e-30)
        lore = sidecar.Lore(
            self._layer, a, b, gate if neurons else None,
            scale, gate_scale if neurons else None, offset, bias,
            error.astype(np.float32), norm.astype(np.float32), output,
        )  # fmt: skip
        return lore, {
            "layer": self._layer,
            "neurons": neurons,
            "rank": rank,
            "ridge": ridge,
            "mean_alone": fallback,
            "error": ratio,
            "base_error": base.sum() / max(power.sum(), 1e-30),
            "expert_errors": [round(float(v), 4) for v in error],
            "block": {k: squares[k] / output for k in ("drop", "base", "lore")},
            "estimated": self._estimate(error, norm, first) / output,
        }

    def _data(self, number: int) -> _Data:
        rows = self._rows
        token, place = np.nonzero(rows.ids == number)
        away = np.flatnonzero((rows.ids[: rows.fit] != number).all(axis=1))
        n_away = min(len(away), max(64, int((token < rows.fit).sum()) // 4))
        away = np.sort(self._random.choice(away, n_away, replace=False))
        token = np.concatenate([token[token < rows.fit], away, token[token >= rows.fit]])
        n_fit = int((token < rows.fit).sum())
        place = np.concatenate([place[: n_fit - n_away], np.full(n_away, -1), place[n_fit - n_away :]])
        gates = np.where(place >= 0, rows.gates[token, np.maximum(place, 0)], 0).astype(np.float32)
        square = np.where(rows.first[token] == number, 0, np.square(gates))
        weights = square[:n_fit].copy()
        others = weights == 0
        weights[others] = OTHERS * (float(weights.sum()) or 1.0) / max(1, int(others.sum()))
        expert = self._file.expert(self._layer, number)
        h = rows.hidden[token].astype(np.float32)
        activations = expert.activations(h, self._formula)
        share = weights / weights.sum()
        seen = activations[:n_fit]
        spread = share @ np.square(seen - share @ seen)
        return _Data(
            h, activations @ expert.down.T, activations, weights.astype(np.float32), token, place,
            square, spread * np.square(expert.down).sum(axis=0), n_fit, expert,
        )  # fmt: skip

    def _problem(self, data: _Data, neurons: int) -> tuple[NDArray[np.int64], Problem]:
        keep = np.argsort(-data.importance)[:neurons]
        n = data.n_fit
        return keep, Problem(data.h[:n], data.activations[:n, keep], data.outputs[:n], data.weights)

    def _mean(self, data: _Data) -> StandIn:
        share = data.weights / data.weights.sum()
        none = np.zeros((0, data.outputs.shape[1]), np.float32)
        return StandIn(
            np.zeros((0, data.h.shape[1]), np.float32),
            none,
            np.zeros(0, np.float32),
            share @ data.outputs[: data.n_fit],
        )

    def _wrong(self, fitted: StandIn, data: _Data, keep: NDArray[np.int64], squares: Floats) -> float:
        rows = np.flatnonzero(squares)
        y = fitted(data.h[rows], data.activations[np.ix_(rows, keep)])
        return float(squares[rows] @ np.square(data.outputs[rows] - y).sum(axis=1))

    def _add_to_block(
        self, block: dict[str, Floats], data: _Data, y: Floats, mean: Floats, first: int
    ) -> None:
        rows = np.flatnonzero((data.token >= first) & (data.place >= 0))
        at = data.token[rows] - first
        gates = self._rows.gates[data.token[rows], data.place[rows]][:, None]
        free = gates * (data.square[rows] > 0)[:, None]
        out = data.outputs[rows]
        block["output"][at] += gates * out
        block["drop"][at] += free * out
        block["base"][at] += free * (out - mean)
        block["lore"][at] += free * (out - y[rows])

    def _estimate(self, error: Floats, norm: Floats, first: int) -> float:
        """Mean over rows of the report of sum g^2 error norm, over all that can be substituted."""
        ids, gates = self._rows.ids[first:], self._rows.gates[first:]
        squares = np.where(ids == self._rows.first[first:, None], 0, np.square(gates))
        return float((squares * (error * norm)[ids]).sum(axis=1).mean())


def fit_layers(
    model: str, rows: Mapping[int, Rows], formula: Mapping[int, Formula], file: ExpertFile, rank: int,
    step: Callable[[], None],
) -> tuple[list[sidecar.Lore], list[dict[str, Any]]]:  # fmt: skip
    """Stand-ins and reports of all layers; `step` is called for each expert.

    Raises SpiceUnsupportedError for a model without a layer that can be fitted.
    """
    layers = [layer for layer in file.layers if layer in rows and layer in formula]
    if not layers:
        raise SpiceUnsupportedError(f"{model}: no layer shows what its experts read, so none can be fitted")
    fitted = [LayerFit(file, layer, rows[layer], formula[layer], rank).run(step) for layer in layers]
    return [lore for lore, _ in fitted], [report for _, report in fitted]


def _power(data: _Data, squares: Floats) -> float:
    return float(squares @ np.square(data.outputs).sum(axis=1))


def _as_bytes(
    fitted: StandIn, expert: Expert, keep: NDArray[np.int64]
) -> tuple[Bytes, Bytes, Bytes, Floats, Floats, Floats]:
    """a, b, gate, scale, gate_scale and offset as in the file, kept neurons first."""
    gate, gate_scale = _rounded(expert.up[:0] if expert.gate is None else expert.gate[keep])
    a, a_scale = _rounded(np.concatenate([expert.up[keep], fitted.a]))
    b, b_scale = _rounded(fitted.b)
    return a, b, gate, a_scale * b_scale, gate_scale, fitted.offset * b_scale


def _rounded(rows: Floats) -> tuple[Bytes, Floats]:
    """Integers of 8 bits and a scale for each row."""
    scale = np.abs(rows).max(axis=1, initial=0) / 127
    return np.rint(rows / np.maximum(scale, 1e-30)[:, None]).astype(np.int8), scale.astype(np.float32)


def _evaluate(
    formula: Formula, h: Floats, a: Bytes, b: Bytes, gate: Bytes, scale: Floats, gate_scale: Floats,
    offset: Floats,
) -> Floats:  # fmt: skip
    """What the runtime will compute, without the bias."""
    z = h @ a.astype(np.float32).T
    if len(gate):
        gates = (h @ gate.astype(np.float32).T) * gate_scale
        z[:, : len(gate)] = formula.of(gates, z[:, : len(gate)])
    return (z * scale + offset) @ b.astype(np.float32)
