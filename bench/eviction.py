"""Eviction strategies on recorded routing: `python bench/eviction.py [TRACES...]`.

For each trace (format: docs/trace-format.md) and pool size, the hit rate of every strategy beside Belady's
optimum for one pool over all layers and for a pool split equally, what each misses relative to the global
optimum, and the processor time per layer call (bookkeeping of the replay included). One pool serves all
layers; its size is a share of all experts, but at least one token's top-k. Without TRACES: all in
../shared/traces, if that exists.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from spice_moe import trace
from spice_moe._core import policy
from worker import run_main

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
BELADY = {"belady": False, "belady/layer": True}  # name: per layer


@dataclass
class Row:
    name: str
    hit_rates: list[float] = field(default_factory=list)
    prefill_hit_rates: list[float] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    ns_per_call: list[float] = field(default_factory=list)
    relative_misses: list[float] = field(default_factory=list)  # to Belady's, global


def cut(t: trace.Trace, sequences: int, tokens: int) -> dict[str, Any]:
    """The first tokens of some sequences, spread evenly, as arguments of ``policy.replay``."""
    ends = np.cumsum(t.lens)
    n = len(t.lens) if sequences == 0 else min(sequences, len(t.lens))
    chosen = sorted({i * len(t.lens) // n for i in range(n)}) if n else []
    lens = [min(int(t.lens[i]), tokens or int(t.lens[i])) for i in chosen]
    spans = [
        np.arange(ends[i] - t.lens[i], ends[i] - t.lens[i] + m) for i, m in zip(chosen, lens, strict=True)
    ]
    which = np.concatenate(spans) if spans else np.arange(0)
    return {"ids": t.ids[:, which], "lens": lens, "n_experts": int(t.n_expert)}


def measure(name: str, args: dict[str, Any]) -> tuple[dict[str, Any], float]:
    start = time.process_time()
    if name in BELADY:
        result = policy.belady(**args, per_layer=BELADY[name])
    else:
        result = policy.replay(strategy=name, **args)
    return result, (time.process_time() - start) / max(result["calls"], 1) * 1e9


def compare(t: trace.Trace, options: argparse.Namespace) -> dict[str, Any]:
    args = cut(t, options.sequences, options.tokens)
    n_layers, n_tokens, top_k = args["ids"].shape
    total = n_layers * args["n_experts"]
    slots = [max(top_k, round(total * percent / 100)) for percent in options.slots]
    args |= {k: getattr(options, k) for k in ("batch", "prefill", "wave", "keep")}
    rows = [Row(name) for name in [*BELADY, *policy.eviction_names()]]
    for row in rows:
        for i, n_slots in enumerate(slots):
            result, ns = measure(row.name, args | {"n_slots": n_slots})
            prefill = result["prefill_hits"] + result["prefill_misses"]
            row.hit_rates.append(result["hits"] / max(result["hits"] + result["misses"], 1))
            row.prefill_hit_rates.append(result["prefill_hits"] / max(prefill, 1))
            row.misses.append(result["misses"] + result["prefill_misses"])
            row.ns_per_call.append(ns)
            row.relative_misses.append(row.misses[i] / max(rows[0].misses[i], 1))
    return {
        "layers": n_layers,
        "experts": args["n_experts"],
        "top_k": top_k,
        "tokens": n_tokens,
        "sequences": len(args["lens"]),
        "slots": slots,
        "rows": [vars(row) for row in rows],
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else 0.0


def print_table(name: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        f"\n{name}: {result['layers']} layers, {result['experts']} experts, top-{result['top_k']}, "
        f"{result['tokens']} tokens in {result['sequences']} sequences; "
        f"one token's working set is {result['top_k'] / result['experts']:.1%} of the experts"
    )
    columns = "".join(f"{percent:>7g}%" for percent in options.slots)
    print(f"{'hit rate, pool of':18}{columns}   misses/Belady's   us/call")
    for row in result["rows"]:
        rates = "".join(f"{rate:8.3f}" for rate in row["hit_rates"])
        ns = row["ns_per_call"]
        low, high = min(ns) / 1e3, max(ns) / 1e3
        mean = geometric_mean(row["relative_misses"])
        print(f"{row['name']:18}{rates}{mean:18.3f}   {low:.1f}-{high:.1f}")
        if options.prefill:
            print(f"{'  its prefill':18}" + "".join(f"{rate:8.3f}" for rate in row["prefill_hit_rates"]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("traces", nargs="*", type=Path, help="routing traces (.npz)")
    add(
        "--slots",
        nargs="+",
        type=float,
        default=[5, 10, 20, 30, 50, 70],
        help="pool sizes, %% of the experts",
    )
    add("--batch", type=int, default=1, help="tokens of a sequence per call")
    add("--prefill", type=int, default=0, help="tokens at the start of a sequence that are one call; -1: all")
    add("--wave", type=int, default=0, help="slots that one call may pin; 0: all")
    add("--keep", action="store_true", help="keep the pool and what was learned from sequence to sequence")
    add("--sequences", type=int, default=40, help="at most that many sequences of a trace; 0: all")
    add("--tokens", type=int, default=256, help="at most that many tokens of a sequence; 0: all")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if not options.traces:
        options.traces = sorted(SHARED.glob("*.npz"))
        if not options.traces:
            parser.error(f"no traces given, and none in {SHARED}")
    if min(options.slots) <= 0 or min(options.sequences, options.tokens) < 0:
        parser.error("--slots must be above 0, --sequences and --tokens 0 or more")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    config = {key: value for key, value in vars(options).items() if key not in ("traces", "json")}
    config["traces"] = [str(path) for path in options.traces]
    if not options.json:
        print(json.dumps(config))
    results = {}
    for path in options.traces:
        result = compare(trace.load(path, router_inputs=False), options)
        results[path.stem] = result
        if not options.json:
            print_table(path.stem, result, options)
    if options.json:
        print(json.dumps({"config": config, "traces": results}, indent=1))
    elif len(results) > 1:
        print("\nmisses relative to Belady's, geometric mean of all traces and pool sizes")
        for i, name in enumerate([*BELADY, *policy.eviction_names()]):
            ratios = [x for r in results.values() for x in r["rows"][i]["relative_misses"]]
            print(f"{name:18}{geometric_mean(ratios):8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
