"""``spice-plan``: what fits where, how fast it may be, which strategy to take; from headers alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, budget, command, files, hardware, probe, sim, sim_models
from .plan import format_bytes
from .trace import Trace

_EPILOG = """\
examples:
  spice-plan model.gguf                        this machine: a probe of a few seconds first
  spice-plan model.gguf --hardware rtx4060     a machine that you do not have
  spice-plan model.gguf --ram 6GiB
  spice-plan --probe mine.toml --file model.gguf    measure once, give it to --hardware later

Nothing of the model but its headers is read (the probe reads up to 1 GiB of the file to time the disk). How
well experts can be kept depends on the text; the forecast assumes routing about as local as real models' is,
and its range is the hardware file's `spread`. Exit codes are those of spice-run.
"""

#: Left for the KV cache, llama.cpp's buffers and the system, at least; like budget.resolve's margin.
RESERVE = 768 * 2**20


@dataclass(frozen=True)
class Forecast:
    """One budget and what it gives. Bytes, seconds."""

    pool: str  #: "VRAM" or "RAM"
    budget: int
    slots: int
    strategy: str
    tpot: float
    low: float
    high: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = _parse(argv)
    return command.run("spice-plan", lambda: _run(args), json_errors=args.json)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spice-plan",
        description="What a model needs and how fast it may be with less memory than that.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="MODEL", help="a .gguf file")
    add("--hardware", metavar="NAME", help=f"{', '.join(hardware.presets())}, or a file (default: a probe)")
    add("--ram", type=command.size, metavar="SIZE", help="memory for the model (default: what is free)")
    add(
        "--vram",
        type=command.size,
        metavar="SIZE",
        help="GPU memory for the model (default: all of it); 0: no GPU",
    )
    add("--probe", type=Path, metavar="FILE", help="measure this machine and write FILE")
    add("--file", type=Path, metavar="GGUF", help="with --probe: read this file to time the disk")
    add("--json", action="store_true", help="print one JSON object")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    args = parser.parse_args(argv)
    if args.model is None and args.probe is None:
        parser.error("give a MODEL, or --probe FILE")
    if args.probe is not None and args.hardware is not None:
        parser.error("--probe measures this machine: leave out --hardware")
    if args.file is not None and args.probe is None:
        parser.error("--file is what --probe reads: give --probe, too")
    return args


def _run(args: argparse.Namespace) -> int:
    if args.probe is not None:
        files.check_output(args.probe, args.file, args.model)
        measured = probe.measure(args.file or args.model)
        args.probe.write_text(hardware.to_toml(measured, ("Measured by spice-plan --probe.",)), "utf-8")
        command.say("spice-plan", f"wrote {args.probe}")
        if args.model is None:
            if args.json:
                print(json.dumps({"hardware": str(args.probe), **asdict(measured)}, indent=1))
            return command.OK
    shape = sim_models.of_gguf(args.model)
    if args.probe is not None:
        machine = measured
    elif args.hardware is not None:
        machine = hardware.load(args.hardware)
    else:
        machine = probe.measure(args.model, shape.types)
    if args.vram and not machine.has_device:
        raise command.UsageError(f"--vram: there is no GPU in {machine.name}; leave it out")
    report = plan(shape, machine, ram=args.ram, vram=args.vram, here=args.hardware is None)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(describe(report))
    return command.OK


def plan(
    shape: sim_models.Shape,
    machine: hardware.Hardware,
    *,
    ram: int | None = None,
    vram: int | None = None,
    here: bool = False,
) -> dict[str, Any]:
    """The forecast as plain JSON types. `here`: free memory is asked of this system, not of `machine`.

    ram, vram: bytes for the model, None: what there is; vram 0: the GPU is left out.
    """
    there_is = budget.free_memory().bytes if here else machine.memory
    free = there_is if ram is None else ram
    use_device = machine.has_device and vram != 0
    room = free if not use_device else machine.vram if vram is None else vram
    slab = max(shape.slab_bytes)
    smallest = int(slab * shape.top_k)
    others = int(shape.other_bytes + shape.table_bytes)
    for_experts = max(int(room - others - RESERVE), 0)
    everything = int(shape.expert_bytes)
    working_set = int(sum(shape.slab_bytes) * shape.top_k)
    trace = routing_like_real(shape)
    resident = sim.resident_tpot(machine.machine(use_device=use_device, types=shape.types), shape)
    forecasts: list[Forecast] = []
    memory_slots = 0
    if use_device:
        in_memory = int((free - RESERVE) // slab)
        memory_slots = 0 if in_memory >= shape.experts_total else max(in_memory, shape.top_k)
    budgets = {min(for_experts, everything)} | {
        int(everything * part) for part in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
    }
    names = ("spice", "lru", "static", "all-host") if use_device else ("spice", "lru")
    for size in sorted(size for size in budgets if smallest <= size <= max(for_experts, smallest)):
        slots = min(int(size // slab), shape.experts_total)
        runs = [
            sim.run(
                trace,
                machine,
                shape,
                name,
                slots=slots,
                memory_slots=memory_slots,
                use_device=use_device,
                options=sim.Options(predictor="history"),
            )
            for name in names
        ]
        best = min(runs, key=lambda one: one.tpot)
        low, high = best.tpot / (1 + machine.spread), best.tpot * (1 + machine.spread)
        forecasts.append(
            Forecast("VRAM" if use_device else "RAM", size, slots, best.strategy, best.tpot, low, high)
        )
    return {
        "model": shape.name,
        "machine": machine.name,
        "note": machine.note,
        "layers": shape.layers,
        "experts_per_layer": shape.n_experts,
        "experts_used": shape.top_k,
        "expert_bytes": everything,
        "other_bytes": others,
        "working_set": working_set,
        "smallest_budget": smallest,
        "pool": "VRAM" if use_device else "RAM",
        "room": int(room),
        "budget": min(for_experts, everything),
        "fits": for_experts >= everything,
        "possible": for_experts >= smallest,
        "memory_holds_all": memory_slots == 0 if use_device else for_experts >= everything,
        "resident_tpot": resident,
        "forecasts": [vars(one) for one in forecasts],
    }


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    pool = report["pool"]
    keys = ("expert_bytes", "other_bytes", "working_set", "room", "budget")
    size = {key: format_bytes(report[key]) for key in keys}
    smallest = format_bytes(report["smallest_budget"])
    shape = (
        f"{report['layers']} layers x {report['experts_per_layer']}, {report['experts_used']} used per token"
    )
    lines = [
        f"{report['model']} on {report['machine']} ({report['note']})",
        f"  experts: {shape}: {size['expert_bytes']}; other weights: {size['other_bytes']}",
        f"  one token touches {size['working_set']} of experts; the smallest budget is {smallest}",
    ]
    if not report["possible"]:
        need = format_bytes(report["other_bytes"] + RESERVE + report["smallest_budget"])
        lines.append(
            f"  it does not run: {pool} has {size['room']}; other weights, buffers and the smallest budget "
            f"need {need}"
        )
        return "\n".join(lines)
    share = report["budget"] / max(report["expert_bytes"], 1)
    fit = "all experts fit" if report["fits"] else f"{share:.0%} of the experts fit"
    lines.append(f"  {pool} {size['room']}: {size['budget']} for experts, {fit}")
    if pool == "VRAM" and not report["memory_holds_all"]:
        lines.append("  RAM does not hold all experts: the rest is read from the disk")
    lines.append("  expected speed (decode, one text):")
    for one in report["forecasts"]:
        mark = "  <- what there is room for" if one["budget"] == report["budget"] else ""
        lines.append(
            f"    {format_bytes(one['budget']):>10} for experts: {1 / one['tpot']:7.1f} tokens/s "
            f"({1 / one['high']:.1f} to {1 / one['low']:.1f}), strategy {one['strategy']}{mark}"
        )
    lines.append(f"  with every expert in {pool}: {1 / report['resident_tpot']:.1f} tokens/s")
    return "\n".join(lines)


def routing_like_real(shape: sim_models.Shape, tokens: int = 192, seed: int = 1) -> Trace:
    """Synthetic routing about as local as DeepSeek-V2-Lite's, for any shape.

    Popularity that drifts slowly, and some stickiness from token to token.
    """
    rng = np.random.default_rng(seed)
    ids = np.empty((shape.layers, tokens, shape.top_k), np.int32)
    for layer in range(shape.layers):
        logits = rng.normal(0.0, 0.75, shape.n_experts)
        last = np.zeros(shape.n_experts)
        for token in range(tokens):
            score = logits + 0.9 * last + rng.gumbel(size=shape.n_experts)
            ids[layer, token] = np.argsort(-score)[: shape.top_k]
            last[:] = 0.0
            last[ids[layer, token]] = 1.0
            logits = 0.99 * logits + rng.normal(0.0, 0.1, shape.n_experts)
    return Trace(
        ids=ids,
        lens=np.array([tokens], np.int32),
        n_expert=shape.n_experts,
        layers=np.arange(shape.layers, dtype=np.int32),
    )


if __name__ == "__main__":
    sys.exit(main())
