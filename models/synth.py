"""Make a valid GGUF model with random weights for a MoE architecture: `python models/synth.py ARCH -o FILE`.

The weights are random but not degenerate: tokens stay apart in the residual stream of every layer, so routing
differs between tokens and layers, and greedy text does not stop early (output rows of control tokens are
small). The same arguments give the same bytes, whatever --split is.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):  # run as a script: make `models` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gguf import GGUFWriter

from models import gguf_file, tokenizer
from models.architectures import ARCHITECTURES, Architecture, Dims, Tensor, table
from models.ggml import GGMLType, quantize, quantize_rows, type_for_row, type_of
from models.planted import command as planted

__all__ = ["ARCHITECTURES", "PRESETS", "make", "quantize"]

# Real widths for benchmarks; `row_bank` keeps making them quick. Sizes: see models/README.md.
PRESETS: dict[str, dict[str, object]] = {
    "bench-2g": dict(
        arch="qwen2moe", layers=6, embd=2048, experts=60, used=4, ff=1536, expert_type="Q4_K",
        down_type="Q5_K", other_type="Q8_0", row_bank=4,
    ),
    "bench-10g": dict(
        arch="qwen2moe", layers=24, embd=2048, experts=60, used=4, ff=1408, expert_type="Q5_K",
        other_type="Q8_0", row_bank=4,
    ),
}  # fmt: skip

_F32_ROLES = {"router", "vector_matrix", "norm", "scale", "bias", "kernel", "decay"}


@dataclass(frozen=True)
class _Types:
    """What each kind of tensor is stored as; vectors and routers are F32, as in real files."""

    expert: GGMLType
    down: GGMLType
    other: GGMLType

    def of(self, tensor: Tensor) -> GGMLType:
        if tensor.role in _F32_ROLES:
            return GGMLType.F32
        wanted = self.other
        if tensor.role == "experts":
            wanted = self.down if "down_exps" in tensor.name else self.expert
        return type_for_row(wanted, tensor.shape[-1])


def make(
    arch: str,
    path: Path | str,
    *,
    layers: int = 2,
    embd: int = 256,
    experts: int = 8,
    used: int = 2,
    ff: int = 256,
    expert_type: str = "F16",
    down_type: str | None = None,
    other_type: str | None = None,
    seed: int = 0,
    split: int = 0,
    fused_gate_up: bool = False,
    expert_scales: bool = False,
    shared: bool = True,
    shared_ff: int | None = None,
    dense_ff: int | None = None,
    context: int = 4096,
    row_bank: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a random model of architecture `arch` and return its (first) file.

    Args:
        path: the file to write; with split=N > 1 the N files are named PATH-00001-of-0000N.gguf.
        layers: all layers, leading dense ones included. used: experts per token. ff: width of one expert.
        expert_type: ggml type of the experts ("F16", "Q4_K", ...); down_type: of their down projections if
            different. Where a row is no multiple of the block, llama.cpp's fallback is stored (Q4_K: Q5_0).
        other_type: of the other matrices (default F32 beside F32 experts, else F16).
        fused_gate_up: gate and up as one tensor; only where the architecture's loader takes that.
        expert_scales: a factor for each expert and projection; only where the architecture's graph uses it.
        shared: False asks for a model without shared experts; architectures that always have some refuse.
        shared_ff: width of all shared experts together (default used * ff). dense_ff: of dense ones (double).
        row_bank: 0 draws every expert anew. N draws and quantises only N experts' rows per tensor, and every
            expert takes its rows from those at random, in its own order: quicker, and no two experts alike.
        progress: called with a line for each tensor written.
    Raises: ValueError for unknown names and sizes that the architecture cannot have.
    """
    d = Dims(
        layers=layers,
        embd=embd,
        experts=experts,
        used=used,
        ff=ff,
        vocab=tokenizer.VOCABULARY_SIZE,
        shared_ff=shared_ff or used * ff,
        dense_ff=dense_ff or 2 * used * ff,
        context=context,
        fused_gate_up=fused_gate_up,
        expert_scales=expert_scales,
        shared=shared,
    )
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(sorted(ARCHITECTURES))}")
    description = ARCHITECTURES[arch]
    _check(description, d)
    expert = type_of(expert_type)
    other = type_of(other_type) if other_type else (GGMLType.F32 if expert == GGMLType.F32 else GGMLType.F16)
    types = _Types(expert, type_of(down_type) if down_type else expert, other)

    def header(writer: GGUFWriter) -> None:
        writer.add_name(f"synthetic {arch}, seed {seed}")
        writer.add_quantization_version(2)
        gguf_file.add_values(writer, f"{description.arch}.", description.common_header(d))
        tokenizer.add_to(writer)
        if description.encoder:
            writer.add_token_type_count(1)

    plans = [_plan(t, types.of(t), seed, row_bank) for t in description.tensors(d)]
    return gguf_file.write(Path(path), description.arch, header, plans, parts=split, progress=progress)


def _check(arch: Architecture, d: Dims) -> None:
    """Raise ValueError for sizes that would make llama.cpp refuse the model, or crash on it."""
    least = max(arch.least_layers, arch.dense_lead + 1)
    if d.layers < least:
        raise ValueError(f"{arch.name} has no experts before layer {least}: it needs more than {d.layers}")
    if not 1 <= d.used <= d.experts:
        raise ValueError(f"{d.used} of {d.experts} experts cannot be used")
    if d.embd % (2 * d.heads) or d.embd < 64:
        raise ValueError(f"embd {d.embd} does not divide into {d.heads} heads of an even width")
    if d.fused_gate_up and not arch.fuses:
        raise ValueError(f"{arch.name} has no fused gate_up tensor in llama.cpp")
    if d.expert_scales and not arch.scales:
        raise ValueError(f"{arch.name} has no scales of experts in llama.cpp")
    if arch.has_shared and not d.shared:
        raise ValueError(f"{arch.name} always has shared experts in llama.cpp")


def _plan(tensor: Tensor, kind: GGMLType, seed: int, row_bank: int) -> gguf_file.Plan:
    if tensor.role == "experts":
        return gguf_file.Plan(tensor.name, tensor.shape, kind, lambda: _experts(tensor, kind, seed, row_bank))

    def fill() -> NDArray[np.uint8]:
        return quantize_rows(_weights(tensor, _generator(seed, tensor.name)), kind)

    return gguf_file.Plan(tensor.name, tensor.shape, kind, fill)


def _generator(seed: int, name: str) -> np.random.Generator:
    """A stream of its own for each tensor, so that bytes do not depend on the order of writing."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))


def _weights(tensor: Tensor, rng: np.random.Generator) -> NDArray[np.float32]:
    """Random values [shape]: inputs of mean square one give outputs of mean square gain^2."""
    values = rng.standard_normal(tensor.shape, dtype=np.float32)
    if tensor.role in ("norm", "scale"):
        return 1.0 + 0.1 * values
    if tensor.role == "decay":
        return -np.exp(tensor.gain * values)
    if tensor.role in ("bias", "embedding"):
        return tensor.gain * values
    values *= tensor.gain / np.sqrt(tensor.shape[-1])
    if tensor.role == "output":
        # Greedy text: no control token, bytes seldom, pieces mostly.
        kinds = tokenizer.vocabulary()
        damp = {tokenizer.TokenType.NORMAL: 1.0, tokenizer.TokenType.BYTE: 0.3}
        values *= np.array([damp.get(t.kind, 0.02) for t in kinds], dtype=np.float32)[:, None]
    return values


def _experts(tensor: Tensor, kind: GGMLType, seed: int, row_bank: int) -> NDArray[np.uint8]:
    """The bytes [experts, rows, row_bytes] of one expert tensor, made expert by expert."""
    experts, rows, columns = tensor.shape
    rng = _generator(seed, tensor.name)
    one = Tensor(tensor.name, (rows, columns), "matrix", tensor.gain)
    if row_bank <= 0:
        return np.stack([quantize_rows(_weights(one, rng), kind) for _ in range(experts)])
    bank = np.concatenate([quantize_rows(_weights(one, rng), kind) for _ in range(row_bank)])
    out = np.empty((experts, rows, bank.shape[-1]), dtype=np.uint8)
    for expert in range(experts):
        np.take(bank, rng.permutation(len(bank))[:rows], axis=0, out=out[expert])
    return out


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    p.add_argument("arch", nargs="?", help="llama.cpp architecture, see --list")
    p.add_argument("--list", action="store_true", help="list the architectures and those left out, and why")
    p.add_argument("-o", "--output", type=Path, help="GGUF file to write")
    p.add_argument("--preset", choices=sorted(PRESETS), help="real widths for benchmarks; options override")
    for name, text in (
        ("layers", "layers, leading dense ones included"),
        ("embd", "width of the residual stream"),
        ("experts", "experts per layer"),
        ("used", "experts per token (top-k)"),
        ("ff", "width of one expert"),
        ("shared-ff", "width of all shared experts together"),
        ("dense-ff", "width of dense layers"),
        ("context", "context length in the header"),
        ("seed", "the same seed gives the same bytes"),
        ("split", "write this many files, cut inside a layer"),
        ("row-bank", "draw only this many experts' rows per tensor (quick)"),
    ):
        p.add_argument(f"--{name}", type=int, help=text)
    p.add_argument("--type", dest="expert_type", help="type of the experts: F32, F16, Q8_0, Q4_K, ...")
    p.add_argument("--down-type", help="type of the experts' down projections")
    p.add_argument("--other-type", help="type of all other matrices")
    p.add_argument("--fused-gate-up", action="store_true", help="gate and up as one tensor")
    p.add_argument("--expert-scales", action="store_true", help="a factor for each expert and projection")
    p.add_argument("-v", dest="progress", action="store_const", const=print, help="print a line per tensor")
    planted.add_arguments(p)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = vars(_parse(argv))
    if options.pop("list", False):
        print(table())
        return 0
    path = options.pop("output", None)
    like = options.pop("like", None)
    options = PRESETS.get(options.pop("preset", ""), {}) | options
    if ("arch" not in options and like is None) or path is None:
        print("synth: name an architecture, a preset or --like, and a file with -o", file=sys.stderr)
        return 2
    try:
        first = planted.make(like, path, options) if like else make(options.pop("arch"), path, **options)
    except (ValueError, OSError) as error:
        print(f"synth: {error}", file=sys.stderr)
        return 1
    print(first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
