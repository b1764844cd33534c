"""Routing statistics of a model or trace, beside those of real models: `python models/routing_stats.py FILE`.

A model (.gguf) is run on --text first. The targets are published figures, or, where the traces in
../shared/traces exist, those of the real trace by the same functions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a script: make `models` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spice_moe import trace
from spice_moe.errors import SpiceError

from models import routing
from models.routing import TARGETS, Statistics

_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
_FILES = {
    "deepseek-v2-lite": "deepseek-v2-lite.npz",
    "olmoe-1b-7b": "olmoe-1b-7b.npz",
    "qwen3-30b-a3b": "qwen3-30b-a3b.phase1.npz",
    "gpt-oss-120b": "gpt-oss-120b.phase1.npz",
}
# What sections of the real traces the published figures are of: sequences, their least and their used length.
_SEQUENCES, _LEAST, _FIRST = 60, 128, 256


def of_trace(t: trace.Trace, *, top: int = 0, optional: bool = True) -> Statistics:
    """All statistics of a trace. top: only each token's best experts (0: all), as for a smaller forced k."""
    ids = t.ids[:, :, :top] if top else t.ids
    return routing.statistics(
        ids,
        [int(n) for n in t.lens],
        t.n_expert,
        inputs=t.router_inputs,
        routers=t.routers,
        bias=t.router_bias,
        selection_bias=t.selection_bias,
        optional=optional,
    )


def target(name: str, folder: Path | None = None) -> Statistics:
    """The real model's figures: of its trace in `folder` if it is there, completed by the published ones."""
    published = TARGETS[name]
    path = (folder or _TRACES) / _FILES.get(name, "-")
    if not path.is_file():
        return published
    t = trace.load(path)
    lens = [int(n) for n in t.lens]
    least = _LEAST if len(lens) > 1 else 0
    ids, lens = routing.cut(t.ids, lens, first=_FIRST if least else lens[0], at_least=least, most=_SEQUENCES)
    return replace(routing.statistics(ids, lens, t.n_expert), recall=published.recall)


def table(measured: Statistics, wanted: Statistics | None) -> str:
    """The figures side by side; those that only the target has are left out."""
    targets = wanted.rows() if wanted is not None else {}
    lines = [f"{'':24s} measured" + ("    target  difference" if wanted else "")]
    for name, value in measured.rows().items():
        line = f"{name:24s} {value:8.3f}"
        if name in targets:
            line += f"  {targets[name]:8.3f}  {value - targets[name]:+10.3f}"
        lines.append(line)
    return "\n".join(lines)


def _guess(path: Path, meta: dict[str, object], n_expert: int, k: int) -> str | None:
    """The target that a file is made like, by its name or, failing that, by its experts."""
    text = f"{path.name} {meta.get('model', '')}".lower()
    for name in sorted(TARGETS, key=len, reverse=True):
        if name in text:
            return name
    same = [n for n, s in TARGETS.items() if (s.n_expert, s.k) == (n_expert, k)]
    return same[0] if len(same) == 1 else None


def _load(args: argparse.Namespace) -> trace.Trace:
    if args.file.suffix == ".npz":
        return trace.load(args.file)
    if args.text is None:
        raise ValueError("a model needs a text to run on: --text FILE")
    with tempfile.TemporaryDirectory(prefix="spice-stats-") as folder:
        path = Path(folder) / "t.npz"
        texts = [p.read_text(encoding="utf-8", errors="replace") for p in args.text]
        trace.record(
            args.file,
            texts,
            path,
            router_inputs=not args.ids_only,
            tokens=args.tokens,
            sequence=args.sequence,
            threads=args.threads,
            show_load=True,
        )
        return trace.load(path)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("file", type=Path, metavar="MODEL_OR_TRACE", help="a .gguf model or an .npz trace")
    p.add_argument("--text", type=Path, action="append", help="text that a model is run on; may be repeated")
    p.add_argument("--tokens", type=int, default=4096, help="of the text, in all (default 4096)")
    p.add_argument("--sequence", type=int, default=256, help="tokens of a sequence (default 256)")
    p.add_argument("--threads", type=int, default=0, help="default: all cores")
    p.add_argument("--ids-only", action="store_true", help="no recall from router inputs (less memory)")
    p.add_argument("--top", type=int, default=0, help="only each token's best N experts")
    p.add_argument("--target", choices=[*sorted(TARGETS), "none"], help="default: by name or by experts")
    p.add_argument("--json", action="store_true", help="print JSON")
    args = p.parse_args(argv)
    try:
        t = _load(args)
        if args.top > t.top_k:
            raise ValueError(f"the trace has {t.top_k} experts per token, not {args.top}")
        name = args.target or _guess(args.file, t.meta, t.n_expert, args.top or t.top_k)
        measured = of_trace(t, top=args.top)
        wanted = target(name) if name and name != "none" else None
    except (SpiceError, ValueError, OSError) as error:
        print(f"routing_stats: {error}", file=sys.stderr)
        return 1
    if args.json:
        figures = {"measured": measured.rows(), "target": wanted.rows() if wanted else None}
        print(json.dumps({"file": str(args.file), "target_name": name, **figures}))
        return 0
    layers = f"{t.ids.shape[0]} layers, {t.ids.shape[1]} tokens, {len(t.lens)} sequences"
    print(f"{args.file}: {layers}, top {measured.k} of {t.n_expert}; target: {name or 'none'}")
    print(table(measured, wanted))
    if t.weights is not None:
        by_rank = np.asarray(t.weights, dtype=np.float64).mean(axis=(0, 1))
        print("mean gate weight by rank " + " ".join(f"{w:.3f}" for w in by_rank))
    return 0


if __name__ == "__main__":
    sys.exit(main())
