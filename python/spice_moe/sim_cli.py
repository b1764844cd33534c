"""``spice-sim``: what a model would do on a machine, on recorded routing."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import __version__, command, files, hardware, sim, sim_models, trace
from .errors import SpiceUnsupportedError
from .loading import ProgressBar

_EPILOG = """\
examples:
  spice-sim deepseek-v2-lite.npz --hardware rtx4060
  spice-sim T.npz --model model.gguf --hardware laptop-nvme --strategy spice lru belady --slots 30 50
  spice-sim T.npz --hardware mine.toml --strategy all --json > runs.json
  spice-sim T.npz --hardware rtx4060 --plot tpot.svg          (needs matplotlib: the extra `plots`)

TRACE comes from spice-trace. A hardware is a preset or a TOML file (`spice-plan --probe FILE` measures one).
With a GPU the pool is in its memory, and RAM holds all experts or --ram of them; without, the pool is RAM and
the disk feeds it. docs/simulator.md says what is simulated. Exit codes are those of spice-run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = _parse(argv)
    return command.run("spice-sim", lambda: _run(args), json_errors=args.json)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spice-sim",
        description="Simulate strategies for experts on recorded routing, in virtual time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a routing trace (.npz)")
    add("--hardware", default="rtx4060", metavar="NAME", help=f"{', '.join(hardware.presets())}, or a file")
    add(
        "--strategy",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"all, or {', '.join(sim.strategies())}",
    )
    add(
        "--slots",
        nargs="+",
        type=command.number(0, 100),
        default=[10, 20, 30, 50],
        metavar="%",
        help="pool, %% of the experts",
    )
    add("--no-device", action="store_true", help="leave the GPU out: the pool is RAM, fed from the disk")
    add(
        "--ram",
        type=command.size,
        default=0,
        metavar="SIZE",
        help="memory for experts beside a GPU (default: all)",
    )
    model = parser.add_argument_group("model (default: recognised by the trace's name)")
    model.add_argument("--model", type=Path, metavar="GGUF", help="take sizes from this file's headers")
    model.add_argument(
        "--bits", type=command.number(0.1, 64), default=sim_models.DEFAULT_BITS, help="bits per weight"
    )
    model.add_argument("--slab", type=command.size, metavar="SIZE", help="bytes of one expert")
    model.add_argument(
        "--other", type=command.size, default=0, metavar="SIZE", help="with --slab: other weights"
    )
    play = parser.add_argument_group("how the trace is played")
    play.add_argument("--batch", type=command.count, default=1, help="tokens per step (default 1)")
    play.add_argument("--prefill", type=int, default=0, help="first tokens that are one prompt; -1: all")
    play.add_argument("--draft", type=int, default=0, help="drafted tokens per step, for every strategy")
    play.add_argument(
        "--acceptance", type=command.number(0, 1), default=0.75, help="chance that a drafted token is right"
    )
    play.add_argument(
        "--predictor",
        default="",
        help="none, recorded (in the trace), history, replay; default: the recall that each has published",
    )
    play.add_argument(
        "--recall",
        nargs="*",
        type=command.number(0, 1),
        default=[],
        help="of the predictions, by layers ahead",
    )
    play.add_argument("--cold", action="store_true", help="empty the pools between sequences")
    play.add_argument(
        "--warm", action="store_true", help="start the pools as the static ones: with the trace's most used"
    )
    play.add_argument(
        "--sequences", type=command.integer(0), default=20, help="at most so many of the trace; 0: all"
    )
    play.add_argument(
        "--tokens", type=command.integer(0), default=256, help="at most so many of each; 0: all"
    )
    add("--plot", type=Path, metavar="FILE", help="draw TPOT against slots (.svg, .png, .pdf)")
    add("--json", action="store_true", help="print one JSON object")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    args = parser.parse_args(argv)
    if min(args.slots) <= 0:
        parser.error("--slots must be above 0")
    known = sim.strategies()
    if args.strategy == ["all"]:
        args.strategy = list(known)
    for name in args.strategy:
        if name not in known:
            parser.error(f"no strategy is called {name}; there are {', '.join(known)}")
    return args


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        files.check_output(args.plot, args.trace, args.model)  # what would fail, before the work
        figure = _pyplot().figure()
        kinds = figure.canvas.get_supported_filetypes()
        _pyplot().close(figure)
        if args.plot.suffix[1:] not in kinds:
            raise command.UsageError(f"--plot {args.plot}: give a name that ends in one of {' '.join(kinds)}")
    routing = trace.load(args.trace, router_inputs=False)
    machine = hardware.load(args.hardware)
    shape = _shape(args, routing)
    use_device = machine.has_device and not args.no_device
    memory_slots = 0
    if args.ram and use_device:
        memory_slots = int(args.ram // max(shape.slab_bytes))
        memory_slots = 0 if memory_slots >= shape.experts_total else max(memory_slots, shape.top_k)
    options = sim.Options(
        batch=args.batch,
        prefill=args.prefill,
        keep=not args.cold,
        warm=args.warm,
        draft=args.draft,
        acceptance=args.acceptance,
        predictor=args.predictor,
        recall=tuple(args.recall),
    )
    with contextlib.closing(ProgressBar("simulating", quiet=not sys.stderr.isatty())) as bar:
        runs = sim.sweep(
            routing,
            machine,
            shape,
            args.strategy,
            [percent / 100 for percent in args.slots],
            memory_slots=memory_slots,
            use_device=use_device,
            options=options,
            sequences=args.sequences,
            tokens=args.tokens,
            progress=bar,
        )
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    resident = sim.resident_tpot(machine.machine(use_device=use_device, types=shape.types), shape)
    if args.json:
        rows = [one.to_dict() for one in runs]
        print(json.dumps({"config": config, "resident_tpot": resident, "runs": rows}, indent=1))
    else:
        _print(args, machine, shape, runs, resident, use_device)
    if args.plot is not None:
        draw(runs, args.plot, f"{args.trace.stem} on {machine.name}", resident)
    return 0


def _shape(args: argparse.Namespace, routing: trace.Trace) -> sim_models.Shape:
    if args.model is not None:
        shape = sim_models.of_gguf(args.model)
        sim_models.check(shape, routing, str(args.trace))
        return replace(shape, top_k=routing.top_k)
    if args.slab is not None:
        layers, _, top_k = routing.ids.shape
        sizes = (float(args.slab),) * layers
        return sim_models.Shape(args.trace.stem, sizes, float(args.other), routing.n_expert, top_k)
    return sim_models.of_trace(routing, args.trace.stem, args.bits)


def _print(
    args: argparse.Namespace,
    machine: hardware.Hardware,
    shape: sim_models.Shape,
    runs: Sequence[sim.Run],
    resident: float,
    use_device: bool,
) -> None:
    pool = "VRAM" if use_device else "RAM"
    print(
        f"{args.trace.stem}: {shape.layers} layers x {shape.n_experts} experts, top-{shape.top_k}, "
        f"{shape.slab_bytes[0] / 2**20:.2f} MiB each; {machine.name} ({machine.note}); pool in {pool}, "
        f"everything in it: {resident * 1e3:.2f} ms/token"
    )
    head = f"{'strategy':20}{'slots':>6}{'ms/token':>10}{'tokens/s':>10}{'hit':>7}{'late':>7}{'miss':>7}"
    print(f"{head}{'fetched':>9}{'host':>7}{'ahead':>7}{'used':>7}{'MB/token':>10}{'link':>7}{'J/token':>9}")
    for one in runs:
        print(
            f"{one.strategy:20}{one.share:6.0%}{one.tpot * 1e3:10.2f}{1 / one.tpot if one.tpot else 0:10.1f}"
            f"{one.hit_rate:7.3f}{one.late_rate:7.3f}{one.miss_rate:7.3f}{one.fetch_rate:9.3f}"
            f"{one.host_rate:7.3f}{one.ahead_per_token:7.1f}{one.ahead_used:7.2f}"
            f"{one.link_bytes_per_token / 1e6:10.1f}{one.link_busy:7.2f}"
            f"{'-' if one.joules_per_token is None else format(one.joules_per_token, '.3g'):>9}"
        )


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SpiceUnsupportedError('--plot needs matplotlib: pip install "spice-moe[plots]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(runs: Sequence[sim.Run], path: Path, title: str, resident: float) -> None:
    """TPOT against the pool's size, a line per strategy; Belady's bounds dashed, all in the pool dotted."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    for name in dict.fromkeys(one.strategy for one in runs):
        mine = [one for one in runs if one.strategy == name]
        style = "--" if name.startswith("belady") else "-"
        width = 2.5 if name == "spice" else 1.0
        shares = [100 * one.share for one in mine]
        axes.plot(shares, [1e3 * one.tpot for one in mine], style, label=name, linewidth=width, marker=".")
    axes.axhline(1e3 * resident, color="black", linestyle=":", linewidth=0.8, label="all in the pool")
    axes.set(xlabel="slots, % of the experts", ylabel="ms per token", title=title, ylim=(0, None))
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
