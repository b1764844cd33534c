"""Routing traces: which experts each token used in each layer. Recording them, and the .npz they live in.

    from spice_moe import trace

    trace.record("model.gguf", ["Some text ..."], "t.npz")
    t = trace.load("t.npz")
    t.ids  # [layers, tokens, top_k]

Recording works for every MoE architecture of llama.cpp: it watches the graph through llama.cpp's evaluation
callback, which makes every node synchronise, so it is slow; the numbers computed are the stock ones. SPICE
itself is not involved. The format is described in docs/trace-format.md.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import files
from .errors import SpiceError, SpiceFormatError, SpiceUnsupportedError
from .watch import BIASES, Recorder, Seen

if TYPE_CHECKING:
    from .predictions import Forecaster

FORMAT_VERSION = 1
_REQUIRED = ("ids", "lens", "n_expert")
_PER_TOKEN = {"weights": "top_k", "router_inputs": "width"}  # optional [layers, tokens, that]
_PER_EXPERT = BIASES  # optional [layers, n_expert]
_PREDICTED = ("predictions", "prediction_chances")  # optional [layers, tokens, horizons, named]


@dataclass(frozen=True)
class Trace:
    """One routing trace; sequences are concatenated along tokens. Optional parts are None when absent.

    ids: [layers, tokens, top_k], best first. lens: [sequences], tokens of each. layers: [layers], the
    model's layer numbers. weights: like ids, the gate weights that multiply the experts' outputs. tokens:
    [tokens], token ids. router_inputs: [layers, tokens, width] F16, what the router reads. routers:
    [layers, n_expert, width]; router_bias, selection_bias: [layers, n_expert], added to the router's logits
    and to its gate values before the choice. predictions: [layers, tokens, horizons, named], the experts that
    a predictor expected of the layers 1, 2, .. calls later, likeliest first, -1 for none; prediction_chances:
    the chance of each.
    """

    ids: NDArray[np.integer]
    lens: NDArray[np.integer]
    n_expert: int
    layers: NDArray[np.integer]
    meta: dict[str, Any] = field(default_factory=dict)
    weights: NDArray[np.floating] | None = None
    tokens: NDArray[np.integer] | None = None
    router_inputs: NDArray[np.floating] | None = None
    routers: NDArray[np.floating] | None = None
    router_bias: NDArray[np.floating] | None = None
    selection_bias: NDArray[np.floating] | None = None
    predictions: NDArray[np.integer] | None = None
    prediction_chances: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        """Raise SpiceFormatError if the parts contradict each other."""
        _check(self)

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    def summary(self) -> dict[str, Any]:
        """What the trace holds, in plain values."""
        layers, tokens, k = self.ids.shape
        optional = ("weights", "tokens", "router_inputs", "routers", "router_bias", "selection_bias")
        optional += _PREDICTED
        return {
            "layers": layers,
            "first_layer": int(self.layers[0]) if layers else None,
            "tokens": tokens,
            "sequences": len(self.lens),
            "top_k": k,
            "n_expert": self.n_expert,
            "has": [name for name in optional if getattr(self, name) is not None],
            "meta": self.meta,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace; a file of that name is replaced only when the new one is complete."""
        arrays = {
            name: value
            for name in (*_REQUIRED, "layers", *_PER_TOKEN, "tokens", "routers", *_PER_EXPERT, *_PREDICTED)
            if (value := getattr(self, name)) is not None
        }
        return _write(Path(path), arrays, self.meta)


def load(path: str | os.PathLike[str], *, router_inputs: bool = True) -> Trace:
    """Read a trace. router_inputs=False leaves that (large) part out.

    Raises SpiceFileNotFoundError, or SpiceFormatError that says what is wrong with the file.
    """
    path = Path(path)
    files.check_input(path, "a routing trace, which spice-trace writes")
    if not zipfile.is_zipfile(path):
        raise SpiceFormatError(f"{path}: not an .npz routing trace; spice-trace writes one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in _REQUIRED if name not in archive.files]
            if missing:
                raise SpiceFormatError(f"{path}: not a routing trace, it has no {', '.join(missing)}")
            names = {*_REQUIRED, "layers", "tokens", "routers", *_PER_TOKEN, *_PER_EXPERT, *_PREDICTED}
            if not router_inputs:
                names.discard("router_inputs")
            parts = {name: archive[name] for name in names if name in archive.files}
            meta = json.loads(str(archive["meta"])) if "meta" in archive.files else {}
    except SpiceError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SpiceFormatError(f"{path}: not a readable .npz routing trace: {error}") from error
    if not isinstance(meta, dict):
        raise SpiceFormatError(f"{path}: its meta is no JSON object")
    n_expert = parts.pop("n_expert")
    if n_expert.size != 1 or n_expert.dtype.kind not in "iu":
        raise SpiceFormatError(f"{path}: n_expert is no whole number")
    if parts["ids"].ndim == 3:
        parts.setdefault("layers", np.arange(parts["ids"].shape[0], dtype=np.int32))
    try:
        return Trace(n_expert=int(n_expert.item()), meta=meta, **parts)
    except SpiceFormatError as error:
        raise SpiceFormatError(f"{path}: {error}") from None


def _check(t: Trace) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise SpiceFormatError(message)

    need(t.ids.ndim == 3 and t.ids.dtype.kind in "iu", "ids must be whole numbers [layers, tokens, top_k]")
    layers, tokens, k = t.ids.shape
    need(1 <= k <= t.n_expert, f"ids name {k} experts per token, n_expert is {t.n_expert}")
    if t.ids.size:
        low, high = int(t.ids.min()), int(t.ids.max())
        need(low >= 0 and high < t.n_expert, f"ids reach {low}..{high}, n_expert is {t.n_expert}")
    need(t.lens.ndim == 1 and t.lens.dtype.kind in "iu", "lens must be whole numbers [sequences]")
    need(bool((t.lens > 0).all()), "lens has an empty sequence")
    total = int(t.lens.sum())
    need(total == tokens, f"lens add up to {total} tokens, ids have {tokens}")
    need(t.layers.shape == (layers,), f"layers has shape {t.layers.shape}, ids have {layers} layers")
    need(bool((np.diff(t.layers.astype(np.int64)) > 0).all()), "layers must ascend")
    if t.tokens is not None:
        need(t.tokens.shape == (tokens,), f"tokens has shape {t.tokens.shape}, ids have {tokens} tokens")
    if t.weights is not None:
        need(t.weights.shape == t.ids.shape, f"weights has shape {t.weights.shape}, ids {t.ids.shape}")
    for name in _PER_EXPERT:
        value = getattr(t, name)
        if value is not None:
            need(value.shape == (layers, t.n_expert), f"{name} has shape {value.shape}")
    said, chances = t.predictions, t.prediction_chances
    need((said is None) == (chances is None), "predictions and their chances go together")
    if said is not None and chances is not None:
        shape = said.shape
        need(said.dtype.kind == "i", "predictions must be whole numbers with a sign")
        need(len(shape) == 4 and shape[:2] == (layers, tokens), f"predictions has shape {shape}")
        need(chances.shape == shape, f"prediction_chances has shape {chances.shape}")
        if said.size:
            low, high = int(said.min()), int(said.max())
            need(low >= -1 and high < t.n_expert, f"predictions reach {low}..{high} of {t.n_expert}")
    if t.router_inputs is not None:
        shape = t.router_inputs.shape
        need(len(shape) == 3 and shape[:2] == (layers, tokens), f"router_inputs has shape {shape}")
    if t.routers is not None:
        shape = t.routers.shape
        need(len(shape) == 3 and shape[:2] == (layers, t.n_expert), f"routers has shape {shape}")
        if t.router_inputs is not None:
            width = t.router_inputs.shape[2]
            need(shape[2] == width, f"routers are {shape[2]} wide, router_inputs {width}")


def _write(path: Path, arrays: dict[str, Any], meta: dict[str, Any]) -> Path:
    """Write an .npz array by array; memory-mapped ones pass through in pieces."""
    save = np.savez if "router_inputs" in arrays else np.savez_compressed  # F16 does not compress
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            save(file, meta=np.array(json.dumps(meta)), **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


class _Spool:
    """Arrays [layers, tokens, ...] in temporary files, filled batch by batch: memory stays bounded."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._folder, self._tokens, self._at = folder, tokens, 0
        self.arrays: dict[str, NDArray] = {}
        self.layers: list[int] = []
        self.n_expert = 0

    def add(self, count: int, seen: dict[int, Seen]) -> None:
        chosen = {number: layer for number, layer in sorted(seen.items()) if layer.ids is not None}
        if not chosen:
            raise SpiceUnsupportedError("the model has no routed experts")
        if not self.layers:
            self.layers = list(chosen)
            self.n_expert = max(layer.n_expert for layer in chosen.values())
        if list(chosen) != self.layers:
            raise SpiceError(f"routing of layers {list(chosen)} in one batch, of {self.layers} before")
        small = np.dtype(np.uint8 if self.n_expert <= 256 else np.uint16)
        for row, (number, layer) in enumerate(chosen.items()):
            self._put("ids", small, row, number, count, layer.ids)
            if layer.weights is not None:
                self._put("weights", np.dtype(np.float16), row, number, count, layer.weights)
            if layer.inputs is not None:
                self._put("router_inputs", np.dtype(np.float16), row, number, count, layer.inputs)
        self._at += count

    def _put(
        self, name: str, dtype: np.dtype, row: int, number: int, count: int, values: NDArray | None
    ) -> None:
        assert values is not None
        if name not in self.arrays:
            shape = (len(self.layers), self._tokens, values.shape[1])
            self.arrays[name] = np.memmap(self._folder / name, dtype=dtype, mode="w+", shape=shape)
        width = self.arrays[name].shape[2]
        if values.shape != (count, width):
            raise SpiceUnsupportedError(
                f"layer {number}: {name} of {count} tokens has shape {values.shape}, width {width} before"
            )
        self.arrays[name][row, self._at : self._at + count] = values


def record(
    model: str | os.PathLike[str],
    texts: Sequence[str | Sequence[int]],
    path: str | os.PathLike[str],
    *,
    router_inputs: bool = False,
    tokens: int = 0,
    sequence: int = 512,
    decode: bool = False,
    batch: int = 64,
    threads: int = 0,
    predictions: str | None = None,
    sidecar: str | os.PathLike[str] | None = None,
    progress: Callable[[float], object] | None = None,
    show_load: bool = False,
) -> dict[str, Any]:
    """Run texts through a model on stock llama.cpp and write the routing of all their tokens to `path`.

    Args:
        texts: each a text or its token ids; cut into sequences of at most `sequence` tokens, each from an
            empty context. router_inputs: write what each router
            reads and the routers themselves, too. tokens: stop after so many in all (0: no limit).
        decode: one token at a time, instead of `batch` tokens. predictions: the name of a predictor; the
            text is run once more, in SPICE, and what it expects of each layer call is written, too. sidecar:
            fitted heads for it. progress: called with the fraction done.
    Returns: the trace's `summary()`.
    Raises: SpiceError subclasses as `Recorder` does, SpiceUnsupportedError for a model without routed
        experts, ValueError for no text. No file is written then.
    """
    path = Path(path)
    files.check_output(path, model, sidecar)
    if sequence < 1:
        raise ValueError(f"a sequence of {sequence} tokens")
    forecaster = None
    if predictions:
        from .predictions import open_forecaster  # it needs SPICE's own run, which recording else does not

        forecaster = open_forecaster(model, predictions, sidecar)  # what it refuses, before the work
    recorder = Recorder(
        model,
        # No text has more tokens than bytes, and one for BOS: a context for more would only take memory.
        n_ctx=min(sequence, max((_bytes(text) for text in texts), default=0) + 1),
        batch=1 if decode else batch,
        router_inputs=router_inputs,
        threads=threads,
        progress=show_load,
    )
    folder = Path(tempfile.mkdtemp(prefix=".spice-trace-", dir=path.absolute().parent))
    try:
        with recorder:
            pieces: list[list[int]] = []
            for text in texts:
                pieces += recorder.pieces(text, sequence)
            pieces = _limit(pieces, tokens)
            total = sum(map(len, pieces))
            if total == 0:
                raise ValueError("there is no text to trace")
            spool, done = _Spool(folder, total), 0
            for piece in pieces:
                for count, seen in recorder.evaluate(piece):
                    spool.add(count, seen)
                    done += count
                    if progress is not None:
                        progress(done / total)
            meta = {
                "format": FORMAT_VERSION,
                "model": Path(model).name,
                "description": recorder.describe(),
                "phase": "decode" if decode else "prefill",
                "top_k": int(spool.arrays["ids"].shape[2]),
                "source": "spice-trace",
                **({"predictor": predictions} if predictions else {}),
            }
        arrays = dict(spool.arrays)
        if forecaster is not None:
            arrays |= _predict(forecaster, model, pieces, spool, threads)
        trace = Trace(
            n_expert=spool.n_expert,
            lens=np.array([len(p) for p in pieces], dtype=np.int32),
            layers=np.array(spool.layers, dtype=np.int32),
            meta=meta,
            tokens=np.array([t for p in pieces for t in p], dtype=np.int32),
            **arrays,
            **{
                name: np.stack([found[layer] for layer in spool.layers])
                for name, found in recorder.watch.routers.items()
                if len(found) == len(spool.layers)
            },
        )
        trace.save(path)
        return trace.summary()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bytes(text: str | Sequence[int]) -> int:
    return len(text.encode() if isinstance(text, str) else text)


def _predict(
    forecaster: Forecaster,
    model: str | os.PathLike[str],
    pieces: list[list[int]],
    spool: _Spool,
    threads: int,
) -> dict[str, NDArray]:
    """The predictions of all sequences, as the trace holds them."""
    from .predictions import record

    ends = np.cumsum([len(piece) for piece in pieces])
    ids = [spool.arrays["ids"][:, end - len(p) : end] for p, end in zip(pieces, ends, strict=True)]
    said = list(record(forecaster, model, pieces, ids, n_threads=threads))
    return {
        "predictions": np.concatenate([one.ids for one in said], axis=1).astype(np.int16),
        "prediction_chances": np.concatenate([one.chances for one in said], axis=1).astype(np.float16),
    }


def _limit(pieces: list[list[int]], tokens: int) -> list[list[int]]:
    if tokens <= 0:
        return pieces
    out: list[list[int]] = []
    for piece in pieces:
        left = tokens - sum(map(len, out))
        if left > 0:
            out.append(piece[:left])
    return out
