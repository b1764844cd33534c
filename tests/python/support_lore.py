"""Random stand-ins for experts (LoRE) of small models, and what they and the experts give, in numpy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, dequantize
from numpy.typing import NDArray
from spice_moe import _core

Floats = NDArray[np.float32]
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_down_exps\.weight")


class Weights:
    """The tensors of a model as F32 arrays, experts first: [experts, out, in]."""

    def __init__(self, model: Path) -> None:
        self._tensors = {t.name: t for t in GGUFReader(model).tensors}
        self._read: dict[str, Floats] = {}
        self.layers = sorted(int(m[1]) for name in self._tensors if (m := _EXPERTS.fullmatch(name)))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Floats:
        if name not in self._read:
            tensor = self._tensors[name]
            self._read[name] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return self._read[name]

    def expert(self, layer: int, expert: int, h: Floats) -> Floats:
        """What the down projection of a SwiGLU expert gives for the row h, before biases."""
        b = f"blk.{layer}."
        if b + "ffn_gate_up_exps.weight" in self:
            gate, up = np.split(self[b + "ffn_gate_up_exps.weight"][expert] @ h, 2)
        else:
            gate, up = (self[f"{b}ffn_{p}_exps.weight"][expert] @ h for p in ("gate", "up"))
        return self[b + "ffn_down_exps.weight"][expert] @ _swiglu(gate, up)


def _swiglu(gate: Floats, up: Floats) -> Floats:
    return gate / (1 + np.exp(-gate)) * up


def random_lore(
    weights: Weights,
    *,
    rank: int = 4,
    gated: int = 0,
    layers: Iterable[int] | None = None,
    size: float = 1.0,
    seed: int = 0,
) -> dict[str, NDArray[Any]]:
    """Tensors `lore.LAYER.PART` in numpy's order of dimensions, outputs about as large as an expert's."""
    rng = np.random.default_rng(seed)
    out: dict[str, NDArray[Any]] = {}

    def halves(*shape: int) -> NDArray[np.float16]:
        return (rng.standard_normal(shape) * size / np.sqrt(shape[-1])).astype(np.float16)

    def integers(*shape: int) -> tuple[NDArray[np.int8], Floats]:
        """And the scale of each row with which they are as large as halves()."""
        scale = rng.uniform(0.5, 1.5, shape[:-1]) * size / np.sqrt(shape[-1]) / 40
        return np.rint(40 * rng.standard_normal(shape)).clip(-128, 127).astype(np.int8), scale.astype(
            np.float32
        )

    for layer in weights.layers if layers is None else layers:
        down = weights[f"blk.{layer}.ffn_down_exps.weight"]
        n, width, width_in = down.shape[0], down.shape[1], _width_in(weights, layer)
        p = f"lore.{layer}."
        if rank:
            out[p + "a"], a_scale = integers(n, rank, width_in)
            out[p + "b"], b_scale = integers(n, rank, width)
            out[p + "scale"] = a_scale * b_scale
            out[p + "offset"] = b_scale * rng.standard_normal((n, rank)).astype(np.float32)
        if gated:
            out[p + "gate"], out[p + "gate_scale"] = integers(n, gated, width_in)
        out[p + "bias"] = halves(n, width)
        out[p + "error"] = rng.uniform(0.1, 0.9, n).astype(np.float32)
        out[p + "norm"] = rng.uniform(0.5, 2.0, n).astype(np.float32)
        out[p + "output"] = np.array([1.5], np.float32)
        out[p + "sensitivity"] = np.array([0.2], np.float32)
    return out


def _width_in(weights: Weights, layer: int) -> int:
    fused = f"blk.{layer}.ffn_gate_up_exps.weight"
    return weights[fused if fused in weights else f"blk.{layer}.ffn_up_exps.weight"].shape[-1]


def stand_in(
    weights: Weights, lore: Mapping[str, NDArray[Any]], layer: int, expert: int, h: Floats
) -> Floats:
    """y of the format's definition, from the numbers of the file."""

    def part(name: str) -> Floats | None:
        found = lore.get(f"lore.{layer}.{name}")
        return None if found is None else found.astype(np.float32)

    y = np.zeros(weights[f"blk.{layer}.ffn_down_exps.weight"].shape[1], np.float32)
    a, b, gate, offset, bias = map(part, ("a", "b", "gate", "offset", "bias"))
    scale, gate_scale = part("scale"), part("gate_scale")
    if a is not None and b is not None and scale is not None:
        z = scale[expert] * (a[expert] @ h)
        if gate is not None and gate_scale is not None:
            g = gate_scale[expert] * (gate[expert] @ h)
            z[: len(g)] *= g / (1 + np.exp(-g))
        y += (z if offset is None else z + offset[expert]) @ b[expert]
    if bias is not None:
        y += bias[expert]
    return y


def write_lore(model: Path, path: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """A sidecar of the model with these tensors."""
    writer = GGUFWriter(path, "spice-sidecar")
    writer.add_uint32("spice.version", 1)
    writer.add_string("spice.fingerprint", _core.heads.fingerprint(model))
    writer.add_string("spice.model", model.name)
    writer.add_string("spice.lore.activation", "silu")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
