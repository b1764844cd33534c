"""The part of spice-fit that makes stand-ins for experts: evaluate the text, fit, calibrate (fit_lore)."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import fit_lore, fit_lore_sensitivity, sidecar
from .fit_lore_experts import ExpertFile, Formula
from .llama import Llama

Pieces = Sequence[Sequence[int]]

_LEAST, _MOST = 128, 1024  # tokens that each layer's sensitivity is measured on
_TOGETHER = 2048  # tokens that all layers together are measured on


class LoreRun:
    """One model's stand-ins in the making. Construct it before other work: it refuses what cannot be fitted.

    Raises SpiceUnsupportedError for experts whose formula is not known, SpiceError without the package gguf.
    """

    def __init__(self, llm: Llama, model: str | os.PathLike[str], piece: Sequence[int], rank: int) -> None:
        self._llm, self._model, self.rank = llm, os.fspath(model), rank
        self._file = ExpertFile(model)
        self._formulas = fit_lore.formulas(llm, self._file, piece)
        plain = [f.name for f in self._formulas.values() if f.plain]
        self.activation = max(sorted(set(plain)), key=plain.count, default="")
        for layer, formula in self._formulas.items():  # the file names one activation for all layers
            if formula.plain and formula.name != self.activation:
                self._formulas[layer] = Formula(formula.name, formula.of, plain=False)

    @property
    def steps(self) -> int:
        """Calls of `step` besides those for each piece of the text."""
        layers = [layer for layer in self._file.layers if layer in self._formulas]
        return sum(map(self._file.n_experts, layers)) + len(layers) + 1

    def fit(
        self, fit: Pieces, choose: Pieces, report: Pieces, folder: Path, step: Callable[[], None]
    ) -> tuple[list[sidecar.Lore], dict[str, Any]]:
        """The layers' stand-ins, without sensitivities, and the report. `folder`: for temporary files."""
        with tempfile.TemporaryDirectory(prefix=".spice-fit-", dir=folder) as place:
            rows = fit_lore.collect(self._llm, fit, choose, report, Path(place), step)
            layers, reports = fit_lore.fit_layers(
                self._model, rows, self._formulas, self._file, self.rank, step
            )
        size = sum(layer.nbytes for layer in layers)
        return layers, {
            "rank": self.rank,
            "activation": self.activation,
            "bytes": size,
            "share": size / self._file.nbytes,
            "layers": reports,
        }

    def facts(self, layers: Sequence[sidecar.Lore]) -> dict[str, Any]:
        """For the sidecar's header."""
        out: dict[str, Any] = {
            "lore.rank": np.uint32(self.rank),
            "lore.base": "mean",
            "lore.bytes": sum(layer.nbytes for layer in layers),
        }
        return {**out, "lore.activation": self.activation} if self.activation else out

    def calibrate(
        self, layers: Sequence[sidecar.Lore], draft: Path, pieces: Pieces, step: Callable[[], None]
    ) -> list[sidecar.Lore]:
        """The layers with their sensitivities; `draft`: a sidecar that holds them."""
        numbers = [layer.layer for layer in layers]
        each = min(_MOST, max(_LEAST, sum(map(len, pieces)) // len(numbers)))
        some, more = _first(pieces, each), _first(pieces, _TOGETHER)
        found = fit_lore_sensitivity.measure(self._llm, draft, some, more, numbers, step)
        return [dataclasses.replace(layer, sensitivity=found[layer.layer]) for layer in layers]


def _first(pieces: Pieces, tokens: int) -> list[Sequence[int]]:
    """The first `tokens` tokens of the pieces."""
    out: list[Sequence[int]] = []
    for piece in pieces:
        left = tokens - sum(map(len, out))
        if left > 1:
            out.append(piece[:left])
    return out
