"""Do the runtime's counters agree with the simulator's? `python bench/device_sim.py MODEL`, on the emulator.

Decodes a text twice, token by token, on the emulated accelerator, with every expert in memory and an empty
pool on the device; then plays the routing that the runtime itself recorded in the simulator, on a machine
with the speeds that the runtime's probe found, the link's as it was while decoding, and as much time beside
experts as the runtime took. Strategies
whose decisions do not depend on time must agree within a percent or two (an LRU remembers the order within a
call), the others roughly: the emulator computes on the host's own processors. `spice` runs without and with
predictions from the ids alone, by the same class on both sides. A model whose experts have several sizes has
a pool for each in the runtime, and one in the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_emulator import Emulator, Speed, library_path
from bench.worker import run_main

#: The simulator's strategies that the runtime's options make: (strategy, placement) of the runtime.
SAME = {
    "on-demand": ("on-demand", "all-fetch"),
    "lru": ("lru", "all-fetch"),
    "cg-moe": ("lru", "cg-moe"),
    "spice": ("spice", "spice"),
}
#: Predictors that are the same on both sides, for strategies that send ahead.
PREDICTORS = ("none", "history")
SENDS_AHEAD = ("spice",)
#: Of these, the ones whose decisions do not depend on time.
TIMELESS = ("on-demand", "lru")


def run(
    model: str, tokens: Sequence[int], name: str, vram: str, predictor: str = "none", **options: Any
) -> dict[str, Any]:
    """The runtime's counters of two passes over the tokens, the routing, and the plan."""
    from spice_moe import Llama

    strategy, placement = SAME[name]
    ahead = {"prefetch": False} if predictor == "none" else {"prefetch": "always", "predictor": predictor}
    llm = Llama(
        model,
        n_gpu_layers=-1,
        n_ctx=len(tokens) + 8,
        vram_budget=vram,
        strategy=strategy,
        placement=placement,
        preload=False,
        verbose=False,
        **ahead,
        **options,
    )
    with contextlib.closing(llm):
        core = llm.spice._core

        def decode() -> None:
            llm.reset()
            for token in tokens:
                llm.eval([token])

        decode()  # reads the experts into memory
        core.forget_devices()
        llm.spice.reset_stats()
        core.start_capture()
        started = time.perf_counter()
        decode()
        decode()
        seconds = time.perf_counter() - started
        stats = llm.spice.stats()
        ids: dict[int, list[Any]] = {}
        for layer, _, chosen, *_ in core.take_capture():
            ids.setdefault(layer, []).append(chosen)
        core.stop_capture()
    routing = np.stack([np.concatenate(ids[layer]) for layer in sorted(ids)])
    return {"stats": stats, "ids": routing, "token_seconds": seconds / (2 * len(tokens))}


def simulate(report: dict[str, Any], name: str, predictor: str = "none") -> dict[str, Any]:
    """The simulator's counters of the same strategy on the same routing, with the runtime's speeds."""
    from spice_moe import hardware, sim, trace
    from spice_moe.sim_models import Shape

    plan, ids = report["stats"]["plan"], report["ids"]
    # As it was: the emulator's copying thread waits its turn for a processor.
    moved, seconds = report["stats"]["upload_bytes"], report["stats"]["upload_seconds"]
    device = plan["devices"][0]
    machine = hardware.Hardware(
        name="emulated",
        note="as probed",
        memory=2**40,
        host=hardware.Engine(device["host_speed"], device["host_speed"]),
        disk=hardware.Link(1e9),
        device=hardware.Engine(device["device_speed"], device["device_speed"]),
        link=hardware.Link(moved / seconds if moved and seconds else device["link_speed"]),
    )
    layers, n_tokens, _ = ids.shape
    recorded = trace.Trace(
        ids=ids,
        lens=np.array([n_tokens // 2] * 2),
        n_expert=plan["experts_per_layer"],
        layers=np.arange(layers),
    )
    shape = Shape(
        "model",
        (float(plan["slab_bytes_max"]),) * layers,
        float(plan["other_bytes"]),
        plan["experts_per_layer"],
        recorded.top_k,
    )
    options = sim.Options(predictor=predictor)

    def play(machine: hardware.Hardware) -> sim.Run:
        return sim.run(recorded, machine, shape, name, slots=plan["vram_slots"], options=options)

    # What the runtime needs beside experts, in which the link is idle, is not in the probe.
    beside = (report["token_seconds"] - play(machine).tpot) / layers
    return play(replace(machine, layer_call=max(beside, 0.0))).counts


def compare(report: dict[str, Any], simulated: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{counter: {"runtime": ..., "simulator": ...}}: shares of the experts needed, and bytes moved."""
    stats = report["stats"]
    needed = stats["experts_requested"]
    runtime = {
        "on the device": stats["device_hits"] / needed,
        "fetched": stats["device_fetched"] / needed,
        "by the host": stats["device_left"] / needed,
        "sent ahead": stats["device_prefetched"] / needed,
        "used": (stats["device_prefetch_used"] + stats["device_prefetch_late"])
        / max(stats["device_prefetched"], 1),
        "bytes moved": float(stats["upload_bytes"]),
    }
    uses = simulated["hits"] + simulated["late"] + simulated["misses"]
    simulator = {
        "on the device": 1.0 - (simulated["fetched"] + simulated["hosted"]) / uses,
        "fetched": simulated["fetched"] / uses,
        "by the host": simulated["hosted"] / uses,
        "sent ahead": simulated["planned"] / uses,
        "used": simulated["planned_used"] / max(simulated["planned"], 1),
        "bytes moved": float(simulated["link_bytes"]),
    }
    return {name: {"runtime": runtime[name], "simulator": simulator[name]} for name in runtime}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--vram", nargs="*", default=["10%", "25%", "50%"], metavar="SIZE")
    parser.add_argument("--strategies", nargs="*", default=list(SAME), choices=list(SAME), metavar="NAME")
    parser.add_argument(
        "--predictors",
        nargs="*",
        default=list(PREDICTORS),
        choices=PREDICTORS,
        metavar="NAME",
        help=f"for {', '.join(SENDS_AHEAD)}: {', '.join(PREDICTORS)}",
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument(
        "--emulate", default='{"upload_per_second": 1e9}', metavar="JSON", help="the device's speeds"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if not Path(args.model).exists():
        print(f"no such file: {args.model}", file=sys.stderr)
        return 3
    speed = Speed(**json.loads(args.emulate))
    emulator = Emulator(library_path())
    emulator.configure(speed)

    import llama_cpp

    with contextlib.closing(llama_cpp.Llama(str(args.model), vocab_only=True, verbose=False)) as vocabulary:
        tokens = vocabulary.tokenize(args.text.read_bytes(), add_bos=True)[: args.tokens]
    results = []
    runs = [
        (name, predictor)
        for name in args.strategies
        for predictor in (args.predictors if name in SENDS_AHEAD else ["none"])
    ]
    for vram in args.vram:
        for name, predictor in runs:
            report = run(str(args.model), tokens, name, vram, predictor, n_threads=1)
            figures = compare(report, simulate(report, name, predictor))
            results.append(
                {
                    "vram": vram,
                    "strategy": name,
                    "predictor": predictor,
                    "figures": figures,
                    "plan": report["stats"]["plan"],
                }
            )
            if not args.json:
                text = "  ".join(
                    f"{label} {v['runtime']:.3f} / {v['simulator']:.3f}"
                    for label, v in figures.items()
                    if label != "bytes moved"
                )
                moved = figures["bytes moved"]
                print(
                    f"{vram:5} {name:10} {predictor:8} {text}  MB moved {moved['runtime'] / 1e6:.1f} / "
                    f"{moved['simulator'] / 1e6:.1f}",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"device": asdict(speed), "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
