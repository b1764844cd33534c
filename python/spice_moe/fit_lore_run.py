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

_LEAST, _MOST = 256, 1024  # tokens that each layer's sensitivity is measured on
_WINDOW = 64  # of these, at least in one sequence
_TOGETHER = 4096  # tokens that all layers together are measured on


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
        self,
        layers: Sequence[sidecar.Lore],
        pieces: Pieces,
        write: Callable[[Sequence[sidecar.Lore]], Path],
        step: Callable[[], None],
    ) -> tuple[list[sidecar.Lore], list[tuple[float, float]]]:
        """The layers with their sensitivities, and the curve of KL; `write` makes a sidecar of layers."""
        numbers = [layer.layer for layer in layers]
        some = _spread(pieces, min(_MOST, max(_LEAST, sum(map(len, pieces)) // len(numbers))))
        found = fit_lore_sensitivity.sensitivities(self._llm, write(layers), some, numbers, step)
        layers = [dataclasses.replace(layer, sensitivity=found[layer.layer]) for layer in layers]
        together = _whole(pieces, _TOGETHER)
        with_curve = fit_lore_sensitivity.curve(self._llm, write(layers), together, lambda: None)
        step()
        return layers, with_curve


def _whole(pieces: Pieces, tokens: int) -> list[Sequence[int]]:
    """Pieces from all parts of the text, of about that many tokens."""
    count = max(1, min(len(pieces), tokens // max(map(len, pieces))))
    return [pieces[i] for i in np.linspace(0, len(pieces) - 1, count).round().astype(int)]


def _spread(pieces: Pieces, tokens: int) -> list[Sequence[int]]:
    """About that many tokens from all parts of the text, as beginnings of pieces."""
    some = _whole(pieces, tokens * max(map(len, pieces)) // _WINDOW)
    return [piece[: max(_WINDOW, tokens // len(some))] for piece in some]
