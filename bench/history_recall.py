"""What routing ids alone predict: `python bench/history_recall.py [TRACES...]`.

For each trace (format: docs/trace-format.md), the recall@k of the predictor `history` at horizons 1..6, one
token per call, beside that of always naming the most used experts, and how well its chances are calibrated:
for each tenth of the chance told, the share that happened. The first eighth of the tokens (at most 500) only
teaches. Without TRACES: all in ../shared/traces, if that exists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from spice_moe import trace
from spice_moe._core import policy
from worker import run_main

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"


def popularity_recall(ids: np.ndarray, skip: int) -> float:
    """Recall of the k experts that each layer used most in the tokens scored. ids: [layers, tokens, k]."""
    scored = ids[:, skip:]
    top = [np.sort(np.bincount(layer.ravel()))[-ids.shape[2] :].sum() / layer.size for layer in scored]
    return float(np.mean(top))


def report(path: Path, tokens: int, horizons: int) -> None:
    t = trace.load(path)
    ids = np.ascontiguousarray(t.ids[:, :tokens] if tokens else t.ids).astype(np.int32)
    n_layers, n_tokens, top_k = ids.shape
    skip = min(n_tokens // 8, 500)
    predictor = policy.Predictor(
        "history", n_groups=n_layers, n_experts=int(t.n_expert), top_k=top_k, max_horizon=horizons
    )
    sums = predictor.replay(ids, skip=skip)
    recall = sums["hits"][1:].sum(1) / np.maximum(sums["asked"][1:].sum(1), 1)
    print(f"{path.stem}: {n_layers} layers, {t.n_expert} experts, top-{top_k}, {n_tokens} tokens")
    print("  recall@k, horizon 1..: " + " ".join(f"{r:.3f}" for r in recall), end="")
    print(f"   (most used: {popularity_recall(ids, skip):.3f})")
    tenths = [sums[name][1].reshape(10, -1).sum(1) for name in ("told", "happened", "number")]
    cells = [f"{a / n:.2f}>{b / n:.2f}" for a, b, n in zip(*tenths, strict=True) if n >= 50]
    print("  told>happened, horizon 1: " + " ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=8000, help="of each trace, 0: all (default: 8000)")
    parser.add_argument("--horizons", type=int, default=6)
    options = parser.parse_args()
    paths = options.traces or sorted(SHARED.glob("*.npz"))
    if not paths:
        print(f"no traces given, and none in {SHARED}", file=sys.stderr)
        return 2
    print(f"tokens {options.tokens or 'all'}, horizons {options.horizons}")
    for path in paths:
        report(path, options.tokens, options.horizons)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
