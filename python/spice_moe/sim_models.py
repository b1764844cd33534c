"""What the simulator needs to know of a model: bytes per expert and layer, bytes beside experts.

From a GGUF's headers, or, for a trace without a GGUF, from published shapes and a number of bits per weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import _core, files
from .errors import SpiceUnsupportedError
from .trace import Trace

#: Bits per weight of a Q4_K_M file, about.
DEFAULT_BITS = 4.85


@dataclass(frozen=True)
class Shape:
    """One model. Sizes in bytes."""

    name: str
    slab_bytes: tuple[float, ...]  #: of one expert, by MoE layer
    other_bytes: float  #: weights beside routed experts, all of them read for every token
    n_experts: int  #: per layer
    top_k: int
    shared_bytes: float = 0.0  #: of other_bytes, of experts that every token uses
    table_bytes: float = 0.0  #: embedding tables, of which a token reads a row
    #: bytes that a token reads, by quantisation; empty: not known
    types: Mapping[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return len(self.slab_bytes)

    @property
    def experts_total(self) -> int:
        return self.layers * self.n_experts

    @property
    def expert_bytes(self) -> float:
        return sum(self.slab_bytes) * self.n_experts

    def core(self) -> object:
        return _core.sim.Model(list(self.slab_bytes), self.other_bytes, self.shared_bytes)


@dataclass(frozen=True)
class _Published:
    expert_weights: float  #: of one expert
    other_weights: float  #: read for every token, beside routed experts; embeddings once
    shared_weights: float = 0.0  #: of these, of shared experts


# Millions of weights. Experts: 3 x hidden x intermediate. Others: published totals less the experts; for
# Gemma-4 the shape was not at hand, and the experts are what 26 B less 3 B leaves for 30 x 128.
_PUBLISHED: dict[str, _Published] = {
    "deepseek-v2-lite": _Published(3 * 2048 * 1408, 1.1e9, 26 * 2 * 3 * 2048 * 1408),
    "olmoe": _Published(3 * 2048 * 1024, 0.4e9),
    "qwen3-30b": _Published(3 * 2048 * 768, 1.2e9),
    "gpt-oss-120b": _Published(3 * 2880 * 2880, 1.5e9),
    "gemma-4-26b": _Published(23e9 / (30 * 128), 2.5e9),
}


def of_trace(trace: Trace, name: str, bits: float = DEFAULT_BITS) -> Shape:
    """The shape of a known model, recognised by the trace's meta or file name.

    Raises SpiceUnsupportedError for an unknown one, naming what to give instead.
    """
    text = f"{trace.meta.get('model', '')} {name}".lower()
    for key, model in _PUBLISHED.items():
        if key in text:
            per_expert = model.expert_weights * bits / 8
            return Shape(
                name=key,
                slab_bytes=(per_expert,) * trace.ids.shape[0],
                other_bytes=model.other_weights * bits / 8,
                shared_bytes=model.shared_weights * bits / 8,
                n_experts=trace.n_expert,
                top_k=trace.top_k,
            )
    raise SpiceUnsupportedError(
        f"{name}: the model of this trace is not known ({', '.join(_PUBLISHED)}); give its file with "
        f"--model, or the bytes of an expert with --slab"
    )


def of_gguf(path: str | os.PathLike[str]) -> Shape:
    """The shape in a GGUF's headers. Raises SpiceError subclasses, for a dense model, too."""
    core = files.headers(path)
    try:
        summary = core.summary()
        layers = core.slab_bytes()
    finally:
        core.close()
    if summary["dense"]:
        raise SpiceUnsupportedError(f"{path}: a dense model, it has no routed experts")
    share = int(summary["n_expert_used"]) / max(int(summary["n_expert"]), 1)
    types = {name: float(size) for name, size in summary["other_bytes_by_type"].items()}
    for name, size in summary["expert_bytes_by_type"].items():
        types[name] = types.get(name, 0.0) + size * share
    return Shape(
        name=Path(path).name,
        slab_bytes=tuple(float(size) for size in layers),
        other_bytes=float(summary["other_bytes"] - summary["table_bytes"]),
        n_experts=int(summary["n_expert"]),
        top_k=int(summary["n_expert_used"]),
        shared_bytes=float(summary["shared_bytes"]),
        table_bytes=float(summary["table_bytes"]),
        types={name.upper(): size for name, size in types.items()},
    )


def check(shape: Shape, trace: Trace, name: str) -> None:
    """Raise SpiceUnsupportedError when model and trace do not belong together."""
    have = (trace.ids.shape[0], trace.n_expert)
    if (shape.layers, shape.n_experts) != have:
        raise SpiceUnsupportedError(
            f"{name} has {have[0]} layers of {have[1]} experts, {shape.name} has {shape.layers} of "
            f"{shape.n_experts}: not the same model"
        )
