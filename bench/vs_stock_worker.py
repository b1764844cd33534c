"""One side of bench/vs_stock.py: `vs_stock_worker.py KIND MODEL THREADS SEED`, driven over its pipes.

KIND is "spice", "stock" (plain llama.cpp, repacking off) or "stock-default" (plain, as users get it). The
first line on stdout tells about the load; then each JSON line on stdin is answered by one on stdout. Between
them the process blocks in a read.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from worker import take_turns

CONTEXT = 512


class StockWithoutRepacking(llama_cpp.Llama):
    """Plain llama-cpp-python, except that weights stay as they are in the file."""

    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        self._params.use_extra_bufts = False
        return self._params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        self._params = params


class Side:
    """A loaded model and the tasks that are timed."""

    def __init__(self, kind: str, path: str, threads: int, seed: int) -> None:
        options: dict[str, Any] = dict(
            n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False, seed=1
        )
        if kind == "spice":
            from spice_moe import Llama  # only here: a plain worker stays free of SPICE

            make: type[llama_cpp.Llama] = Llama
        else:
            make = llama_cpp.Llama if kind == "stock-default" else StockWithoutRepacking
        read, started = _bytes_read(), time.perf_counter()
        self.llm = make(path, **options)
        seconds = time.perf_counter() - started
        self._spice = kind == "spice"
        self._prompt = np.random.default_rng(seed).integers(3, self.llm.n_vocab(), CONTEXT).tolist()
        stats = self.stats()
        self.loaded = {
            "seconds": seconds,
            "file_bytes_read": _bytes_read() - read,
            "expert_bytes_read": stats.get("bytes_read", 0),
            "plan_text": str(self.llm.spice.plan)
            if self._spice
            else f"plain llama.cpp {llama_cpp.__version__}",
        }

    def stats(self) -> dict[str, Any]:
        """SPICE's counters, without the plan; nothing for a plain side."""
        if not self._spice:
            return {}
        return {k: v for k, v in self.llm.spice.stats().items() if k != "plan"}

    def logits(self) -> NDArray[np.float32]:
        """Logits [n_vocab] of the last token."""
        pointer = llama_cpp.llama_get_logits_ith(self.llm.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.llm.n_vocab(),))

    def greedy(self, tokens: int) -> dict[str, Any]:
        """The ids of a greedy text after a short prompt."""
        self.llm.reset()
        self.llm.eval(self._prompt[:16])
        ids: list[int] = []
        for _ in range(tokens):
            ids.append(int(np.argmax(self.logits())))
            self.llm.eval(ids[-1:])
        return {"ids": ids}

    def turn(self, prefills: list[int], decode: list[int]) -> dict[str, Any]:
        """Run every task once: seconds, and digests of the logits that came out."""
        seconds: dict[str, float] = {}
        digests: dict[str, str] = {}
        for length in prefills:
            self.llm.reset()
            started = time.perf_counter()
            self.llm.eval(self._prompt[:length])
            seconds[f"prefill {length}"] = time.perf_counter() - started
            digests[f"prefill {length}"] = hashlib.sha256(self.logits().tobytes()).hexdigest()
        self.llm.reset()
        self.llm.eval(self._prompt[:16])
        digest = hashlib.sha256()
        total = 0.0
        for token in decode:
            started = time.perf_counter()
            self.llm.eval([token])
            total += time.perf_counter() - started
            digest.update(self.logits().tobytes())
        seconds["decode"] = total
        digests["decode"] = digest.hexdigest()
        return {"seconds": seconds, "digests": digests}


def _bytes_read() -> int:
    """Bytes that this process has read with read() calls; 0 where the system does not count them."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


def main(argv: list[str]) -> int:
    """Serve requests until stdin ends; returns the exit code."""
    kind, path, threads, seed = argv
    side = Side(kind, path, int(threads), int(seed))
    tasks = {"greedy": side.greedy, "turn": side.turn, "stats": side.stats}
    take_turns(side.loaded, tasks)
    side.llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
