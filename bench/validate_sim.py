"""Simulated against measured time per token in the RAM tier: `python bench/validate_sim.py MODEL`.

MODEL should have planted routing (models/synth.py --like), so that its routing follows the text. Steps:
 1. the routing of the text is recorded (stock llama.cpp);
 2. decode is measured at each budget as bench/ram_pressure.py does, a fresh process and a cold page cache
    each time, nothing loaded ahead; and once with everything in memory;
 3. the simulator plays the same tokens. It is told: the CPU's speed, from the run with everything in memory;
    how much reads and idling slow it down, a disk's latency and reads in flight, from probes; the disk's
    bandwidth, from the counters of one run, --one (bytes / seconds with a read in flight). Of the other runs
    nothing.
Printed is simulated / measured for each budget: the goal is 0.85 to 1.15. Needs a quiet machine. With --keep
FILE what was measured is kept there, and only what is missing is measured: a long list in several goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from decoding import PROMPT
from ram_pressure import drop_from_page_cache
from spice_moe import hardware, probe, sim, sim_models, trace
from worker import run_main, run_worker, serve

PARTS = 3  #: reads of an expert: gate, up, down
ALIGNMENT = 4096


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


class Measured:
    """The measured runs, as far as there are any; `file` keeps them."""

    def __init__(self, args: argparse.Namespace, part_bytes: int) -> None:
        self._args, self._part_bytes, self._file = args, part_bytes, args.keep
        self._done: dict[str, Any] = {}
        if self._file is not None and self._file.exists():
            self._done = json.loads(self._file.read_text("utf-8"))

    def _once(self, key: str, make: Any) -> Any:
        if key not in self._done:
            self._done[key] = make()
            if self._file is not None:
                self._file.write_text(json.dumps(self._done), "utf-8")
        return self._done[key]

    def _disk(self) -> dict[str, Any]:
        return vars(probe.disk_link(self._args.model, self._part_bytes // ALIGNMENT * ALIGNMENT))

    def contention(self, types: dict[str, float]) -> float:
        """How much reads slow the CPU down, on the quantisation that the model has most of."""
        most = max(types, key=lambda name: types[name])
        return self._once("contention", lambda: probe.contention(self._args.model, most))

    def drowsiness(self, types: dict[str, float]) -> float:
        """How much idling slows it down."""
        return self._once("drowsiness", lambda: probe.drowsiness(max(types, key=lambda name: types[name])))

    def probes(self) -> list[hardware.Link]:
        """What the disk was found to be before and after each run."""
        runs = [run for run in self._done.values() if isinstance(run, dict)]
        return [hardware.Link(**link) for run in runs for link in run["disk"]]

    def run(self, strategy: str, percent: float, *, twice: bool = False) -> dict[str, Any]:
        """One run, with the disk's speed around it."""
        return self._once(f"{strategy} {percent:g} %", lambda: self._run(strategy, percent / 100, twice))

    def _run(self, strategy: str, share: float, twice: bool) -> dict[str, Any]:
        args = self._args
        job = dict(model=str(args.model), kind="spice", threads=args.threads, text=str(args.text),
                   prefills=[], warm=args.warm, decode=args.decode,
                   strategy=strategy, budget=share, twice=twice)  # fmt: skip
        drop_from_page_cache([args.model])
        before = self._disk()
        report = run_worker(Path(__file__), job, f"{strategy} {share:.0%}")
        counters = report["counters"]
        return {
            "tpot": report["seconds"] / args.decode,
            "slots": report["slots"],
            "miss_rate": counters["experts_missed"] / max(counters["experts_requested"], 1),
            "stalled": counters["stall_seconds"] / args.decode,
            "read_seconds": counters["read_seconds"] / args.decode,
            "bytes": counters["bytes_read"] / args.decode,
            "disk": [before, self._disk()],
        }


def simulated(
    routing: trace.Trace,
    machine: hardware.Hardware,
    shape: sim_models.Shape,
    strategy: str,
    slots: int,
    warm: int,
    decode: int,
) -> dict[str, float]:
    """Of the counted tokens, all decoded ones less those of the warm-up: seconds per token, misses."""
    options = sim.Options(prefill=PROMPT, predictor="replay", recall=(0.0,) * 6)
    warm_up, whole = (
        sim.run(
            routing, machine, shape, strategy, slots=slots, use_device=False, options=options, tokens=tokens
        ).counts
        for tokens in (PROMPT + warm, PROMPT + warm + decode)
    )
    counted = {key: whole[key] - warm_up[key] for key in ("seconds", "tokens", "hits", "misses", "late")}
    uses = counted["hits"] + counted["misses"] + counted["late"]
    return {"tpot": counted["seconds"] / counted["tokens"], "miss_rate": counted["misses"] / max(uses, 1)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[20, 30, 40, 50, 70], help="budgets, %% of experts"
    )
    parser.add_argument("--one", type=float, default=50, metavar="SHARE", help="the run that tells the disk")
    parser.add_argument("--strategies", nargs="+", default=["spice"])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--warm", type=int, default=32, help="decoded tokens before the counted ones")
    parser.add_argument("--decode", type=int, default=64, help="counted tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trace", type=Path, help="the routing of the text, if it was recorded before")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of what was measured")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    if sys.argv[1:2] == ["--worker"]:
        serve(work)
        return 0
    args = parse(argv)
    shape = sim_models.of_gguf(args.model)
    tokens = PROMPT + args.warm + args.decode
    routing = trace.load(args.trace) if args.trace else record(args.model, args.text, tokens)
    sim_models.check(shape, routing, str(args.text))
    measured = Measured(args, int(max(shape.slab_bytes) / PARTS))

    # With everything in memory, time per token is the CPU's.
    slower = measured.contention(dict(shape.types))
    drowsy = measured.drowsiness(dict(shape.types))
    full = measured.run(args.strategies[0], 100, twice=True)
    stream = (shape.other_bytes + shape.top_k * sum(shape.slab_bytes)) / full["tpot"]
    one = measured.run(args.strategies[0], args.one)
    probes = measured.probes()
    disk = hardware.Link(
        bandwidth=one["bytes"] / one["read_seconds"],
        latency=statistics.median(link.latency for link in probes),
        chunk=probes[0].chunk,
        in_flight=round(statistics.median(link.in_flight for link in probes)),
    )
    rows = []
    for strategy in args.strategies:
        for share in args.shares:
            run = measured.run(strategy, share)
            machine = hardware.Hardware(
                name="this machine",
                note="from a probe and one run",
                memory=0,
                host=hardware.Engine(stream, stream * probe.ROW_GAIN),
                disk=disk,
                contention=slower,
                drowsiness=drowsy,
            )
            ours = simulated(routing, machine, shape, strategy, run["slots"], args.warm, args.decode)
            rows.append({"strategy": strategy, "share": share, "simulated": ours, **run})
    if args.json:
        config = {key: str(value) for key, value in vars(args).items()}
        print(
            json.dumps(
                {"config": config, "contention": slower, "drowsiness": drowsy, "full": full, "rows": rows},
                indent=1,
            )
        )
        return 0
    print(
        f"{args.model.name}: {full['tpot'] * 1e3:.1f} ms/token with every expert in memory "
        f"({stream / 1e9:.1f} GB/s), {slower:.0%} slower while the disk reads, {drowsy:.0%} when it idles; "
        f"disk {disk.bandwidth / 1e9:.2f} GB/s, {disk.latency * 1e3:.2f} ms, {disk.in_flight} in flight"
    )
    print(
        f"{'strategy':10}{'slots':>7}{'measured ms':>13}{'simulated ms':>14}{'ratio':>7}"
        f"{'missed':>8}{'simulated':>11}{'disk GB/s':>11}"
    )
    for row in rows:
        ours = row["simulated"]
        print(
            f"{row['strategy']:10}{row['share']:6.0f}%{row['tpot'] * 1e3:13.1f}{ours['tpot'] * 1e3:14.1f}"
            f"{ours['tpot'] / row['tpot']:7.2f}{row['miss_rate']:8.3f}{ours['miss_rate']:11.3f}"
            f"{row['bytes'] / max(row['read_seconds'], 1e-9) / 1e9:11.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
