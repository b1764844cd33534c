"""Decode speed against what is replaced by low-rank stand-ins (LoRE): `python bench/lore.py MODEL`.

Decodes real text token by token in fresh processes that alternate between: no stand-ins, and stand-ins for
missed experts under thresholds of several widths. A setting is `off`, a SHARE (replace misses whose share of
their token's gate weights is at most this; no budget) or `auto:KL`, as Llama's option `lore` takes it. The
memory is the same in all of them: the stand-ins' own is taken from the experts' pool. Without --sidecar the
stand-ins are random and tiny: good for measuring speed, and for nothing else. bench/quality.py measures what
they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker import run_main, run_worker, serve


def write_random(model: Path, path: Path, rank: int) -> None:
    """A sidecar of stand-ins that are as large as fitted ones of that rank, and tiny in value."""
    import numpy as np
    from gguf import GGUFReader, GGUFWriter
    from spice_moe import _core

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "spice-sidecar", use_temp_file=True)
    writer.add_uint32("spice.version", 1)
    writer.add_string("spice.fingerprint", _core.heads.fingerprint(model))
    writer.add_string("spice.model", model.name)
    integers: dict[tuple[int, ...], Any] = {}
    rows = 2 * rank  # of 8 bits, as spice-fit makes them
    for tensor in GGUFReader(model).tensors:
        if not tensor.name.endswith(".ffn_down_exps.weight"):
            continue
        layer = tensor.name.split(".")[1]
        _, width, n = (int(d) for d in tensor.shape)
        if (n, width) not in integers:
            integers[n, width] = rng.integers(-127, 128, (n, rows, width), dtype=np.int8)
        for name in ("a", "b"):
            writer.add_tensor(f"lore.{layer}.{name}", integers[n, width])
        writer.add_tensor(f"lore.{layer}.scale", np.full((n, rows), 1e-8, np.float32))
        writer.add_tensor(f"lore.{layer}.bias", np.full((n, width), 1e-3, np.float16))
        for name, value, size in (
            ("error", 0.5, n),
            ("norm", 1.0, n),
            ("output", 1.0, 1),
            ("sensitivity", 0.1, 1),
        ):
            writer.add_tensor(f"lore.{layer}.{name}", np.full(size, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own: seconds and counters of the counted tokens."""
    from decoding import PROMPT, decode, read_text
    from spice_moe import Llama

    setting = job["setting"]
    auto = setting.startswith("auto:")
    options: dict[str, Any] = {} if setting == "off" else {"lore": setting if auto else job["sidecar"]}
    if options and auto:
        options["sidecar"] = job["sidecar"]
    elif options:
        options["lore_budget"] = float("inf")
    n_tokens = PROMPT + job["warm"] + job["decode"]
    llm = Llama(
        job["model"], ram_budget=job["ram"], preload=False, prefetch=job["prefetch"], n_ctx=n_tokens,
        n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False, seed=1, **options,
    )  # fmt: skip
    if options and not auto:
        llm.spice._core.use_lore(max_share=float(setting), max_mass=1.0, max_confidence=1.0)
    text = read_text(llm, job["text"], n_tokens)
    seconds, _ = decode(llm, text, job["warm"], job["decode"], start=llm.spice.reset_stats)
    counters = llm.spice.stats()
    plan = counters.pop("plan")
    llm.close()
    return {"seconds": seconds, "counters": counters, "plan": plan}


def describe(setting: str, n_tokens: int, reports: Sequence[dict[str, Any]]) -> str:
    """One line of a setting: medians of speed and waiting over the rounds, counters of the last."""
    seconds = statistics.median(r["seconds"] for r in reports)
    stalled = statistics.median(r["counters"]["stall_seconds"] for r in reports)
    c, layers = reports[-1]["counters"], reports[-1]["plan"]["moe_layers"]
    rows, pairs = max(c["lore_rows"], 1), max(c["lore_pairs"], 1)
    return (
        f"  {setting:9} {n_tokens / seconds:6.2f} tokens/s, waits {1000 * stalled / n_tokens:5.1f} ms/token, "
        f"{c['bytes_read'] / n_tokens / 1e6:6.1f} MB/token read, "
        f"{100 * c['lore_substituted'] / pairs:5.1f} % of experts replaced "
        f"({100 * c['lore_gate_mass'] / rows:4.1f} % of gate mass), "
        f"expected KL {c['lore_kl'] / rows * layers:.2g} nats/token"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--sidecar", type=Path, metavar="FILE", help="default: random stand-ins")
    parser.add_argument("--rank", type=int, default=32, help="of random stand-ins")
    parser.add_argument("--settings", nargs="+", default=["off", "0.1", "0.15", "0.2", "1"])
    parser.add_argument("--ram", default="42%", metavar="SIZE", help="ram_budget")
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--warm", type=int, default=24, metavar="N", help="tokens before the counted ones")
    parser.add_argument("--decode", type=int, default=48, metavar="N", help="counted tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        sidecar = args.sidecar or Path(folder) / "random.gguf"
        if args.sidecar is None:
            write_random(args.model, sidecar, args.rank)
        job = dict(
            model=str(args.model), sidecar=str(sidecar), ram=args.ram, prefetch=not args.no_prefetch,
            text=str(args.text), warm=args.warm, decode=args.decode, threads=args.threads,
        )  # fmt: skip
        results: dict[str, list[dict[str, Any]]] = {setting: [] for setting in args.settings}
        for _ in range(args.rounds):
            for setting in args.settings:
                results[setting].append(run_worker(Path(__file__), {**job, "setting": setting}, setting))
    if args.json:
        print(json.dumps(dict(configuration=job, results=results), indent=2))
        return 0
    stand_ins = args.sidecar.name if args.sidecar else f"random ones of rank {args.rank}"
    print(
        f"{args.model}: ram_budget {args.ram}, stand-ins {stand_ins}, text {args.text.name}, "
        f"{args.warm} + {args.decode} tokens, {args.threads} threads, load average {os.getloadavg()[0]:.1f}"
    )
    for setting, reports in results.items():
        print(describe(setting, args.decode, reports))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(work)
    else:
        sys.exit(run_main(main))
