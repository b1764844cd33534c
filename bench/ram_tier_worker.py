"""One run of bench/ram_tier.py: `ram_tier_worker.py JSON`, in the memory cgroup that the parent put it in.

Prints one JSON object: seconds per task, peak resident memory, the ids that were decoded, SPICE's counters.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def main() -> int:
    """Run the job of argv[1]; see the parent for its fields."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    options: dict[str, Any] = dict(
        n_ctx=1024, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False, seed=1
    )
    started = time.perf_counter()
    if job["kind"] == "spice":
        from spice_moe import Llama

        llm: llama_cpp.Llama = Llama(
            job["model"], ram_budget=job["budget"], strategy=job["strategy"],
            io_threads=job["io_threads"] or None,
            direct_io=job["direct_io"], **options,
        )  # fmt: skip
    else:
        llm = llama_cpp.Llama(job["model"], **options)
    loaded = time.perf_counter() - started
    text = llm.tokenize(Path(job["text"]).read_bytes(), add_bos=True)
    report: dict[str, Any] = {"load_seconds": loaded, "prefill": {}, "counters": {}}

    def counted(name: str) -> None:
        if job["kind"] == "spice":
            stats = llm.spice.stats()  # type: ignore[attr-defined]
            report["plan"] = stats.pop("plan")
            report["counters"][name] = stats
            llm.spice.reset_stats()  # type: ignore[attr-defined]

    for length in job["prefills"]:
        llm.reset()
        counted("before")
        started = time.perf_counter()
        llm.eval(text[-length:])
        report["prefill"][str(length)] = time.perf_counter() - started
        counted(f"prefill {length}")
    # Decode real text token by token: the routing of planted models follows the text.
    llm.reset()
    warm, measured = job["warm"], job["decode"]
    llm.eval(text[:16])
    for token in text[16 : 16 + warm]:
        llm.eval([token])
    counted("warm")
    best: list[int] = []
    started = time.perf_counter()
    for token in text[16 + warm : 16 + warm + measured]:
        llm.eval([token])
        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        best.append(int(np.argmax(np.ctypeslib.as_array(logits, shape=(llm.n_vocab(),)))))
    report["decode_seconds"] = time.perf_counter() - started
    counted("decode")
    report["best"] = best
    report["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    llm.close()
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
