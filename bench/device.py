"""SPICE's device tier against llama.cpp's own ways: `python bench/device.py MODEL`, on whatever GPU there is.

Runs, each in a fresh process: stock llama.cpp with all experts on the CPU; stock with as many layers' experts
on the GPU as fit (`n_cpu_moe` as small as it loads); SPICE with each placement strategy. Everything else is
on the GPU in all of them. Prefill of real text, then decode of real text token by token (warm-up first),
because routing decides what such a benchmark says. `--emulate` uses the emulated accelerator with the given
speeds.

`--like PRESET` uses one in the proportions of that machine (device_like.py): for a model that
`models/synth.py --like NAME --thin` made, with every expert in memory, those on the device at first that
another part of the text used most. Each placement then runs beside the first one named: the two take turns
every few tokens, and the ratio of their times is what can be relied on.

A placement can be written STRATEGY:PLACEMENT, `lru:all-fetch` for instance, and with `/alone` behind it to
send nothing ahead. The JSON has the resolved configuration (SPICE's plan, the versions, the arguments) beside
the figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_like import awake, host_speed, likeness
from bench.turns import Ratio, ratio, side_by_side
from bench.worker import Job, Report, TurnWorker, WorkerEndedError, run_main

WORKER = Path(__file__).with_name("device_worker.py")
#: What `--like` compares: the default, and the choices that a table of offloading policies has.
LIKE_PLACEMENTS = ["spice", "static", "lru:all-fetch", "on-demand:all-fetch", "all-host"]
LEARNED = 256  #: tokens of the text's end from which the most used experts are known


def run(job: Job) -> Report | None:
    """One worker process by itself; None when the model did not load."""
    reports = side_by_side(WORKER, [job], job["decode"])
    return reports[0] | dict(factor=1.0) if reports is not None else None


def learn(job: Job) -> list[tuple[int, int]]:
    """All experts, those first that the end of the text uses most."""
    try:
        worker = TurnWorker([WORKER, json.dumps(job | dict(label="learning", decode=LEARNED, from_end=True))])
        worker.ask(do="decode", tokens=LEARNED)
        experts = worker.ask(do="uses")["experts"]
        worker.close()
    except WorkerEndedError as error:
        raise SystemExit(f"learning: {error}") from None
    return experts


def like(args: argparse.Namespace, jobs: Sequence[Job], types: Mapping[str, float]) -> list[Report] | None:
    """Sides that take turns, on a device in the preset's proportion to this host as it is now."""
    with awake():
        found = likeness(args.like, types)
        emulate = asdict(found.speed)
        reports = side_by_side(WORKER, [job | dict(emulate=emulate) for job in jobs], args.turn)
        after = host_speed(types)
    for report in reports or []:
        report |= dict(factor=found.factor, host_before=found.host_speed, host_after=after, speed=emulate)
    return reports


def best_n_cpu_moe(job: Job, layers: int) -> tuple[int, Report] | None:
    """The smallest number of layers with experts on the CPU with which stock runs, by bisection."""
    low, high, best = 0, layers, None
    while low < high:
        middle = (low + high) // 2
        report = run(job | dict(n_cpu_moe=middle, label=f"stock, n_cpu_moe {middle}"))
        if report is None:
            low = middle + 1
        else:
            high, best = middle, (middle, report)
    return best


def describe(label: str, report: Report, decode: int) -> str:
    """One line of a run, with times as on the machine that is emulated."""
    factor = report["factor"]
    parts = [f"{label:28} decode {1000 * report['decode_seconds'] / decode / factor:8.2f} ms/token"]
    parts += [f"prefill {n} {int(n) / s:7.1f} t/s" for n, s in report["prefill"].items()]
    if counters := report.get("counters"):
        needed = counters["experts_requested"]
        utilisation = counters["upload_seconds"] / report["decode_seconds"]
        on_device = counters["device_hits"] + counters["device_fetched"]
        parts.append(
            f"on device {100 * on_device / max(needed, 1):5.1f} %, "
            f"fetched {100 * counters['device_fetched'] / max(needed, 1):4.1f} %, "
            f"{counters['upload_bytes'] / decode / 1e6:6.1f} MB/token up, "
            f"link busy {100 * utilisation:4.1f} %"
        )
    if factor != 1.0:
        late = report["device"]["late_seconds"] / report["decode_seconds"]
        parts.append(
            f"{factor:.2f} times slower here, host {report['host_before'] / 1e9:.1f} and then "
            f"{report['host_after'] / 1e9:.1f} GB/s, {100 * late:.1f} % late"
        )
    if report["joules"]:
        parts.append(" ".join(f"{name} {j / decode:.2f} J/token" for name, j in report["joules"].items()))
    return "  ".join(parts)


def median_times(results: Sequence[dict[str, Any]], decode: int) -> dict[str, float]:
    """Milliseconds per decoded token by label, as on the machine that is emulated."""
    times: dict[str, list[float]] = {}
    for result in results:
        if (report := result["report"]) is not None:
            seconds = report["decode_seconds"] / decode / report["factor"]
            times.setdefault(result["label"], []).append(1000 * seconds)
    return {label: statistics.median(values) for label, values in times.items()}


def versions() -> dict[str, str]:
    """What ran."""
    import llama_cpp
    import spice_moe

    return {
        "spice_moe": spice_moe.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processors": str(os.cpu_count()),
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from spice_moe import placements

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--vram", nargs="*", default=["auto"], metavar="SIZE", help="vram_budget of SPICE runs"
    )
    parser.add_argument("--ram", default="auto", metavar="SIZE", help="ram_budget of SPICE runs")
    parser.add_argument("--placements", nargs="*", metavar="[STRATEGY:]NAME", help="default: all")
    parser.add_argument("--no-stock", action="store_true", help="SPICE alone")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--prefills", nargs="*", type=int, metavar="N", help="default: 256, with --like none")
    parser.add_argument(
        "--warm", type=int, default=64, metavar="N", help="decoded tokens before the counted ones"
    )
    parser.add_argument("--decode", type=int, default=64, metavar="N", help="counted decoded tokens")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all SPICE runs, in turns")
    parser.add_argument("--turn", type=int, default=16, metavar="N", help="with --like: tokens (default 16)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores, with --like one")
    parser.add_argument(
        "--timeline", type=Path, metavar="FOLDER", help="write a timeline of each SPICE run there"
    )
    emulated = parser.add_mutually_exclusive_group()
    emulated.add_argument(
        "--like", metavar="PRESET", help="the GPU of a machine that `spice-sim` knows, slowed down"
    )
    emulated.add_argument(
        "--emulate",
        metavar="JSON",
        help='the emulated accelerator with these settings: {"upload_per_second": 12e9, "memory_bytes": ...}',
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.placements is None:
        args.placements = LIKE_PLACEMENTS if args.like else list(placements())
    if args.prefills is None:
        args.prefills = [] if args.like else [256]
    args.no_stock = args.no_stock or args.like is not None  # the device has all the memory there is
    args.threads = args.threads or (1 if args.like else os.cpu_count() or 1)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 3 for a missing model."""
    args = arguments(argv)
    if not args.model.exists():
        print(f"no such file: {args.model}", file=sys.stderr)
        return 3
    from spice_moe import _core, hardware

    core = _core.Model(str(args.model))
    summary = core.summary()
    core.close()
    layers = summary["n_layers"]
    common = dict(model=str(args.model), threads=args.threads, text=str(args.text), prefills=args.prefills,
                  warm=args.warm, decode=args.decode, vram="0", ram=args.ram, placement="spice", kind="spice",
                  from_end=False, apart=args.like is not None,
                  emulate=json.loads(args.emulate) if args.emulate else None)  # fmt: skip
    if args.like:
        if not hardware.load(args.like).has_device:
            print(f"{args.like} has no GPU", file=sys.stderr)
            return 2
        common |= dict(fill=learn(common))
    results: list[dict[str, Any]] = []

    def keep(label: str, report: Report | None, **settings: Any) -> None:
        results.append({"label": label, **settings, "report": report})
        if not args.json:
            failed = f"{label:28} did not load"
            print(failed if report is None else describe(label, report, args.decode), flush=True)

    if not args.no_stock:
        stock = common | dict(kind="stock", label="stock, experts on CPU")
        keep("stock, experts on CPU", run(stock | dict(n_cpu_moe=layers)), n_cpu_moe=layers)
        best = best_n_cpu_moe(stock, layers)
        if best is not None:
            keep(f"stock, n_cpu_moe {best[0]} (best)", best[1], n_cpu_moe=best[0])

    def job(vram: str, placement: str) -> Job:
        whole, _, alone = placement.partition("/")
        strategy, _, name = whole.rpartition(":")
        label = f"SPICE {placement}" + (f" {vram}" if len(args.vram) > 1 else "")
        job = common | dict(label=label, vram=vram, placement=name, strategy=strategy)
        if args.timeline:
            args.timeline.mkdir(exist_ok=True)
            file = f"{placement}-{vram}.json".replace(":", "-").replace("/", "-").replace("%", "")
            job["timeline"] = str(args.timeline / file)
        return job | dict(prefetch=not alone)

    ratios: dict[str, list[Ratio]] = {}
    for _, vram in itertools.product(range(args.rounds), args.vram):
        if not args.like:
            for placement in args.placements:
                one = job(vram, placement)
                keep(one["label"], run(one), vram=vram, placement=placement)
            continue
        first, *others = (job(vram, placement) for placement in args.placements)
        for sides in [[first, other] for other in others] or [[first]]:
            reports = like(args, sides, summary["expert_bytes_by_type"])
            for one, report in zip(sides, reports or [None] * len(sides), strict=True):
                keep(one["label"], report, vram=vram, beside=[side["label"] for side in sides])
            if reports is None or len(sides) == 1:
                continue
            found = ratio(reports[0]["turns"], reports[1]["turns"])
            ratios.setdefault(sides[1]["label"], []).append(found)
            if not args.json:
                print(f"  {sides[0]['label']} / {sides[1]['label']}: {found}")
    medians = median_times(results, args.decode)
    if args.rounds > 1 and not args.json:
        for label, milliseconds in medians.items():
            print(f"{label:28} median {milliseconds:8.2f} ms/token of {args.rounds} rounds")
    tokens = [r["report"]["best"] for r in results if r["report"] is not None]
    same = all(ids == tokens[0] for ids in tokens)
    if args.json:
        print(
            json.dumps(
                {
                    "arguments": {k: str(v) for k, v in vars(args).items()},
                    "versions": versions(),
                    "results": results,
                    "median_ms_per_token": medians,
                    "ratios": {label: [asdict(one) for one in found] for label, found in ratios.items()},
                    "same_tokens": same,
                },
                indent=2,
            )
        )
    elif not args.like:  # there the experts on the device give zeros
        print(f"most likely tokens {'the same in all runs' if same else 'DIFFER'}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
