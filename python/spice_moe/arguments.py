"""Numbers that ``llama_cpp.Llama`` passes to C unchecked, and types of the KV cache by their names.

C would cut what does not fit, and llama.cpp ends the process for some of what is left.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import llama_cpp

MAX_THREADS = 512  #: GGML_MAX_N_THREADS of ggml.h; many more end the process

#: The types that llama.cpp's tools take for the KV cache, by their names there. Others end the process.
CACHE_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "f32": llama_cpp.GGML_TYPE_F32,
    "bf16": 30,  # GGML_TYPE_BF16 of ggml.h, for which llama-cpp-python has no name
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}
QUANTISED_CACHE_TYPES = frozenset(CACHE_TYPES) - {"f16", "f32", "bf16"}
_NOT_QUANTISED = [number for name, number in CACHE_TYPES.items() if name not in QUANTISED_CACHE_TYPES]

_INT32 = (-(2**31), 2**31 - 1)
# n_ctx, n_batch and n_ubatch are unsigned in C; a negative one ends the process, or is a huge one.
_RANGES: dict[str, tuple[int, int]] = {
    "n_ctx": (0, 2**31 - 1),
    "n_batch": (1, 2**31 - 1),
    "n_ubatch": (0, 2**31 - 1),
    "n_threads": (_INT32[0], MAX_THREADS),
    "n_threads_batch": (_INT32[0], MAX_THREADS),
    "n_gpu_layers": _INT32,
    "main_gpu": _INT32,
    "split_mode": _INT32,
}


_PARENTS = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters)


def warn_of_unknown(arguments: Iterable[str], own: Iterable[str]) -> None:
    """Warn of names that ``llama_cpp.Llama`` takes and ignores: a misspelt option would be off in silence.

    own: the names that SPICE adds.
    """
    for name in arguments:
        if name not in _PARENTS:
            close = difflib.get_close_matches(name, [*own, *_PARENTS], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            warnings.warn(f"Llama has no argument {name}, it is ignored{meant}", UserWarning, stacklevel=3)


def check(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, naming the argument, for a number that llama.cpp cannot be given.

    What is no whole number is left to the parent, which refuses it itself; but ``TypeError`` for the name of
    a type.
    """
    for name, (low, high) in _RANGES.items():
        value = arguments.get(name)
        if isinstance(value, int) and not low <= value <= high:
            raise ValueError(f"{name} must be {low} to {high}, not {value}")
    for name in ("type_k", "type_v"):
        value = arguments.get(name)
        if isinstance(value, str):  # the parent's own refusal names no argument
            raise TypeError(f"{name} must be a number such as llama_cpp.GGML_TYPE_Q8_0, not {value!r}")
        if isinstance(value, int) and value not in CACHE_TYPES.values():
            known = ", ".join(f"{number} ({text})" for text, number in CACHE_TYPES.items())
            raise ValueError(f"{name}={value} is no type for a KV cache; llama.cpp has {known}")
    value = arguments.get("type_v")
    if isinstance(value, int) and value not in _NOT_QUANTISED and not arguments.get("flash_attn"):
        raise ValueError(
            f"type_v={value} is quantised, and llama.cpp computes with such values in flash attention only: "
            f"give flash_attn=True, too"
        )
