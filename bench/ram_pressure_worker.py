"""One run of bench/ram_pressure.py: `ram_pressure_worker.py --worker JSON`, in the cgroup it was put in.

The report: seconds per task, peak resident memory, the ids that were decoded, SPICE's counters.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import llama_cpp
from decoding import PROMPT, decode, read_text
from worker import serve


class Run:
    """The tasks of one job on a loaded model."""

    def __init__(self, job: dict[str, Any], llm: llama_cpp.Llama) -> None:
        self._llm = llm
        self._job = job
        needed = sum(job["prefills"]) + PROMPT + job["warm"] + job["decode"]
        self._text = read_text(llm, job["text"], needed)

    def prefills(self) -> list[dict[str, Any]]:
        """Evaluate the prompts, each on an empty context: stretches of the text from its end backwards."""
        done = []
        end = len(self._text)
        for length in self._job["prefills"]:
            self._llm.reset()
            self._reset()
            started = time.perf_counter()
            self._llm.eval(self._text[end - length : end])
            seconds = time.perf_counter() - started
            done.append(dict(tokens=length, seconds=seconds, counters=self._counters()))
            end -= length
        return done

    def decode(self) -> tuple[dict[str, Any], list[int]]:
        """Real text token by token: the counted part, and the most likely token after each."""
        warm, counted = self._job["warm"], self._job["decode"]
        seconds, best = decode(self._llm, self._text, warm, counted, start=self._reset)
        return dict(seconds=seconds, counters=self._counters()), best

    def _counters(self) -> dict[str, Any]:
        if self._job["kind"] != "spice":
            return {}
        counters = self._llm.spice.stats()  # type: ignore[attr-defined]
        del counters["plan"]
        return counters

    def _reset(self) -> None:
        if self._job["kind"] == "spice":
            self._llm.spice.reset_stats()  # type: ignore[attr-defined]


# Takes memory and gives it back, outside of the group: argv is the bytes and the file that moves a process.
TOUCH = """
import mmap, os, sys
size, procs = int(sys.argv[1]), sys.argv[2]
with open(procs, "w") as file:
    file.write(str(os.getpid()))
with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))
"""


def load(job: dict[str, Any]) -> llama_cpp.Llama:
    """The job's model."""
    options: dict[str, Any] = dict(
        n_ctx=1024, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False, seed=1
    )
    if job["kind"] != "spice":
        return llama_cpp.Llama(job["model"], use_mmap=job["mmap"], **options)
    from spice_moe import Llama

    return Llama(
        job["model"], ram_budget=job["budget"], strategy=job["strategy"],
        io_threads=job["io_threads"] or None,
        direct_io=job["direct_io"], preload=False, **options,
    )  # fmt: skip


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One run; see the parent for the job's fields."""
    if job["touch"]:
        subprocess.run([sys.executable, "-c", TOUCH, str(job["touch"]), job["outside"]], check=True)
    started = time.perf_counter()
    llm = load(job)
    report: dict[str, Any] = {"load_seconds": time.perf_counter() - started}
    run = Run(job, llm)
    if job.get("twice"):  # all experts into memory first
        run.prefills()
        run.decode()
    report["prefill"] = run.prefills()
    report["decode"], report["best"] = run.decode()
    report["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if job["kind"] == "spice":
        report["plan"] = llm.spice.plan.to_dict()  # type: ignore[attr-defined]
        report["plan_text"] = str(llm.spice.plan)  # type: ignore[attr-defined]
    llm.close()
    return report


if __name__ == "__main__":
    serve(work)
