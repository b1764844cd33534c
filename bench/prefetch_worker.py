"""One run of bench/prefetch.py: `prefetch_worker.py --worker JSON`, in the cgroup that the parent put it in.

The report: seconds of the counted tokens, SPICE's counters of them, the most likely tokens. Mode
`record` writes the routing of the text instead, for the oracle.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from decoding import PROMPT, decode, read_text
from spice_moe import Llama
from worker import serve

PROMPTS = 4  #: with --prompt; the first finds the pool as decoding left it and is not counted
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"prefetch": False},
    "record": {"prefetch": False},
    "default": {},
    "always": {"prefetch": "always"},
    "oracle": {"prefetch": "always", "predictor": "replay"},
}


def load_routing(path: str) -> list[tuple[int, np.ndarray]]:
    """(layer, ids [tokens, top_k]) of each layer call."""
    with np.load(path) as file:
        calls = np.split(file["ids"], np.cumsum(file["rows"])[:-1])
        return list(zip(file["layers"].tolist(), calls, strict=True))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One run; see the parent for the job's fields."""
    mode = job["mode"]
    options: dict[str, Any] = dict(OPTIONS[mode])
    if mode in ("default", "always"):
        options |= {"predictor": job["predictor"], "sidecar": job["sidecar"]}
    llm = Llama(
        job["model"], ram_budget=job["budget"], preload=False,
        n_ctx=max(PROMPT + job["warm"] + job["decode"], job["prompt"]),
        n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False, seed=1, **options,
    )  # fmt: skip
    core = llm.spice._core
    assert core is not None
    text = read_text(llm, job["text"], max(PROMPT + job["warm"] + job["decode"], PROMPTS * job["prompt"]))
    if mode == "record":
        core.start_capture()
    if mode == "oracle":
        core.set_future(load_routing(job["routing"]))
    seconds, best = decode(llm, text, job["warm"], job["decode"], start=llm.spice.reset_stats)
    counters = llm.spice.stats()
    plan = counters.pop("plan")
    if mode == "record":
        calls = [(layer, ids) for layer, _, ids, *_ in core.take_capture()]
        np.savez(
            job["routing"],
            layers=np.array([layer for layer, _ in calls]),
            rows=np.array([len(ids) for _, ids in calls]),
            ids=np.concatenate([ids for _, ids in calls]),
        )
    prompts: list[float] = []
    for n in range(PROMPTS if job["prompt"] and mode != "record" else 0):
        llm.reset()
        started = time.perf_counter()
        llm.eval(text[n * job["prompt"] : (n + 1) * job["prompt"]])
        prompts.append(time.perf_counter() - started)
    llm.close()
    return {"seconds": seconds, "counters": counters, "plan": plan, "best": best, "prompts": prompts[1:]}


if __name__ == "__main__":
    serve(work)
