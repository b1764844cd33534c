"""Decode speed against what is replaced by low-rank stand-ins (LoRE): `python bench/lore.py MODEL`.

Decodes real text token by token in fresh processes that alternate between: no stand-ins, and stand-ins for
missed experts under thresholds of several widths. A setting is `off`, `SHARE` (replace misses whose share of
their row's gate weights is at most this) or `auto:KL` (what Llama's `lore` takes). The memory is the same in
all of them: the stand-ins' own is taken from the experts' pool. Without --sidecar the stand-ins are random
and tiny: good for measuring speed, and for nothing else. bench/quality.py measures what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPT = 16


def write_random(model: Path, path: Path, rank: int) -> None:
    """A sidecar of stand-ins that are as large as fitted ones of that rank, and tiny in value."""
    import numpy as np
    from gguf import GGUFReader, GGUFWriter
    from spice_moe import _core

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "spice-sidecar", use_temp_file=True)
    writer.add_uint32("spice.version", 1)
    writer.add_string("spice.fingerprint", _core.heads.fingerprint(model))
    writer.add_string("spice.model", model.name)
    halves: dict[tuple[int, ...], Any] = {}
    for tensor in GGUFReader(model).tensors:
        if not tensor.name.endswith(".ffn_down_exps.weight"):
            continue
        layer = tensor.name.split(".")[1]
        ff, width, n = (int(d) for d in tensor.shape)
        for name, shape in (("a", (n, rank, width)), ("b", (n, rank, width)), ("bias", (n, width))):
            if shape not in halves:
                halves[shape] = (1e-3 * rng.standard_normal(shape, dtype=np.float32)).astype(np.float16)
            writer.add_tensor(f"lore.{layer}.{name}", halves[shape])
        for name, value, size in (("error", 0.5, n), ("norm", 1.0, n), ("output", 1.0, 1), ("sensitivity", 0.1, 1)):
            writer.add_tensor(f"lore.{layer}.{name}", np.full(size, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own: seconds and counters of the counted tokens."""
    from spice_moe import Llama

    llm = Llama(
        job["model"], ram_budget=job["ram"], preload=False, prefetch=job["prefetch"],
        n_ctx=PROMPT + job["warm"] + job["decode"], n_threads=job["threads"], n_threads_batch=job["threads"],
        verbose=False, seed=1,

    )  # fmt: skip
    core = llm.spice._core
    assert core is not None
    if job["setting"] not in ("off", "auto"):
        core.use_lore(max_share=float(job["setting"]), max_mass=1.0, max_confidence=1.0)
    text = llm.tokenize(Path(job["text"]).read_bytes(), add_bos=True)[: PROMPT + job["warm"] + job["decode"]]
    llm.eval(text[:PROMPT])
    for token in text[PROMPT : PROMPT + job["warm"]]:
        llm.eval([token])
    llm.spice.reset_stats()
    started = time.perf_counter()
    for token in text[PROMPT + job["warm"] :]:
        llm.eval([token])
    seconds = time.perf_counter() - started
    counters = llm.spice.stats()
    counters.pop("plan")
    llm.close()
    return {"seconds": seconds, "counters": counters}


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
