"""Numbers that ``llama_cpp.Llama`` passes to C unchecked.

C would cut what does not fit, and llama.cpp ends the process for some of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llama_cpp

MAX_THREADS = 512  #: GGML_MAX_N_THREADS of ggml.h; many more end the process

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
    "type_k": (0, llama_cpp.GGML_TYPE_COUNT - 1),
    "type_v": (0, llama_cpp.GGML_TYPE_COUNT - 1),
}


def check(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, naming the argument, for a number that llama.cpp cannot be given.

    What is no whole number is left to the parent, which refuses it itself.
    """
    for name, (low, high) in _RANGES.items():
        value = arguments.get(name)
        if isinstance(value, int) and not low <= value <= high:
            raise ValueError(f"{name} must be {low} to {high}, not {value}")
