"""The parts of ggml and llama.cpp that the recipes need beyond llama-cpp-python's own API: quantising.

Everything here calls the libraries of the installed llama-cpp-python through ctypes; nothing is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

GGMLType = GGMLQuantizationType

# What llama.cpp's quantiser stores when a row is no multiple of the type's block (its src/llama-quant.cpp).
_FALLBACK = {
    GGMLType.Q2_K: GGMLType.Q4_0,
    GGMLType.Q3_K: GGMLType.Q4_0,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
    GGMLType.IQ3_S: GGMLType.IQ4_NL,
    GGMLType.IQ4_XS: GGMLType.IQ4_NL,
}

# The llama_ftype whose base type is the given one; with `pure` every matrix gets it.
_FTYPE = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q2_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "Q3_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q5_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "IQ3_S": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ3_S,
    "IQ4_NL": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "MXFP4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}


@cache
def library(name: str) -> ctypes.CDLL:
    """The shared library lib<name> that llama-cpp-python loaded, for instance "ggml-base"."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    for suffix in (".so", ".dylib", ".dll"):
        for prefix in ("lib", ""):
            path = folder / f"{prefix}{name}{suffix}"
            if path.exists():
                return ctypes.CDLL(str(path))
    raise FileNotFoundError(f"llama-cpp-python has no library {name} in {folder}")


def type_of(name: str | GGMLType) -> GGMLType:
    """The ggml type of that name ("Q4_K"). Raises ValueError naming the type if there is none."""
    if isinstance(name, GGMLType):
        return name
    try:
        return GGMLType[name.upper()]
    except KeyError:
        raise ValueError(f"unknown tensor type {name!r}") from None


def type_for_row(wanted: GGMLType, n_per_row: int) -> GGMLType:
    """`wanted`, or what llama.cpp's quantiser stores where n_per_row is no multiple of its block."""
    if n_per_row % GGML_QUANT_SIZES[wanted][0] == 0:
        return wanted
    second = _FALLBACK.get(wanted, GGMLType.F16)
    return second if n_per_row % GGML_QUANT_SIZES[second][0] == 0 else GGMLType.F16


def row_bytes(kind: GGMLType, n_per_row: int) -> int:
    """Bytes of one row of n_per_row values. Raises ValueError if the row is no multiple of the block."""
    block, size = GGML_QUANT_SIZES[kind]
    if n_per_row % block:
        raise ValueError(f"a row of {n_per_row} values is no multiple of {kind.name}'s block of {block}")
    return n_per_row // block * size


def quantize_rows(values: NDArray[np.float32], kind: GGMLType) -> NDArray[np.uint8]:
    """Encode float32 [..., n_per_row] as `kind`: bytes [..., row_bytes].

    No importance matrix; the types that demand one get one that makes all values equally important.

    Raises ValueError for a row that does not fit the block and for types that ggml cannot encode this way.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    shape = (*values.shape[:-1], row_bytes(kind, values.shape[-1]))
    if kind == GGMLType.F32:
        return values.view(np.uint8).reshape(shape)
    base = library("ggml-base")
    needs_imatrix = base.ggml_quantize_requires_imatrix
    needs_imatrix.restype, needs_imatrix.argtypes = ctypes.c_bool, [ctypes.c_int]
    even = np.ones(values.shape[-1], dtype=np.float32)
    importance = even.ctypes.data if needs_imatrix(int(kind)) else None
    chunk = base.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = np.empty(shape, dtype=np.uint8)
    rows = values.size // values.shape[-1]
    written = chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, values.shape[-1], importance)
    if written != out.nbytes:
        raise ValueError(f"ggml encoded {written} bytes of {kind.name}, expected {out.nbytes}")
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence llama.cpp's log inside the block; afterwards llama-cpp-python's own handler is back."""
    from llama_cpp import _logger

    ignore = llama_cpp.llama_log_callback(lambda level, text, user: None)
    llama_cpp.llama_log_set(ignore, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))


def quantize(src: Path, dst: Path, ftype: str, *, threads: int = 1, requantize: bool = False) -> Path:
    """Quantise a GGUF file with llama.cpp's own quantiser, every matrix to the same type (`pure`).

    Args:
        src: an F32, BF16 or F16 file (any other with `requantize`). dst: the file to write.
        ftype: a tensor type, for instance "Q4_K".
    Returns: dst. Matrices whose rows do not fit the type get llama.cpp's fallback; routers and vectors stay.
    Raises: ValueError for a type that has no file type of its own, RuntimeError if llama.cpp fails.
    """
    if ftype.upper() not in _FTYPE:
        raise ValueError(f"no llama.cpp file type for {ftype!r}; known: {', '.join(_FTYPE)}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = _FTYPE[ftype.upper()]
    params.pure = True
    params.allow_requantize = requantize
    with quiet():
        code = llama_cpp.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama_model_quantize({src} -> {dst}, {ftype}) failed with code {code}")
    return dst
