"""The curves of bench/quality.py as a picture; needs the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], path: Path) -> None:
    """KL and top-1 agreement over the share of misses replaced, a curve for each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    kinds = dict.fromkeys(row["kind"] for row in result["rows"] if row["kind"] != "exact")
    for kind in kinds:
        rows = [row for row in result["rows"] if row["kind"] == kind]
        shares = [100 * row["share"] for row in rows]
        left.plot(shares, [row["all"]["kl"] for row in rows], marker="o", label=kind)
        right.plot(shares, [100 * row["all"]["top1"] for row in rows], marker="o", label=kind)
    left.set(ylabel="KL to the exact model, nats per token", yscale="log")
    right.set(ylabel="the same next token, %")
    for axes in (left, right):
        axes.set(xlabel="share of the experts after each token's first that are replaced, %")
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(Path(result["config"]["model"]).name)
    figure.savefig(path, dpi=110)
