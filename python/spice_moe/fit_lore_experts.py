"""The routed experts of a GGUF model in numpy: their weights, one expert at a time, and what they compute.

llama.cpp has the formula of an architecture's experts in its code, not in the file. So the formula is found
by trial: of the known ones, the one that gives what the running model gave for the same rows. A layer that
none reproduces is refused: no stand-in is fitted to a wrong function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import SpiceUnsupportedError
from .sidecar import writer_package

Floats = NDArray[np.float32]

# Relative power. Rounding of activations to 8 bits, which the running model does, costs 1e-4 or less.
_TOLERANCE = 3e-3
_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)$")
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0  # of gpt-oss
_GELU_C = 0.7978845608028654  # sqrt(2 / pi)


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-x) of a large negative x is infinite, and the result 0
        return x / (1 + np.exp(-x))


def _gelu(x: Floats) -> Floats:
    return 0.5 * x * (1 + np.tanh(_GELU_C * x * (1 + 0.044715 * x * x)))


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def _oai(gate: Floats, up: Floats) -> Floats:
    x = np.minimum(gate, _OAI_LIMIT)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-_OAI_ALPHA * x)) * (np.clip(up, -_OAI_LIMIT, _OAI_LIMIT) + 1)


#: Activations that a gated neuron of a stand-in can have: act(gate) * up.
ACTIVATIONS: Mapping[str, Callable[[Floats], Floats]] = {"silu": _silu, "gelu": _gelu, "relu": _relu}


@dataclass(frozen=True)
class Formula:
    """What is between the projections. name: one of ACTIVATIONS where it is act(gate) * up without biases, so
    that single neurons can be kept; else a description."""

    name: str
    of: Callable[[Floats, Floats], Floats]
    plain: bool = True


def _formulas(gated: bool, limit: float) -> list[Formula]:
    """Those that llama.cpp has; limit: of the clamped kinds, 0 for none."""
    if not gated:
        ungated: dict[str, Callable[[Floats], Floats]] = {
            "relu squared": lambda x: np.square(_relu(x)), "gelu": _gelu, "silu": _silu, "relu": _relu,
        }  # fmt: skip
        return [Formula(f"{k}, no gate", lambda _, u, f=f: f(u), plain=False) for k, f in ungated.items()]
    out = [Formula(name, lambda g, u, f=f: f(g) * u) for name, f in ACTIVATIONS.items()]
    if limit > 0:
        out += [
            Formula("silu, clamped after",
                    lambda g, u: np.minimum(_silu(g), limit) * np.clip(u, -limit, limit), plain=False),
            Formula("silu, clamped before",
                    lambda g, u: _silu(np.minimum(g, limit)) * np.clip(u, -limit, limit), plain=False),
        ]  # fmt: skip
    return [*out, Formula("gpt-oss", _oai, plain=False)]


@dataclass(frozen=True)
class Expert:
    """One expert's projections. gate: [ff, width] or None; up: [ff, width]; down: [width_out, ff]. Biases are
    of gate and up; the one of down is not part of what a stand-in replaces."""

    up: Floats
    down: Floats
    gate: Floats | None = None
    up_bias: Floats | None = None
    gate_bias: Floats | None = None

    def activations(self, h: Floats, formula: Formula) -> Floats:
        """[rows, ff], what the down projection multiplies."""
        up = h @ self.up.T
        if self.up_bias is not None:
            up += self.up_bias
        gate = up if self.gate is None else h @ self.gate.T
        if self.gate_bias is not None:
            gate += self.gate_bias
        return formula.of(gate, up)


class ExpertFile:
    """The experts in a model's file or files, read through mappings: memory holds one expert at a time.

    Raises SpiceError without the package gguf.
    """

    def __init__(self, model: str | os.PathLike[str]) -> None:
        self._gguf = writer_package()
        self._path = os.fspath(model)
        self._parts: dict[int, dict[str, Any]] = {}
        self._limits: dict[int, float] = {}
        for path in _split_files(Path(model)):
            reader = self._gguf.GGUFReader(path)
            for tensor in reader.tensors:
                match = _TENSOR.search(tensor.name)
                if match:
                    layer, *name = match.groups()
                    self._parts.setdefault(int(layer), {})[".".join(name)] = tensor
            self._read_limits(reader)

    def _read_limits(self, reader: Any) -> None:
        field = next((f for k, f in reader.fields.items() if k.endswith(".swiglu_clamp_exp")), None)
        if field is not None:
            values = field.contents()
            values = values if isinstance(values, list) else [values] * (1 + max(self._parts, default=0))
            self._limits = {layer: float(v) for layer, v in enumerate(values)}

    @property
    def layers(self) -> list[int]:
        return sorted(self._parts)

    @property
    def nbytes(self) -> int:
        """Of all experts in the file."""
        return sum(int(t.n_bytes) for parts in self._parts.values() for t in parts.values())

    def n_experts(self, layer: int) -> int:
        return int(self._part(layer, "down.weight").data.shape[0])

    def expert(self, layer: int, number: int) -> Expert:
        """Raises SpiceUnsupportedError for a type that cannot be dequantised."""
        parts = self._parts[layer]
        biases = {}
        if "gate_up.weight" in parts:
            gate, up = np.split(self._rows(layer, "gate_up.weight", number), 2)
            if "gate_up.bias" in parts:
                both = np.split(self._rows(layer, "gate_up.bias", number), 2)
                biases = {"gate_bias": both[0], "up_bias": both[1]}
        else:
            up = self._rows(layer, "up.weight", number)
            gate = self._rows(layer, "gate.weight", number) if "gate.weight" in parts else None
            biases = {
                f"{n}_bias": self._rows(layer, f"{n}.bias", number)
                for n in ("gate", "up")
                if f"{n}.bias" in parts
            }
        return Expert(up, self._rows(layer, "down.weight", number), gate, **biases)

    def formula(self, layer: int, h: Floats, ids: NDArray[np.int32], down: Floats) -> Formula:
        """The formula that gives `down` [tokens, top_k, width_out], what the experts `ids` [tokens, top_k]
        made of h [tokens, width] in the running model.

        Raises SpiceUnsupportedError, naming the layer, when there is none.
        """
        numbers, counts = np.unique(ids, return_counts=True)
        chosen = numbers[np.argsort(-counts)][:2]
        experts = {int(e): self.expert(layer, int(e)) for e in chosen}
        if any(e.up.shape[1] != h.shape[1] for e in experts.values()):
            raise SpiceUnsupportedError(
                f"{self._path}: layer {layer}: the experts read {h.shape[1]} numbers of another form"
            )
        best, error = None, np.inf
        gated = next(iter(experts.values())).gate is not None
        for formula in _formulas(gated, self._limits.get(layer, 0.0)):
            wrong = power = 0.0
            for number, expert in experts.items():
                token, place = np.nonzero(ids == number)
                true = down[token, place]
                wrong += float(np.square(expert.activations(h[token], formula) @ expert.down.T - true).sum())
                power += float(np.square(true).sum())
            if wrong < error * power:
                best, error = formula, wrong / power
        if best is None or not error <= _TOLERANCE:
            raise SpiceUnsupportedError(
                f"{self._path}: layer {layer}: no known formula reproduces what its experts compute "
                f"(the nearest is off by {100 * np.sqrt(error):.1f} %), so no stand-ins can be fitted"
            )
        biased = next(iter(experts.values()))
        plain = best.plain and biased.up_bias is None and biased.gate_bias is None
        return Formula(best.name, best.of, plain)

    def _part(self, layer: int, name: str) -> Any:
        try:
            return self._parts[layer][name]
        except KeyError:
            raise SpiceUnsupportedError(f"{self._path}: layer {layer} has no tensor ffn_{name}") from None

    def _rows(self, layer: int, name: str, number: int) -> Floats:
        tensor = self._part(layer, name)
        try:
            values = self._gguf.dequantize(tensor.data[number], tensor.tensor_type)
        except NotImplementedError as error:
            raise SpiceUnsupportedError(f"{self._path}: {tensor.name}: {error}") from error
        # The down projection's scale comes after what is replaced.
        wanted = name.replace(".weight", ".scale") if name.endswith(".weight") and "down" not in name else ""
        scale = self._parts[layer].get(wanted)
        values = values.astype(np.float32)
        return values if scale is None else values * np.float32(scale.data[number])


def _split_files(path: Path) -> Iterable[Path]:
    """The model's file, or all of a model that is split as llama.cpp does it."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    count = int(match[2])
    return [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
