"""Which tensors a model needs, asked from llama.cpp itself.

llama.cpp can make a model from a header alone (`llama_model_init_from_user`): its loader then creates every
tensor that the header calls for and hands each of them to a callback. So an architecture is described by its
header only, and names and shapes are right by construction.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFWriter

from models import gguf_file, tokenizer
from models.architectures.parts import Architecture, Dims, Tensor, Value
from models.ggml import GGMLType, library, quiet

# Scales are optional for every matrix; `Architecture.tensors` adds those of experts.
_SCALE = re.compile(r"(?<!ffn_gate_inp)\.(input_)?scale$")
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight$")
_DENSE = re.compile(r"\.ffn_(gate|up|down)\.")
_ROUTED = re.compile(r"\.ffn_gate_inp|\.exp_probs_b|exps?\.")
_BRANCH_ENDS = re.compile(
    r"\.(attn_output|ffn_down(_shexp)?|ffn_latent_up|ssm_out|shortconv\.out_proj)\.weight$"
)


class _InitParams(ctypes.Structure):
    """struct gguf_init_params of gguf.h."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


class _TensorHead(ctypes.Structure):
    """The first members of struct ggml_tensor of ggml.h."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4)]


@dataclass(frozen=True, kw_only=True)
class FromHeader(Architecture):
    """An architecture whose tensors are those that llama.cpp's loader creates for the header.

    Every optional tensor comes along, except scales and what `omit`, a regular expression, leaves out.
    either: the loader accepts dense and routed tensors in every layer and the graph uses what is there: the
    first `dense_lead` layers get the dense ones, the others the routed ones.
    """

    omit: str = "^rope_"
    either: bool = False

    def plain_tensors(self, d: Dims) -> list[Tensor]:
        """Raises ValueError if llama.cpp refuses the header.

        Memory is reserved, though not touched: about 4 bits for each weight of an expert, which the system
        grants up to the memory of the machine.
        """
        out: list[Tensor] = []
        for name, shape in created(self.arch, self.common_header(d), d).items():
            if _SCALE.search(name) or (self.omit and re.search(self.omit, name)):
                continue
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer and self.either:
                unused = _ROUTED if int(layer[1]) < self.dense_lead else _DENSE
                if unused.search(name):
                    continue
            tensor = describe(name, shape, d)
            # Of a pair, the loader creates the fused tensor.
            if tensor.role == "experts" and "gate_up" in name and not d.fused_gate_up:
                half = (shape[0], shape[1] // 2, shape[2])
                out += [replace(tensor, name=name.replace("gate_up", p), shape=half) for p in ("gate", "up")]
            else:
                out.append(tensor)
        return out


def describe(name: str, shape: tuple[int, ...], d: Dims) -> Tensor:
    """How to fill a tensor of that name."""
    if name == "token_embd.weight":
        return Tensor(name, shape, "embedding")
    if name == "output.weight":
        return Tensor(name, shape, "output", 2.0)
    if _EXPERTS.search(name):
        return Tensor(name, shape, "experts", 2.0 * d.branch_gain if "_down_" in name else 1.0)
    if name.endswith("ffn_gate_inp.weight"):
        return Tensor(name, shape, "router", 2.0)
    if name.endswith("ssm_a"):
        return Tensor(name, shape, "decay", 0.5)
    if name.endswith(".bias") or "exp_probs_b" in name or "_sinks" in name:
        return Tensor(name, shape, "bias", 0.1)
    if len(shape) == 1 and name.endswith("_shexp.weight"):
        return Tensor(name, shape, "vector_matrix")
    if len(shape) == 1 or "norm" in name or name.endswith("ssm_d"):
        return Tensor(name, shape, "norm")
    if "conv1d" in name or ("conv." in name and "proj" not in name) or "_ape." in name:
        return Tensor(name, shape, "kernel")
    if name.endswith("attn_k_b.weight"):  # applied to queries, transposed
        return Tensor(name, shape, gain=(shape[-1] / shape[-2]) ** 0.5)
    return Tensor(name, shape, gain=d.branch_gain if _BRANCH_ENDS.search(name) else 1.0)


def created(arch: str, header: dict[str, Value], d: Dims) -> dict[str, tuple[int, ...]]:
    """Name and shape (outermost first) of each tensor that the loader creates."""
    found: dict[str, tuple[int, ...]] = {}
    name_of = library("ggml-base").ggml_get_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def see(tensor: int, _user: object) -> None:
        name = name_of(tensor).decode()
        shape = list(_TensorHead.from_address(tensor).shape)
        least = 3 if _EXPERTS.search(name) else 1
        while len(shape) > least and shape[-1] == 1:
            shape.pop()
        found.setdefault(name, tuple(reversed(shape)))

    callback = llama_cpp.llama_model_set_tensor_data_t(see)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = (
        True  # else the loader skips what it would not use, and a model without file cannot skip
    )
    with _metadata(arch, header, d) as metadata, quiet():
        model = llama_cpp.llama_model_init_from_user(metadata, callback, None, params)
        if not model:
            raise ValueError(f"llama.cpp refuses the header of {arch}, or lacks memory for this size")
        llama_cpp.llama_model_free(model)
    return found


@contextlib.contextmanager
def _metadata(arch: str, header: dict[str, Value], d: Dims) -> Iterator[int]:
    """A gguf_context with the header, the tokenizer and, for each expert tensor, a type of few bytes."""
    base = library("ggml-base")
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.gguf_free.restype, base.gguf_free.argtypes = None, [ctypes.c_void_p]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        writer = GGUFWriter(path, arch)
        gguf_file.add_values(writer, f"{arch}.", header)
        tokenizer.add_to(writer)
        writer.add_token_type_count(1)  # encoders demand it
        # The loader would reserve F32 for all: at real sizes more than malloc grants.
        if d.embd % 32 == 0 and d.ff % 32 == 0:
            for il in range(d.layers):
                for part in ("gate", "up", "down", "gate_up"):
                    name = f"blk.{il}.ffn_{part}_exps.weight"
                    writer.add_tensor_info(name, (17,), np.dtype(np.uint8), 17, raw_dtype=GGMLType.MXFP4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("ab") as file:
            file.write(bytes(64))  # up to the start of the tensors' data, which nobody reads
        context = base.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True, context=None))
    if not context:
        raise ValueError(f"the header of {arch} is no valid GGUF")
    try:
        yield context
    finally:
        base.gguf_free(context)
