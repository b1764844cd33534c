"""Decode speed by memory, SPICE beside plain llama.cpp: `python bench/speed_by_memory.py MODEL --plot FILE`.

Runs bench/ram_pressure.py with several memory limits (shares of the file's size; all memory of the process
counts, not only experts) and prints, writes as JSON or draws the tokens per second. Options after `--` are
ram_pressure's: `-- --decode 16 --warm 16`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).with_name("ram_pressure.py")
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """Tokens per second with that much memory."""

    label: str
    limit: int  #: bytes
    tokens_per_second: float


def points(limit: int, report: dict[str, Any]) -> list[Point]:
    """Of one report of ram_pressure.py: a point for each side, of medians."""
    return [
        Point(job["label"], limit, job["decode"] / statistics.median(r["decode"]["seconds"] for r in reports))
        for job, reports in zip(report["jobs"], report["results"], strict=True)
    ]


def plot(measured: Sequence[Point], title: str, path: Path) -> None:
    """One curve for each side; needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for label in dict.fromkeys(point.label for point in measured):
        mine = sorted((p.limit / GIB, p.tokens_per_second) for p in measured if p.label == label)
        axes.plot(*zip(*mine, strict=True), marker="o", label=label)
        for x, y in mine:
            where = dict(textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
            axes.annotate(f"{y:.1f}", (x, y), **where)
    axes.set(xlabel="memory of the process, GiB", ylabel="decode, tokens per second", title=title)
    axes.set_ylim(bottom=0, top=1.15 * max(point.tokens_per_second for point in measured))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, ram_pressure's if it is not 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.25, 0.5, 0.75, 1.0, 1.25], metavar="X")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="after --: of ram_pressure.py")
    args = parser.parse_args(argv)
    if not args.model.exists():
        print(f"speed_by_memory: no such file: {args.model}", file=sys.stderr)
        return 3
    size = args.model.stat().st_size
    measured: list[Point] = []
    for share in args.shares:
        limit = int(share * size)
        command = [sys.executable, str(BENCH), str(args.model), "--limit", str(limit), "--no-roofline"]
        command += ["--prefills", "64", *args.options, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            return done.returncode
        report = json.loads(done.stdout)
        new = points(limit, report)
        measured += new
        for point in [] if args.json else new:
            speed = f"{point.tokens_per_second:6.2f} tokens/s"
            print(f"{limit / GIB:6.2f} GiB  {point.label:26} {speed}", flush=True)
    if args.json:
        rows = [asdict(point) for point in measured]
        print(json.dumps(dict(model=str(args.model), options=args.options, points=rows)))
    if args.plot:
        plot(measured, f"{args.model.name}, {size / GIB:.1f} GiB", args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
