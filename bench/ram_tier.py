"""SPICE against plain llama.cpp with less memory than the model needs: `python bench/ram_tier.py MODEL`.

Each run is a fresh process in a memory cgroup of its own (version 1, needs root), with the model dropped from
the page cache first: what the page cache holds already would pose as disk speed. `--memory 0` sets no limit.
Decode feeds real text token by token (warm-up tokens first, not counted), because routing decides what such a
benchmark says. Runs of both sides alternate; medians are shown, and whether the most likely tokens agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("ram_tier_worker.py")
CGROUP = Path("/sys/fs/cgroup/memory/spice-bench")
GIB = 2**30


def parse_bytes(text: str) -> int:
    """``5G`` -> bytes."""
    from spice_moe.budget import parse_size

    return parse_size(text)


def drop_from_page_cache(path: Path) -> None:
    """The next read of the file comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def run(job: dict[str, Any], memory: int) -> dict[str, Any]:
    """One worker process under the limit (0: none)."""
    drop_from_page_cache(Path(job["model"]))
    if memory:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "memory.limit_in_bytes").write_text(str(memory))

    def enter() -> None:
        if memory:
            (CGROUP / "tasks").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(job)], stdout=subprocess.PIPE, text=True, preexec_fn=enter
    )
    if done.returncode != 0:
        raise RuntimeError(f"the {job['kind']} worker ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def describe(job: dict[str, Any], report: dict[str, Any], args: argparse.Namespace) -> str:
    """One line of a run."""
    tokens = args.decode / report["decode_seconds"]
    parts = [f"{job['label']:24} load {report['load_seconds']:6.2f} s"]
    parts += [f"prefill {n} {int(n) / s:7.2f} t/s" for n, s in report["prefill"].items()]
    parts.append(f"decode {tokens:6.2f} t/s")
    if job["kind"] == "spice":
        c = report["counters"]["decode"]
        hits = 1 - c["experts_missed"] / max(c["experts_requested"], 1)
        speed = c["bytes_read"] / c["read_seconds"] / 1e9 if c["read_seconds"] > 0 else 0.0
        stalled = c["stall_seconds"] / report["decode_seconds"]
        parts.append(
            f"hit {100 * hits:5.1f} %, {c['bytes_read'] / args.decode / 1e6:6.1f} MB/token at "
            f"{speed:4.2f} GB/s, stalled {100 * stalled:4.1f} %"
        )
    parts.append(f"peak RSS {report['peak_rss'] / GIB:5.2f} GiB")
    return "  ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--memory", type=parse_bytes, default=0, metavar="SIZE", help="cgroup limit of each run"
    )
    parser.add_argument(
        "--budgets", nargs="*", default=["auto"], metavar="SIZE", help="ram_budget of SPICE runs"
    )
    parser.add_argument("--strategies", nargs="*", default=[None], metavar="NAME")
    parser.add_argument("--io-threads", nargs="*", type=int, default=[0], metavar="N", help="0 tunes it")
    parser.add_argument("--buffered", action="store_true", help="no direct reads")
    parser.add_argument("--no-stock", action="store_true", help="SPICE alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--prefills", nargs="*", type=int, default=[64, 256], metavar="N")
    parser.add_argument(
        "--warm", type=int, default=32, metavar="N", help="decoded tokens before the counted ones"
    )
    parser.add_argument("--decode", type=int, default=64, metavar="N", help="counted decoded tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    common = dict(model=str(args.model), threads=args.threads, text=str(args.text), prefills=args.prefills,
                  warm=args.warm, decode=args.decode, direct_io=not args.buffered)  # fmt: skip
    jobs: list[dict[str, Any]] = []
    if not args.no_stock:
        jobs.append(common | dict(kind="stock", label="plain llama.cpp, mmap"))
    for budget in args.budgets:
        for strategy in args.strategies:
            for threads in args.io_threads:
                label = f"SPICE {budget} {strategy or ''}" + (
                    f" io {threads}" if len(args.io_threads) > 1 else ""
                )
                jobs.append(common | dict(kind="spice", budget=budget, strategy=strategy, io_threads=threads,
                                          label=label.strip()))  # fmt: skip
    if not args.json:
        limit = f"{args.memory / GIB:.2f} GiB" if args.memory else "none"
        print(
            f"{args.model}: {args.model.stat().st_size / GIB:.2f} GiB, memory limit {limit}, "
            f"{args.threads} threads, text {args.text.name}, load average {os.getloadavg()[0]:.1f}"
        )
    results: list[list[dict[str, Any]]] = [[] for _ in jobs]
    for _ in range(args.rounds):
        for number, job in enumerate(jobs):
            report = run(job, args.memory)
            results[number].append(report)
            if not args.json:
                print(describe(job, report, args), flush=True)
    best = [[r["best"] for r in runs] for runs in results]
    same = all(ids == best[0][0] for runs in best for ids in runs)
    speeds = {job["label"]: args.decode / statistics.median(r["decode_seconds"] for r in runs)
              for job, runs in zip(jobs, results, strict=True)}  # fmt: skip
    if args.json:
        print(json.dumps({"jobs": jobs, "results": results, "same_tokens": same}, indent=2))
        return 0
    print(f"most likely tokens {'the same in all runs' if same else 'DIFFER'}")
    if not args.no_stock:
        stock = next(iter(speeds.values()))
        for label, speed in list(speeds.items())[1:]:
            print(f"{label}: decode {speed / stock:.2f} times plain llama.cpp")
    return 0


if __name__ == "__main__":
    sys.exit(main())
