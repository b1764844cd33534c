"""SPICE against plain llama.cpp with less memory than the model needs: `ram_pressure.py MODEL --limit 5G`.

Each run is a fresh process in a memory cgroup of its own (version 1 or 2, needs root), with the model dropped
from the page cache first: what the page cache holds already would pose as disk speed. Without `--limit` there
is no cgroup. Prompts and decode are real text (`--text`), decode token by token (warm-up tokens first, not
counted), because routing decides what such a benchmark says. All sides run in turn, round after round, and
medians are shown, and whether the most likely tokens agree.

Each run is set against its own roofline, the time that nobody can beat who reads what it missed:

* decode: the later of missed bytes per token / disk speed, and the time per token with everything in memory;
* a prompt: the later of the bytes of the experts that it touched and did not find in memory, each read once,
  / disk speed, and the time of the same prompt with everything in memory.

The disk's speed is that of random direct reads of one expert's size, measured right before and right after
each run (the mean). The times in memory come from one more run of SPICE without a limit, in which all was
computed once before. Before each load under a limit, that much memory is touched and given back: the first
touch of memory that a hypervisor took back costs seconds per GB, and would hit whoever comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from disk_probe import probe
from memory_limit import CannotLimit, MemoryGroup, memory_limit
from worker import Job, Report, run_worker

WORKER = Path(__file__).with_name("ram_pressure_worker.py")
GIB = 2**30
OTHER_NEEDS = GIB  # what a process takes beside the weights: contexts, buffers, Python


def parse_bytes(text: str) -> int:
    """``5G`` -> bytes."""
    from spice_moe.budget import parse_size

    return parse_size(text)


def summary(model: Path) -> dict[str, Any]:
    """What the model's headers say."""
    from spice_moe import _core

    core = _core.Model(str(model))
    try:
        return core.summary()
    finally:
        core.close()


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """The next read of the files comes from the disk."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def run(job: Job, group: MemoryGroup | None, files: Sequence[Path]) -> Report:
    """One worker process in the group (None: no limit)."""
    drop_from_page_cache(files)
    whole = job | dict(outside=group and group.outside)
    return run_worker(WORKER, whole, job["label"], enter=None if group is None else group.enter)


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    """The runs under the limit, in the order of a round."""
    common: Job = dict(
        model=str(args.model),
        threads=args.threads,
        text=str(args.text),
        prefills=args.prefills,
        warm=args.warm,
        decode=args.decode,
        direct_io=not args.buffered,
        touch=args.limit + OTHER_NEEDS if args.limit else 0,
    )
    jobs: list[Job] = []
    if not args.no_stock:
        jobs.append(common | dict(kind="stock", mmap=True, label="plain llama.cpp, mmap"))
        needs = sum(path.stat().st_size for path in args.files) + OTHER_NEEDS
        if not args.limit or needs <= args.limit:
            jobs.append(common | dict(kind="stock", mmap=False, label="plain llama.cpp, no mmap"))
    for budget in args.budgets:
        for strategy in args.strategies:
            for threads in args.io_threads:
                words = ["SPICE", budget, strategy or ""]
                words += [f"io {threads}"] if len(args.io_threads) > 1 else []
                jobs.append(common | dict(kind="spice", budget=budget, strategy=strategy, io_threads=threads,
                                          label=" ".join(filter(None, words))))  # fmt: skip
    return jobs


def add_rooflines(report: Report, memory: Report, disk: float) -> None:
    """Give a SPICE report the shares of its rooflines; ``disk`` in bytes per second.

    ``"roofline"``: for decode and for each prompt in turn, the limit in seconds, what sets it and the share.
    """

    def share(seconds: float, counters: dict[str, Any], in_memory: float) -> dict[str, Any]:
        # What was read ahead for nothing must not raise the limit.
        reading = (counters["bytes_read"] - counters["wasted_bytes"]) / disk
        limit = max(reading, in_memory)
        return dict(seconds=limit, bound="disk" if reading > in_memory else "memory", share=limit / seconds)

    report["roofline"] = {
        "decode": share(
            report["decode"]["seconds"], report["decode"]["counters"], memory["decode"]["seconds"]
        ),
        "prefill": [
            share(run["seconds"], run["counters"], in_memory["seconds"])
            for run, in_memory in zip(report["prefill"], memory["prefill"], strict=True)
        ],
    }


def describe(job: Job, report: Report, args: argparse.Namespace) -> str:
    """The lines of one run."""
    roofline = report.get("roofline")

    def of_roofline(limit: dict[str, Any]) -> str:
        return f" = {limit['share']:4.2f} of roofline ({limit['bound']})"

    lines = [
        f"{job['label']}: ready after {report['load_seconds']:.2f} s, "
        f"peak RSS {report['peak_rss'] / GIB:.2f} GiB"
        + (f", disk {report['disk'] / 1e9:.2f} GB/s" if "disk" in report else "")
    ]
    for number, prompt in enumerate(report["prefill"]):
        line = f"    prompt {prompt['tokens']:4}  {prompt['tokens'] / prompt['seconds']:7.2f} tokens/s"
        if roofline:
            line += of_roofline(roofline["prefill"][number])
        if job["kind"] == "spice":
            c = prompt["counters"]
            line += (
                f", {c['bytes_read'] / 1e9:5.2f} GB read, {100 * hit_rate(c):4.1f} % hits, "
                f"stalled {100 * c['stall_seconds'] / prompt['seconds']:4.1f} %"
            )
        lines.append(line)
    decode = report["decode"]
    line = f"    decode       {args.decode / decode['seconds']:7.2f} tokens/s"
    if roofline:
        line += of_roofline(roofline["decode"])
    if job["kind"] == "spice":
        c = decode["counters"]
        line += (
            f", {c['bytes_read'] / args.decode / 1e6:5.1f} MB read per token, "
            f"{100 * hit_rate(c):4.1f} % hits, "
            f"stalled {100 * c['stall_seconds'] / decode['seconds']:4.1f} %"
        )
    return "\n".join([*lines, line])


def hit_rate(counters: dict[str, Any]) -> float:
    """The share of requested experts that were in memory."""
    return 1 - counters["experts_missed"] / max(counters["experts_requested"], 1)


def conclude(jobs: list[Job], results: list[list[Report]], args: argparse.Namespace) -> str:
    """The medians of all rounds."""

    def median(reports: list[Report], number: int | None) -> float:
        """Seconds of prompt ``number``, or of decode."""
        return statistics.median(
            (r["decode"] if number is None else r["prefill"][number])["seconds"] for r in reports
        )

    def share(reports: list[Report], number: int | None) -> float:
        limits = [r["roofline"]["decode"] if number is None else r["roofline"]["prefill"][number]
                  for r in reports]  # fmt: skip
        return statistics.median(limit["share"] for limit in limits)

    tasks: list[tuple[str, int | None, int]] = [
        (f"prompt {tokens}", number, tokens) for number, tokens in enumerate(args.prefills)
    ]
    tasks.append(("decode", None, args.decode))
    lines = [f"medians of {args.rounds} round{'' if args.rounds == 1 else 's'}:"]
    for job, reports in zip(jobs, results, strict=True):
        parts = []
        for name, number, tokens in tasks:
            seconds = median(reports, number)
            part = f"{name} {tokens / seconds:.2f} t/s"
            if job is not jobs[0] and jobs[0]["kind"] == "stock":
                part += f" ({median(results[0], number) / seconds:.2f} x)"
            if "roofline" in reports[0]:
                part += f" [{share(reports, number):.2f}]"
            parts.append(part)
        lines.append(f"  {job['label']:26}" + ", ".join(parts))
    notes = ["(x): times the speed of plain llama.cpp, mmap"] if not args.no_stock else []
    notes += ["[]: share of the roofline"] if not args.no_roofline else []
    return "\n".join([*lines, "  " + "; ".join(notes)] if notes else lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with ``files`` (all parts of the model) added by main."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--limit", type=parse_bytes, default=0, metavar="SIZE", help="memory of each run (default: no limit)"
    )
    parser.add_argument(
        "--budgets", nargs="*", default=["auto"], metavar="SIZE", help="ram_budget of SPICE runs"
    )
    parser.add_argument("--strategies", nargs="*", default=[None], metavar="NAME")
    parser.add_argument("--io-threads", nargs="*", type=int, default=[0], metavar="N", help="0 tunes it")
    parser.add_argument("--buffered", action="store_true", help="no direct reads")
    parser.add_argument("--no-stock", action="store_true", help="SPICE alone")
    parser.add_argument("--no-roofline", action="store_true", help="no run in memory, no disk probes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument(
        "--prefills", nargs="*", type=int, default=[64, 64, 256], metavar="N",
        help="prompts of a run, one after the other; the first finds an empty pool",
    )  # fmt: skip
    parser.add_argument(
        "--warm", type=int, default=32, metavar="N", help="decoded tokens before the counted ones"
    )
    parser.add_argument("--decode", type=int, default=64, metavar="N", help="counted decoded tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 3 for no such file, 4 when memory cannot be limited."""
    args = parse_args(argv)
    if not args.model.exists():
        print(f"ram_pressure: no such file: {args.model}", file=sys.stderr)
        return 3

    def show(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    headers = summary(args.model)
    args.files = [Path(file["path"]) for file in headers["files"]]
    jobs = plan_jobs(args)
    show(
        f"{args.model}: {sum(path.stat().st_size for path in args.files) / GIB:.2f} GiB, memory limit "
        f"{f'{args.limit / GIB:.2f} GiB' if args.limit else 'none'}, {args.threads} threads, "
        f"text {args.text.name}, load average {os.getloadavg()[0]:.1f}"
    )
    if not args.no_stock and all(job.get("mmap", True) for job in jobs):
        show("plain llama.cpp without mmap does not fit: not run")

    def probed() -> float:
        speed = probe(args.files[-1], headers["slab_bytes_max"])
        show(f"disk: {speed}")
        return speed.bytes_per_second

    memory: Report | None = None
    if not args.no_roofline:
        in_memory = next(job for job in jobs if job["kind"] == "spice") | dict(
            budget="100%", strategy=None, twice=True, touch=0, label="SPICE, all in memory"
        )
        memory = run(in_memory, None, args.files)
        show(describe(in_memory, memory, args))
    results: list[list[Report]] = [[] for _ in jobs]
    try:
        with memory_limit(args.limit) as group:
            for _ in range(args.rounds):
                before = probed() if memory else 0.0
                for number, job in enumerate(jobs):
                    report = run(job, group, args.files)
                    if memory:
                        after = probed()
                        report["disk"] = (before + after) / 2
                        before = after
                        if job["kind"] == "spice":
                            add_rooflines(report, memory, report["disk"])
                    results[number].append(report)
                    show(describe(job, report, args))
    except CannotLimit as error:
        print(f"ram_pressure: cannot limit the memory of a process here: {error}", file=sys.stderr)
        return 4
    best = [report["best"] for reports in results for report in reports] + (
        [memory["best"]] if memory else []
    )
    same = all(ids == best[0] for ids in best)
    if args.json:
        jobs = [dict(job) for job in jobs]
        print(json.dumps(dict(jobs=jobs, in_memory=memory, results=results, same_tokens=same), indent=2))
        return 0
    for reports in results:
        if "plan_text" in reports[0]:
            print(reports[0]["plan_text"])
    print(f"most likely tokens {'the same in all runs' if same else 'DIFFER'}")
    print(conclude(jobs, results, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
