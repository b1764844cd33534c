"""How well the experts of the next MoE layers are predicted: `python bench/prediction.py MODEL --text FILE`.

Runs the text through the model in SPICE, one sequence after the other, then asks every predictor, offline
and by the same C++ classes that run with the model, for the experts of the layers 1 to 6 ahead: recall of the
true top-k in the predicted top-k. Heads (training-free, adapter, draft) are judged by their scores alone; the
predictors of policy/ (ensemble, history, ...) see the calls of one token after another, as in decoding, and
learn as they go; their first --skip tokens do not count. --like NAME prints what a planted model's plan says.
The text must not be one that the sidecar was fitted on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from spice_moe import _core, capture, fit, fit_recall, fit_stats
from spice_moe.predictions import HORIZONS, Forecaster, has_fitted
from worker import run_main


def askable(name: str, heads: Any) -> bool:
    """Whether the predictor has the heads that it needs."""
    return name not in fit_recall.KINDS or has_fitted(heads, name)


class Bench:
    """One model's heads, and the recall of all predictors so far."""

    def __init__(self, heads: Any, names: list[str], skip: int) -> None:
        self.heads, self.skip = heads, skip
        self.chooser = fit_recall.Chooser(heads)
        groups = range(len(heads.layers))
        self.routers = {g: fit_stats.Router.read(heads, g) for g in groups if heads.has_router(g)}
        self.recall = fit_recall.Recall()
        self.seconds: dict[str, float] = {}
        self.asked: dict[str, int] = {}
        self.predictors = {name: Forecaster(heads, name) for name in names if askable(name, heads)}

    def add(self, chunk: capture.Chunk) -> None:
        """Judge one sequence."""
        for group in self.routers:
            for horizon in range(1, HORIZONS + 1):
                if group + horizon in self.routers:
                    fit_recall.count(
                        self.recall, self.heads, self.routers, self.chooser, chunk, group, horizon
                    )
        k, layers = self.chooser.top_k, self.heads.layers
        for name, forecaster in self.predictors.items():
            started = time.perf_counter()
            said = forecaster.play(chunk, k, wrap=False)
            if said is None:
                return  # a layer with two banks, or one that llama.cpp leaves out
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.asked[name] = self.asked.get(name, 0) + chunk.tokens * len(layers)
            late = slice(min(self.skip, chunk.tokens), None)
            label = f"{name} ({forecaster.kind} scores)" if forecaster.kind else f"{name} (ids only)"
            for group in range(len(layers)):
                for horizon in range(1, min(HORIZONS, len(layers) - 1 - group) + 1):
                    target = layers[group + horizon]
                    predicted = said.ids[group, late, horizon - 1]
                    self.recall.add(label, horizon, target, predicted, chunk.ids[target][late])

    def result(self) -> dict[str, Any]:
        """Recall by predictor: per horizon, and per layer of the target and horizon."""
        names = sorted({key[0] for key in self.recall.total}, key=lambda name: ("(" in name, name))
        layers = self.heads.layers
        return {
            "layers": layers,
            "horizons": self.recall.table(names, HORIZONS),
            "by_layer": {
                name: {
                    str(layer): [self.recall.of(name, h, layer) for h in range(1, HORIZONS + 1)]
                    for layer in layers
                }
                for name in names
            },
            "python_us_per_layer_call": {
                name: 1e6 * self.seconds[name] / self.asked[name] for name in self.seconds
            },
        }


def plan_of(name: str) -> list[float | None]:
    """What the plan of a planted model says about training-free recall, per horizon."""
    from models.planted.real import REAL
    from models.routing import TARGETS

    target = TARGETS.get(REAL[name].target)
    return [target.recall.get(h) if target else None for h in range(1, HORIZONS + 1)]


def run(options: argparse.Namespace) -> dict[str, Any]:
    heads = _core.heads.Heads(
        str(options.model),
        sidecar=str(options.sidecar or ""),
        expert_used=options.experts_used,
        max_horizon=HORIZONS,
    )
    bench = Bench(heads, options.predictors, options.skip)
    used = fit.FitOptions(
        chunk=options.chunk,
        expert_used=options.experts_used,
        n_threads=options.threads,
        ram_budget=options.ram,
    )
    with contextlib.closing(fit.open_model(options.model, used)) as llm:
        ids: list[int] = []
        for path in options.text:
            ids += capture.tokenize(llm, path.read_text(encoding="utf-8", errors="replace"))
        pieces = capture.cut(llm, ids[: options.tokens or None], options.chunk)
        with contextlib.closing(capture.run(llm, [p for p in pieces if len(p) > 1])) as chunks:
            for chunk in chunks:
                bench.add(chunk)
    return {
        "config": {
            "model": str(options.model),
            "sidecar": str(options.sidecar or ""),
            "texts": [str(path) for path in options.text],
            "tokens": sum(map(len, pieces)),
            "chunk": options.chunk,
            "skip": options.skip,
            "top_k": bench.chooser.top_k,
            "experts": max(heads.n_expert),
            "gating": heads.gating,
            "predictors": options.predictors,
            "head_bytes": heads.bytes,
            "layers_without_head": heads.reason,
        },
        **bench.result(),
        **({"plan": plan_of(options.like)} if options.like else {}),
    }


def print_table(result: dict[str, Any], by_layer: bool) -> None:
    def row(values: list[float | None]) -> str:
        return "".join(f"{'-' if v is None else format(v, '.3f'):>8}" for v in values)

    print(json.dumps(result["config"]))
    print(f"{'recall, layers ahead':28}" + "".join(f"{h:>8}" for h in range(1, HORIZONS + 1)))
    for name, values in result["horizons"].items():
        print(f"{name:28}{row(values)}")
        if by_layer:
            for layer, numbers in result["by_layer"][name].items():
                print(f"{'  of layer ' + layer:28}{row(numbers)}")
    if "plan" in result:
        print(f"{'the plan (training-free)':28}{row(result['plan'])}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a .gguf file")
    add("--text", type=Path, action="append", required=True, help="a UTF-8 text; may be given several times")
    add("--sidecar", type=Path, help="what spice-fit wrote for the model, on another text")
    known = [name for name in _core.policy.predictor_names() if name != "replay"]
    add("--predictors", nargs="+", default=known, choices=known, metavar="NAME", help=", ".join(known))
    add("--tokens", type=int, default=2048, help="of the text; 0: all (default 2048)")
    add("--chunk", type=int, default=512, help="tokens of one sequence (default 512)")
    add("--skip", type=int, default=32, help="tokens of a sequence that predictors only learn from")
    add("--experts-used", type=int, default=0, help="experts per token; 0: the model's own number")
    add("--threads", type=int, default=0, help="0: all cores")
    add("--ram", default="auto", help="memory for experts, as in spice-run; changes no result")
    add("--like", help="the planted model's name, to print its plan's recall")
    add("--by-layer", action="store_true", help="print each layer, too")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for models/
    options = parse(argv)
    result = run(options)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result, options.by_layer)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
