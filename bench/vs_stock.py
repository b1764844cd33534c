"""SPICE against plain llama-cpp-python on one GGUF, side by side: `python bench/vs_stock.py MODEL...`.

Two worker processes hold the model, one with SPICE and one without, and take turns: in every round each runs
the same prefills and the same decode, the order swapped from round to round, so that a noisy machine disturbs
both alike. A worker that waits blocks on its pipe; the time it burns meanwhile is measured and shown. Experts
are warm: a round that is not counted comes first, and what SPICE read during the counted rounds is shown.

Ratios are SPICE's speed divided by plain llama.cpp's: above 1 SPICE is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import TurnWorker

WORKER = Path(__file__).with_name("vs_stock_worker.py")
PREFILLS = (64, 256)
SETTLE_S = (
    0.2  # OpenMP's threads spin for a while after their last work; the next turn waits until they sleep
)


def start(kind: str, model: Path, args: argparse.Namespace) -> TurnWorker:
    """The worker of one side, with its model loaded."""
    return TurnWorker([WORKER, kind, model, str(args.threads), str(args.seed)])


@dataclass
class Series:
    """Seconds of one task in every round, of both sides."""

    tokens: int
    spice: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Median speeds in tokens per second, and the ratio's median, quartiles and extremes."""
        ratios = [plain / spice for spice, plain in zip(self.spice, self.plain, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return {
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [quartiles[0], quartiles[2]],
            "ratio_extremes": [min(ratios), max(ratios)],
            "spice_per_second": self.tokens / statistics.median(self.spice),
            "plain_per_second": self.tokens / statistics.median(self.plain),
        }


def measure_loads(model: Path, args: argparse.Namespace) -> tuple[Series, dict[str, Any]]:
    """Load times in fresh processes, alternating; and what SPICE's last load read. The page cache is warm."""
    series, last = Series(tokens=1), {}
    for number in range(args.load_rounds + 1):
        for kind in ("spice", args.plain) if number % 2 else (args.plain, "spice"):
            worker = start(kind, model, args)
            worker.close()
            if number == 0:
                continue  # fills the page cache
            if kind == "spice":
                last = worker.loaded
            (series.spice if kind == "spice" else series.plain).append(worker.loaded["seconds"])
    return series, last


def measure_turns(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The rounds; see the module's text."""
    workers = {"spice": start("spice", model, args), "plain": start(args.plain, model, args)}
    try:
        # SPICE's own greedy text is what both decode, so that both need the same experts.
        text = workers["spice"].ask(do="greedy", tokens=args.decode)["ids"]
        series = {f"prefill {n}": Series(tokens=n) for n in PREFILLS} | {"decode": Series(tokens=args.decode)}
        digests: dict[str, Any] = {}
        before: dict[str, Any] = {}
        idle, waited = 0.0, 0.0
        for number in range(args.rounds + 1):  # the first warms up
            if number == 1:
                before = workers["spice"].ask(do="stats")
            for kind in ("spice", "plain") if number % 2 else ("plain", "spice"):
                other = workers["plain" if kind == "spice" else "spice"]
                time.sleep(SETTLE_S)
                burnt, started = other.cpu_seconds(), time.perf_counter()
                answer = workers[kind].ask(do="turn", prefills=PREFILLS, decode=text)
                idle += other.cpu_seconds() - burnt
                waited += time.perf_counter() - started
                digests[kind] = answer["digests"]
                if number > 0:
                    for task, seconds in answer["seconds"].items():
                        getattr(series[task], kind).append(seconds)
        stats = workers["spice"].ask(do="stats")
        return {
            "series": series,
            "identical": digests["spice"] == digests["plain"],
            "idle_share": idle / waited,
            "plan": workers["spice"].loaded["plan_text"],
            "plain_plan": workers["plain"].loaded["plan_text"],
            "counters": {k: v - before[k] if k != "plan" and not k.startswith("resident") else v
                         for k, v in stats.items()},
        }  # fmt: skip
    finally:
        for worker in workers.values():
            worker.close()


def bench(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one model, as JSON types."""
    report: dict[str, Any] = {
        "model": str(model),
        "bytes": model.stat().st_size,
        "threads": args.threads,
        "rounds": args.rounds,
        "repacking": args.plain == "stock-default",
        "load_average": os.getloadavg()[0],
    }
    turns = measure_turns(model, args)
    report["results"] = {name: series.summary() for name, series in turns.pop("series").items()}
    report |= turns
    if args.load_rounds:
        loads, last = measure_loads(model, args)
        report["results"]["load"] = loads.summary()
        report["load"] = {key: last[key] for key in ("file_bytes_read", "expert_bytes_read")}
    return report


def show(report: dict[str, Any]) -> None:
    """Print a report for people."""
    print(f"{report['model']}: {report['bytes'] / 2**30:.2f} GiB, {report['threads']} threads, "
          f"{report['rounds']} rounds, load average {report['load_average']:.1f}")  # fmt: skip
    print(f"  SPICE  {report['plan']}")
    repacking = "with repacking, as users get it" if report["repacking"] else "repacking off"
    print(f"  plain  {report['plain_plan']} ({repacking})")
    print(f"  {'':12} {'SPICE':>10} {'plain':>10}   ratio   quartiles     extremes")
    for name, r in report["results"].items():
        unit = "s" if name == "load" else "tokens/s"
        speeds = [r["spice_per_second"], r["plain_per_second"]]
        spice, plain = (1 / s if name == "load" else s for s in speeds)
        low, high = r["ratio_quartiles"]
        least, most = r["ratio_extremes"]
        print(f"  {name:12} {spice:10.3f} {plain:10.3f}   {r['ratio']:.3f}   {low:.3f}-{high:.3f}   "
              f"{least:.3f}-{most:.3f}  {unit}")  # fmt: skip
    print(f"  logits {'bit-identical' if report['identical'] else 'NOT identical'}; "
          f"the waiting worker used {100 * report['idle_share']:.1f} % of a CPU")  # fmt: skip
    if "load" in report:
        print(f"  SPICE's load read {report['load']['file_bytes_read'] / 2**20:.1f} MiB of files, "
              f"{report['load']['expert_bytes_read']} bytes of experts (page cache warm)")  # fmt: skip
    print("  SPICE's counters in the rounds: " + ", ".join(f"{k} {v}" for k, v in report["counters"].items()))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds (default 10)")
    parser.add_argument(
        "--load-rounds", type=int, default=3, help="loads of each side (default 3, 0 for none)"
    )
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="decoded tokens (default 32)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all CPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--stock-default", dest="plain", action="store_const", const="stock-default",
                        default="stock", help="plain llama.cpp as users get it, with repacking")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list instead")
    args = parser.parse_args(argv)
    reports = []
    for model in args.models:
        if not model.exists():
            print(f"vs_stock: no such file: {model}", file=sys.stderr)
            return 3
        try:
            reports.append(bench(model, args))
        except RuntimeError as error:
            print(f"vs_stock: {model}: {error}", file=sys.stderr)
            return 1
        if not args.json:
            show(reports[-1])
    if args.json:
        print(json.dumps(reports, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
