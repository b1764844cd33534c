"""How much memory a context's cache takes, asked of llama.cpp itself before anything is allocated.

A model that is loaded with ``no_alloc`` has its shapes and no weights, and a context for it says how large
its cache would be. So there is no formula here that an architecture (latent attention, sliding windows,
recurrent layers) could prove wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llama_cpp

from . import _core
from .budget import FreeMemory, free_memory, swap_memory
from .errors import SpiceBudgetError
from .loading import HeldInterrupt, cache_sizes, listening
from .plan import format_bytes

#: Cells that are tried: each takes llama.cpp some bytes even so. Sliding windows are shorter than half of it.
TRIED_CELLS = 2**17
#: Bytes that a token may take in a layer: 128 heads of 192 + 128 halves, the most of a published model.
_MOST_PER_LAYER = 80 * 2**10
_STEP = 256  # llama.cpp rounds a context up to a multiple of this
# Left for what grows later, in the advice alone.
_MARGIN_SHARE, _MARGIN_BYTES = 0.05, 256 * 2**20
_USED_KEY = ".expert_used_count"


@dataclass(frozen=True)
class CacheSize:
    """The bytes of a cache by its cells: ``fixed + per_cell * n_ctx``, never more than it will be."""

    n_ctx: int  #: that was asked for; the model's own for 0
    fixed: int  #: windows and recurrent states
    per_cell: float

    def __call__(self, n_ctx: int) -> int:
        return self.fixed + int(self.per_cell * n_ctx)

    def largest(self, room: int) -> int:
        """The largest context whose cache fits ``room`` bytes; 0 for none."""
        if self.per_cell == 0:
            return self.n_ctx if self.fixed <= room else 0
        return max(int((room - self.fixed) / self.per_cell) // _STEP * _STEP, 0)


def cache_size(path: str, arguments: Mapping[str, Any], *, tried: int = TRIED_CELLS) -> CacheSize | None:
    """What a context with these arguments of ``Llama`` would take; None where llama.cpp makes none.

    Reads the file's header and vocabulary: up to some tenths of a second, no memory that grows with n_ctx.
    """
    found: list[int] = []
    llama_cpp.llama_backend_init()
    with HeldInterrupt(), listening(lambda _level, text: found.extend(cache_sizes(text))), _core.AbortGuard():
        params = llama_cpp.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not model:
            return None
        try:
            wanted = arguments.get("n_ctx", 512) or llama_cpp.llama_model_n_ctx_train(model)
            n_ctx = -(-wanted // _STEP) * _STEP
            sizes: list[int] = []
            tries = [-(-cells // _STEP) * _STEP for cells in (min(n_ctx, tried) // 2, min(n_ctx, tried))]
            for cells in tries:
                found.clear()
                context = llama_cpp.llama_init_from_model(model, _context(arguments, cells))
                if not context:
                    return None
                llama_cpp.llama_free(context)
                sizes.append(sum(found))
        finally:
            llama_cpp.llama_model_free(model)
    # What windows bound has its full size by the half of the cells that are tried, or grows no more.
    per_cell = (sizes[1] - sizes[0]) / max(tries[1] - tries[0], 1)
    return CacheSize(n_ctx, sizes[1] - int(per_cell * tries[1]), per_cell)


def _context(arguments: Mapping[str, Any], n_ctx: int) -> llama_cpp.llama_context_params:
    """As ``llama_cpp.Llama`` makes them, as far as the cache depends on them."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = min(n_ctx, arguments.get("n_batch", 512))
    params.n_ubatch = min(params.n_batch, arguments.get("n_ubatch", 512))
    on, off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = on if arguments.get("flash_attn") else off
    for name in ("type_k", "type_v", "swa_full"):
        if arguments.get(name) is not None:
            setattr(params, name, arguments[name])
    if arguments.get("embedding"):
        params.n_seq_max = min(params.n_batch, llama_cpp.llama_max_parallel_sequences())
        params.kv_unified = True
    return params


def check(path: str, arguments: Mapping[str, Any], *, layers: int, beside: int) -> None:
    """Raise SpiceBudgetError when the context's cache cannot fit in memory, whatever else happens.

    layers: of the model. beside: bytes that the load will take for certain besides. Says nothing where it is
    not certain: with layers on a GPU, other header values, or on a system that does not say what is free.
    """
    if sys.platform != "linux" or arguments.get("vocab_only") or arguments.get("n_gpu_layers"):
        return
    if any(not key.endswith(_USED_KEY) for key in arguments.get("kv_overrides") or ()):
        return
    numbers = [arguments.get(name, 512) for name in ("n_ctx", "n_batch", "n_ubatch")]
    if not all(isinstance(number, int) for number in numbers):  # the parent refuses them
        return
    n_ctx = numbers[0]
    free = free_memory()
    if n_ctx and n_ctx * layers * _MOST_PER_LAYER + beside <= free.bytes:
        return
    size = cache_size(path, arguments)
    if size is not None and size(size.n_ctx) + beside > free.bytes + swap_memory():
        raise SpiceBudgetError(f"{path}: {_refusal(size, free, beside)}")


def _refusal(size: CacheSize, free: FreeMemory, beside: int) -> str:
    weights = f" beside {format_bytes(beside)} of weights" if beside else ""
    margin = max(int(free.bytes * _MARGIN_SHARE), _MARGIN_BYTES)
    largest = size.largest(free.bytes - beside - margin)
    advice = (
        f"n_ctx={largest} (-c {largest}) fits, and a type_k and type_v of fewer bits make it smaller"
        if largest
        else "not even a short one fits: free some memory"
    )
    return (
        f"a context of {size.n_ctx} tokens takes {format_bytes(size(size.n_ctx))} of KV cache{weights}, and "
        f"{format_bytes(free.bytes)} of memory are free; {advice}"
    )
