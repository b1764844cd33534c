"""Simulated against measured time per token in the RAM tier: `python bench/validate_sim.py MODEL`.

MODEL should have planted routing (models/synth.py --like), so that its routing follows the text. Steps:
 1. the routing of the text is recorded (stock llama.cpp);
 2. decode is measured at each budget as bench/ram_pressure.py does, a fresh process and a cold page cache
    each time, nothing loaded ahead; once with everything in memory;
 3. the simulator plays the same tokens. From the run with everything in memory it takes the CPU's speed, from
    the others nothing but the disk's bandwidth (bytes read per second with a read running).
Printed is simulated / measured for each budget: the goal is 0.85 to 1.15. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from decoding import PROMPT
from ram_pressure import drop_from_page_cache
from spice_moe import hardware, sim, sim_models, trace


def record(model: Path, text: Path, tokens: int) -> trace.Trace:
    """The routing of the first tokens of the text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.npz"
        trace.record(model, [text.read_text("utf-8")], path, tokens=tokens, sequence=1024)
        return trace.load(path)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One measured run, in a process of its own: decode as bench/ram_pressure.py's worker does it."""
    from ram_pressure_worker import Run
    from spice_moe import Llama

    options: dict[str, Any] = dict(n_ctx=1024, n_threads=job["threads"], n_threads_batch=job["threads"])
    llm = Llama(
        job["model"], ram_budget=job["budget"], strategy=job["strategy"], prefetch=False, preload=False,
        verbose=False, seed=1, **options,
    )  # fmt: skip
    worker = Run(job, llm)
    if job["twice"]:  # everything into memory first
        worker.decode()
    report, _ = worker.decode()
    report["slots"] = llm.spice.plan.slots
    llm.close()
    return report


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
    """The command line; returns the exit code."""
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(json.loads(sys.argv[2]))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[20, 30, 50, 70], help="budgets, %% of experts"
    )
    parser.add_argument("--strategies", nargs="+", default=["spice", "lru"])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--warm", type=int, default=32, help="decoded tokens before the counted ones")
    parser.add_argument("--decode", type=int, default=64, help="counted tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    shape = sim_models.of_gguf(args.model)
    routing = record(args.model, args.text, PROMPT + args.warm + args.decode)
    sim_models.check(shape, routing, str(args.text))
    job = dict(model=str(args.model), kind="spice", threads=args.threads, text=str(args.text), prefills=[],
               warm=args.warm, decode=args.decode)  # fmt: skip

    def measure(strategy: str, share: float, *, twice: bool = False) -> dict[str, Any]:
        drop_from_page_cache([args.model])
        command = [sys.executable, __file__, "--worker"]
        text = json.dumps(job | dict(strategy=strategy, budget=share, twice=twice))
        done = subprocess.run([*command, text], stdout=subprocess.PIPE, text=True, check=True)
        report = json.loads(done.stdout)
        counters = report["counters"]
        return {
            "tpot": report["seconds"] / args.decode,
            "slots": report["slots"],
            "miss_rate": counters["experts_missed"] / max(counters["experts_requested"], 1),
            "bandwidth": max(counters["bytes_read"], 1) / max(counters["read_seconds"], 1e-9),
        }

    # With everything in memory, time per token is the CPU's.
    full = measure(args.strategies[0], 1.0, twice=True)
    stream = (shape.other_bytes + shape.top_k * sum(shape.slab_bytes)) / full["tpot"]
    rows = []
    for strategy in args.strategies:
        for share in args.shares:
            measured = measure(strategy, share / 100)
            machine = hardware.Hardware(
                name="this machine",
                note="from the measured runs",
                memory=0,
                host=hardware.Engine(stream, stream * 1.6),
                disk=hardware.Link(measured["bandwidth"]),
            )
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
        f"{'strategy':14}{'slots':>6}{'measured ms':>13}{'simulated ms':>14}{'ratio':>7}{'missed':>8}"
        f"{'GB/s':>7}"
    )
    for row in rows:
        print(
            f"{row['strategy']:14}{row['share']:5.0f}%{row['tpot'] * 1e3:13.1f}{row['simulated'] * 1e3:14.1f}"
            f"{row['simulated'] / row['tpot']:7.2f}{row['miss_rate']:8.3f}{row['bandwidth'] / 1e9:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
