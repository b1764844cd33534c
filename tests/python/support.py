"""Helpers of the Python tests: stock llama.cpp to compare with, and ways to evaluate."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray
from spice_moe import Llama

Logits = NDArray[np.float32]


class Stock(llama_cpp.Llama):
    """Plain llama-cpp-python with repacking off, which is what SPICE promises to equal to the last bit."""

    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        self._params.use_extra_bufts = False
        return self._params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        self._params = params


def open_model(kind: type[llama_cpp.Llama], path: Path, **options: Any) -> llama_cpp.Llama:
    """A quiet model of 768 tokens' context that keeps the logits of every token, computed by one thread.

    Tiny models gain nothing from more, and the barriers between threads take milliseconds on a busy machine.
    """
    defaults: dict[str, Any] = dict(n_ctx=768, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1)
    return kind(str(path), **{**defaults, **options})


@contextlib.contextmanager
def both(path: Path, **options) -> Iterator[tuple[Stock, Llama]]:
    """The same model in stock llama.cpp and in SPICE, opened alike."""
    with (
        contextlib.closing(open_model(Stock, path, **options)) as stock,
        contextlib.closing(open_model(Llama, path, **options)) as spice,
    ):
        yield stock, spice


def prompt(length: int, seed: int = 0) -> list[int]:
    """BOS and random tokens of the tiny vocabulary, none of them special."""
    return [1, *np.random.default_rng(seed).integers(261, 512, length - 1).tolist()]


def prefill(llm: llama_cpp.Llama, tokens: Sequence[int], chunks: Iterable[int] = ()) -> Logits:
    """Logits [len(tokens), n_vocab] of a fresh context; ``chunks`` are sizes of eval calls (default: one)."""
    llm.reset()
    done = 0
    for size in chunks:
        llm.eval(tokens[done : done + size])
        done += size
    if done < len(tokens):
        llm.eval(tokens[done:])
    return llm.scores[: len(tokens)].copy()


def greedy(llm: llama_cpp.Llama, tokens: Sequence[int], count: int) -> tuple[list[int], Logits]:
    """Evaluate a prompt and ``count`` greedy tokens one by one: their ids and logits [count, n_vocab]."""
    prefill(llm, tokens)
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(np.argmax(llm.scores[llm.n_tokens - 1])))
        llm.eval(chosen[-1:])
    return chosen, llm.scores[len(tokens) : len(tokens) + count].copy()


def assert_same(left: Logits, right: Logits) -> None:
    """Bit for bit, NaN included; says how far apart they are if not."""
    assert left.shape == right.shape
    if left.tobytes() != right.tobytes():
        rows = np.flatnonzero((left != right).any(axis=-1))
        raise AssertionError(
            f"{len(rows)} of {len(left)} rows differ, first row {rows[:1]}, by {np.abs(left - right).max()}"
        )


class Counts:
    """Asserts that SPICE, and nobody else, ran the experts between ``Counts(llm)`` and ``expect``."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        llm.spice.reset_stats()

    def expect(self, *, batches: int, tokens: int) -> None:
        """``batches`` micro-batches of ``tokens`` tokens in all, with logits for every one."""
        plan, stats = self._llm.spice.plan, self._llm.spice.stats()
        assert plan.mode == "spice"
        assert stats["layer_calls"] == batches * plan.moe_layers
        assert stats["expert_rows"] == tokens * plan.experts_used * plan.moe_layers
        assert stats["failures"] == 0


@dataclass(frozen=True)
class Usage:
    """What this process holds now, from /proc (Linux)."""

    files: int
    threads: int
    resident_bytes: int


def usage() -> Usage:
    """Raises OSError where there is no /proc.

    Free memory goes back to the system first: what the allocator keeps for later is no leak.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return Usage(
        files=len(list(Path("/proc/self/fd").iterdir())),
        threads=int(status["Threads"]),
        resident_bytes=1024 * int(status["VmRSS"].split()[0]),
    )


def expert_ranges(path: Path) -> list[range]:
    """Where the routed experts lie in a GGUF file: byte ranges, in the order of the file."""
    tensors = [t for t in GGUFReader(path).tensors if "_exps." in t.name]
    return sorted(
        (range(int(t.data_offset), int(t.data_offset + t.n_bytes)) for t in tensors), key=lambda r: r.start
    )


def pages_cached(path: Path, ranges: Iterable[range]) -> float:
    """The share of these bytes' pages that is in the system's page cache (mincore; skips without it)."""
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        pytest.skip("no mincore() to look into the page cache")
    # ACCESS_COPY: writable, so that ctypes gets its address; nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        flags = (ctypes.c_ubyte * (len(view) // page + 1))()
        start = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), flags)
        del start  # or the mapping cannot be closed
    if failed:
        pytest.skip(f"mincore(): {os.strerror(ctypes.get_errno())}")
    inside = [flags[p] & 1 for r in ranges for p in range(-(-r.start // page), r.stop // page)]
    return sum(inside) / len(inside)
