"""Simulated against measured time per token in the RAM tier: `python bench/validate_sim.py MODEL`.

MODEL should have planted routing (models/synth.py --like), so that its routing follows the text. Steps:
 1. the routing of the text is recorded (stock llama.cpp);
 2. decode is measured at each budget, a fresh process and a cold page cache each time, nothing loaded ahead, as
    bench/ram_tier.py does; once with everything in memory;
 3. the simulator plays the same tokens. From the run with everything in memory it takes the CPU's speed, from the
    others nothing but the disk's bandwidth (bytes read per second with a read running).
Printed is simulated / measured for each budget: the goal is 0.85 to 1.15. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ram_tier import parse_bytes, run
from spice_moe import hardware, sim, sim_models, trace

PROMPT = 16  #: tokens that the worker evaluates at once before it decodes


def record(model: Path, text: Path, tokens: int) -> trace.Trace:
    """The routing of the first tokens of the text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.npz"
        trace.record(model, [text.read_text("utf-8")], path, tokens=tokens, sequence=1024)
        return trace.load(path)


def simulated(
    routing: trace.Trace,
    machine: hardware.Hardware,
    shape: sim_models.Shape,
    strategy: str,
    slots: int,
    warm: int,
) -> float:
    """Seconds per counted token: all decoded tokens less those of the warm-up."""
    options = sim.Options(prefill=PROMPT, predictor="replay", recall=(0.0,) * 6)
    seconds = []
    for tokens in (PROMPT + warm, 0):
        one = sim.run(
            routing, machine, shape, strategy, slots=slots, use_device=False, options=options, tokens=tokens
        )
        seconds.append((one.counts["seconds"], one.counts["tokens"]))
    (before, few), (after, all_of_them) = seconds
    return (after - before) / (all_of_them - few)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[20, 30, 50, 70], help="budgets, %% of experts"
    )
    parser.add_argument("--strategies", nargs="+", default=["spice", "lru"])
    parser.add_argument(
        "--memory", type=parse_bytes, default=0, metavar="SIZE", help="cgroup limit (default: none)"
    )
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--warm", type=int, default=32, help="decoded tokens before the counted ones")
    parser.add_argument("--decode", type=int, default=64, help="counted tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    shape = sim_models.of_gguf(args.model)
    routing = record(args.model, args.text, PROMPT + args.warm + args.decode)
    sim_models.check(shape, routing, str(args.text))
    job = dict(model=str(args.model), kind="spice", threads=args.threads, text=str(args.text), prefills=[],
               warm=args.warm, decode=args.decode, direct_io=True, io_threads=0, prefetch=False)  # fmt: skip

    def measure(strategy: str, share: float, warm: int) -> dict[str, Any]:
        report = run(job | dict(strategy=strategy, budget=share, warm=warm, label=""), args.memory)
        counters = report["counters"]["decode"]
        return {
            "tpot": report["decode_seconds"] / args.decode,
            "slots": report["plan"]["slots"],
            "miss_rate": counters["experts_missed"] / max(counters["experts_requested"], 1),
            "bandwidth": counters["bytes_read"] / max(counters["read_seconds"], 1e-9),
        }

    # With everything in memory, and what misses there still read: time per token is the CPU's.
    full = measure(args.strategies[0], 1.0, args.warm)
    weights = shape.other_bytes + shape.top_k * sum(shape.slab_bytes)
    read = full["miss_rate"] * shape.top_k * sum(shape.slab_bytes) / max(full["bandwidth"], 1.0)
    stream = weights / max(full["tpot"] - read, 1e-9)
    rows = []
    for strategy in args.strategies:
        for share in args.shares:
            measured = measure(strategy, share / 100, args.warm)
            machine = hardware.Hardware(
                name="this machine",
                note="from the measured runs",
                memory=0,
                host=hardware.Engine(stream, stream * 1.6),
                disk=hardware.Link(measured["bandwidth"]),
            )
            machine = replace(machine, contention=0.0)
            slots = measured["slots"]
            tpot = simulated(routing, machine, shape, strategy, slots, args.warm)
            rows.append({"strategy": strategy, "share": share, "simulated": tpot, **measured})
    if args.json:
        print(
            json.dumps(
                {"config": {k: str(v) for k, v in vars(args).items()}, "full": full, "rows": rows}, indent=1
            )
        )
        return 0
    print(f"{args.model.name}: {full['tpot'] * 1e3:.1f} ms/token with every expert in memory")
    print(
        f"{'strategy':14}{'slots':>6}{'measured ms':>13}{'simulated ms':>14}{'ratio':>7}{'missed':>8}{'GB/s':>7}"
    )
    for row in rows:
        print(
            f"{row['strategy']:14}{row['share']:5.0f}%{row['tpot'] * 1e3:13.1f}{row['simulated'] * 1e3:14.1f}"
            f"{row['simulated'] / row['tpot']:7.2f}{row['miss_rate']:8.3f}{row['bandwidth'] / 1e9:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
