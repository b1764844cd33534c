"""Reading ahead against not reading ahead, and against an oracle: `python bench/prefetch.py MODEL`.

Decodes real text token by token (routing decides what such a benchmark says), in fresh processes that
alternate between: nothing read ahead, SPICE's default, the default that cannot turn itself off, and an oracle
that is told the routing of the same text. `--bandwidth` throttles the disk with a blkio cgroup of version 1
(needs root), which direct reads obey. For each setting it prints tokens per second, how long compute threads
waited, and which share of the waiting that the oracle avoids is avoided by SPICE. The link's
bound is the bytes that `none` reads, at the bandwidth of the same run. With `--prompt N` also prompts of N
tokens, from which nothing is predicted, and which must not become slower either. Fitted heads are used where
`--sidecar` names them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from worker import run_main, run_worker

WORKER = Path(__file__).with_name("prefetch_worker.py")
THROTTLE = Path("/sys/fs/cgroup/blkio")
MODES = ("none", "default", "always", "oracle")


def disk_of(device: int, devices: Path = Path("/sys/dev/block")) -> str:
    """``major:minor`` of the whole disk that a device number is on: limits on a partition are refused."""
    entry = devices / f"{os.major(device)}:{os.minor(device)}"
    if (entry / "partition").exists():
        return (entry / ".." / "dev").read_text().strip()  # the entry is a link into the disk's own folder
    return entry.name


@contextlib.contextmanager
def throttled(path: Path, bandwidth: int) -> Iterator[Path | None]:
    """A cgroup whose processes read the disk of `path` at `bandwidth` bytes per second; None for 0."""
    if not bandwidth:
        yield None
        return
    group = THROTTLE / f"spice-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{disk_of(path.stat().st_dev)} {bandwidth}")
        yield group
    finally:
        group.rmdir()


def run(job: dict[str, Any], group: Path | None) -> dict[str, Any]:
    """One worker process."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return run_worker(WORKER, job, job["mode"], enter=enter)


def describe(mode: str, n_tokens: int, reports: Sequence[dict[str, Any]]) -> str:
    """One line of a mode: medians over the rounds, counters of the last."""
    seconds = statistics.median(report["seconds"] for report in reports)
    stalled = statistics.median(report["counters"]["stall_seconds"] for report in reports)
    c = reports[-1]["counters"]
    recall = c["predicted_right"] / c["predicted_experts"] if c["predicted_experts"] else 0.0
    per_token = {name: c[name] / n_tokens / 1e6 for name in ("bytes_read", "prefetch_bytes", "wasted_bytes")}
    speed = c["bytes_read"] / max(c["read_seconds"], 1e-9) / 1e9
    return (
        f"  {mode:8} {n_tokens / seconds:6.2f} tokens/s, waiting {1000 * stalled / n_tokens:6.1f} ms/token, "
        f"link busy {100 * c['read_seconds'] / reports[-1]['seconds']:3.0f} % at {speed:4.2f} GB/s, "
        f"{per_token['bytes_read']:5.1f} MB/token ({per_token['prefetch_bytes']:5.1f} ahead, "
        f"{per_token['wasted_bytes']:4.1f} wasted), next-layer recall {recall:.3f}, "
        f"predicting {100 * c['predict_seconds'] / reports[-1]['seconds']:.1f} %"
        + (f"; prompts {median_prompt(reports):.2f} s" if reports[-1]["prompts"] else "")
    )


def median_prompt(reports: Sequence[dict[str, Any]]) -> float:
    """Seconds of the median prompt of all rounds."""
    return statistics.median(seconds for report in reports for seconds in report["prompts"])


def conclude(results: dict[str, list[dict[str, Any]]]) -> str:
    """What reading ahead brought, from medians."""
    seconds = {mode: statistics.median(r["seconds"] for r in rs) for mode, rs in results.items()}
    stalls = {
        mode: statistics.median(r["counters"]["stall_seconds"] for r in rs) for mode, rs in results.items()
    }
    parts = [f"{mode} / none {seconds['none'] / seconds[mode]:.3f}" for mode in results if mode != "none"]
    text = "  speed: " + ", ".join(parts)
    if results["none"][-1]["prompts"]:
        none = median_prompt(results["none"])
        text += "; prompts: " + ", ".join(
            f"{mode} / none {none / median_prompt(rs):.3f}" for mode, rs in results.items() if mode != "none"
        )
    needed = statistics.median(r["counters"]["bytes_read"] for r in results["none"])
    shares = {
        mode: statistics.median(
            needed * r["counters"]["read_seconds"] / max(r["counters"]["bytes_read"], 1) / r["seconds"]
            for r in rs
        )
        for mode, rs in results.items()
    }
    text += "; of the link's bound: " + ", ".join(f"{mode} {share:.2f}" for mode, share in shares.items())
    hideable = stalls["none"] - stalls.get("oracle", stalls["none"])
    if hideable > 0:
        for mode in ("default", "always"):
            if mode in stalls:
                share = 100 * (stalls["none"] - stalls[mode]) / hideable
                text += f"; {mode} hides {share:.0f} % of what the oracle hides"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from spice_moe.budget import parse_size

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--budgets", nargs="*", default=["42%"], metavar="SIZE", help="ram_budget")
    parser.add_argument(
        "--bandwidth", nargs="*", default=["0"], metavar="SIZE", help="bytes per second; 0: no limit"
    )
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--predictor", metavar="NAME", help="instead of the default one")
    parser.add_argument("--sidecar", type=Path, metavar="FILE")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument(
        "--warm", type=int, default=32, metavar="N", help="decoded tokens before the counted ones"
    )
    parser.add_argument("--decode", type=int, default=64, metavar="N", help="counted decoded tokens")
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="also prompts of N tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    everything = []
    with tempfile.TemporaryDirectory() as folder:
        common = dict(model=str(args.model), text=str(args.text), warm=args.warm, decode=args.decode,
                      prompt=args.prompt, threads=args.threads, predictor=args.predictor,
                      sidecar=str(args.sidecar) if args.sidecar else None,
                      routing=str(Path(folder) / "routing.npz"))  # fmt: skip
        if not args.json:
            print(
                f"{args.model}: {args.model.stat().st_size / 2**30:.2f} GiB, text {args.text.name}, "
                f"{args.warm} + {args.decode} tokens, {args.threads} threads, "
                f"load average {os.getloadavg()[0]:.1f}"
            )
        if "oracle" in args.modes:
            run(common | dict(mode="record", budget=args.budgets[-1]), None)
        for budget in args.budgets:
            for bandwidth in args.bandwidth:
                limit = parse_size(bandwidth) if bandwidth != "0" else 0
                results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
                with throttled(args.model, limit) as group:
                    for _ in range(args.rounds):
                        for mode in args.modes:
                            results[mode].append(run(common | dict(mode=mode, budget=budget), group))
                everything.append(dict(budget=budget, bandwidth=limit, results=results))
                if args.json:
                    continue
                disk = f"limited to {limit / 1e9:.2f} GB/s" if limit else "as it is"
                print(f"budget {budget}, disk {disk}:")
                for mode, reports in results.items():
                    print(describe(mode, args.decode, reports))
                if "none" in results:
                    print(conclude(results), flush=True)
    same = len({tuple(r["best"]) for one in everything for rs in one["results"].values() for r in rs}) == 1
    if args.json:
        print(json.dumps(dict(configuration=common, settings=everything, same_tokens=same), indent=2))
    else:
        print(f"most likely tokens {'the same in all runs' if same else 'DIFFER'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
