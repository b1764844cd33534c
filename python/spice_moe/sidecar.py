"""Writes MODEL.spice.gguf, the sidecar that spice-fit makes; the format is in docs/sidecar-format.md.

The C++ core reads it (`_core.heads.Heads`, `Llama(..., sidecar=...)`) and checks it against the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import SpiceError

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.int8]

VERSION = 1
ARCHITECTURE = "spice-sidecar"
_Q8_BLOCK = 32


@dataclass(frozen=True)
class Head:
    """One fitted head. Scores = [router + ] full h + (h a^T) b + present rows + previous rows + bias.

    full: [n_out, width], replaces the router. a: [rank, width] and b: [rank, n_out], added to it.
    present: [experts of the present layer, n_out]; previous: [n_out, n_out]; bias: [n_out].
    """

    kind: str  # "adapter" or "draft"
    layer: int  # the model's number of the present layer
    horizon: int  # in MoE layers
    full: Floats | None = None
    a: Floats | None = None
    b: Floats | None = None
    present: Floats | None = None
    previous: Floats | None = None
    bias: Floats | None = None


@dataclass(frozen=True)
class Lore:
    """Stand-ins for the experts of one layer: y = bias + sum_r z_r b_r, z = scale (a h) + offset, where the
    first rows of a h are multiplied by act(gate_scale (gate h)). a: [experts, rows, width]; b: [experts,
    rows, width_out]; gate: [experts, gated, width], or None, and gate_scale with it; scale, offset: [experts,
    rows]; bias: [experts, width_out]; error, norm: [experts]."""

    layer: int
    a: Bytes
    b: Bytes
    gate: Bytes | None
    scale: Floats
    gate_scale: Floats | None
    offset: Floats
    bias: Halves
    error: Floats
    norm: Floats
    output: float
    sensitivity: float | None = None

    @property
    def nbytes(self) -> int:
        """Of what a run keeps in memory."""
        parts = (self.a, self.b, self.gate, self.scale, self.gate_scale, self.offset, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Names and values as in the file."""
        parts: dict[str, NDArray[Any] | None] = {
            "a": self.a, "b": self.b, "gate": self.gate, "scale": self.scale,
            "gate_scale": self.gate_scale, "offset": self.offset, "bias": self.bias,
            "error": self.error, "norm": self.norm, "output": np.array([self.output], np.float32),
            "sensitivity": None if self.sensitivity is None else np.array([self.sensitivity], np.float32),
        }  # fmt: skip
        for name, values in parts.items():
            if values is not None:
                yield f"lore.{self.layer}.{name}", values


def default_path(model: str | os.PathLike[str]) -> Path:
    """Where the sidecar of a model lies by default: NAME.spice.gguf beside NAME.gguf."""
    path = Path(model)
    return path.parent / (path.name.removesuffix(".gguf") + ".spice.gguf")


def writer_package() -> Any:
    """The package `gguf`, which only writing needs. Raises SpiceError, with the remedy, without it."""
    try:
        import gguf
    except ImportError as error:
        raise SpiceError("writing a sidecar needs the package gguf; pip install gguf") from error
    return gguf


def write(
    path: str | os.PathLike[str],
    *,
    fingerprint: str,
    model: str,
    heads: Sequence[Head],
    facts: Mapping[str, Any],
    lore: Sequence[Lore] = (),
    lore_curve: Sequence[tuple[float, float]] = (),
) -> None:
    """Write a sidecar. An existing file is replaced only when the new one is complete.

    facts: further header values under `spice.`: numbers, strings, and lists of numbers or strings.
    lore_curve: points of nats (each replaced expert alone, together), both growing.
    Raises SpiceError without the package `gguf`, OSError if the file cannot be written.
    """
    gguf = writer_package()
    path = Path(path)
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    try:
        writer.add_uint32("spice.version", VERSION)
        writer.add_string("spice.fingerprint", fingerprint)
        writer.add_string("spice.model", model)
        for name, value in facts.items():
            _add(writer, f"spice.{name}", value)
        q8 = gguf.GGMLQuantizationType.Q8_0
        for head in heads:
            prefix = f"{head.kind}.{head.layer}.{head.horizon}."
            for name in ("full", "a"):  # long rows: Q8_0, as they will be used
                rows = getattr(head, name)
                if rows is None:
                    continue
                if rows.shape[1] % _Q8_BLOCK == 0:
                    writer.add_tensor(prefix + name, gguf.quantize(rows.astype(np.float32), q8), raw_dtype=q8)
                else:
                    writer.add_tensor(prefix + name, rows.astype(np.float32))
            for name in ("b", "present", "previous"):
                rows = getattr(head, name)
                if rows is not None:
                    writer.add_tensor(prefix + name, rows.astype(np.float16))
            if head.bias is not None:
                writer.add_tensor(prefix + "bias", head.bias.astype(np.float32))
        for layer in lore:
            for name, values in layer.tensors():
                writer.add_tensor(name, values)
        if lore_curve:
            writer.add_tensor("lore-kl.curve", np.array(lore_curve, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, np.uint32):
        writer.add_uint32(key, int(value))
    elif isinstance(value, int):
        writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, list(value))
