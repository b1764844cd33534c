"""``spice-fit``: learn from a text to predict a model's experts, and to stand in for them, into a sidecar."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, command, files, fit, fit_recall
from .loading import ProgressBar
from .plan import format_bytes

_EPILOG = """\
examples:
  spice-fit model.gguf --text book.txt
  spice-fit model.gguf --text chat.txt --text code.txt -o model.spice.gguf --tokens 50000
  spice-fit model.gguf --text book.txt --memory 1GiB --ram 4GiB --json
  spice-fit model.gguf --text book.txt --lore 32     # stand-ins for experts, too (docs/lore.md)

Give text like what the model will be used for; 20,000 tokens or more, of which four fifths are fitted and a
fifth is held out. Markers of the chat template in the text count as what they are. The sidecar works with
this very model file only. Exit codes are those of spice-run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = _parse(argv)
    return command.run(
        "spice-fit",
        lambda: _run(args),
        json_errors=args.json,
        verbose=args.verbose,
        interrupted="interrupted; nothing was written",
    )


def _run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    with contextlib.closing(ProgressBar("fitting", quiet=not sys.stderr.isatty())) as bar:
        report = _fit(args, bar)
    report["seconds"] = time.monotonic() - started
    print(json.dumps(report) if args.json else describe(report))
    return command.OK


def describe(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [
        f"{report['file']}: {format_bytes(report['bytes'])}, fitted on {report['fit_tokens']} tokens "
        f"in {report['seconds']:.0f} s"
    ]
    if report["possible"]:
        lines += _recall(report)
    if "lore" in report:
        lines += _lore(report["lore"])
    return "\n".join(lines)


def _recall(report: dict[str, Any]) -> list[str]:
    lines = [
        f"recall of the top {report['top_k']} on {report['report_tokens']} tokens that were not fitted:",
        "  layers ahead   training-free   adapter     draft",
    ]
    table = report["recall"]
    for horizon in range(report["horizons"]):
        row = [table[kind][horizon] for kind in ("training-free", *fit_recall.KINDS)]
        if row[0] is not None:
            cells = [f"{'-' if value is None else format(value, '.3f'):>9}" for value in row]
            lines.append(f"  {horizon + 1:>12}   {cells[0]:>13} {cells[1]} {cells[2]}")
    if report["reason"]:
        lines.append(f"layers without a head: {report['reason']}")
    return lines


def _lore(lore: dict[str, Any]) -> list[str]:
    lines = [
        f"stand-ins of size {lore['rank']}: {format_bytes(lore['bytes'])}, {lore['share']:.1%} of the experts"
        ". Squared error on",
        "tokens that were not fitted; at the right of the block's output, when all but each token's first",
        "expert are dropped, replaced by their mean, by stand-ins (and expected):",
        "  layer  neurons + rank  stand-in  mean alone      drop    mean  stand-in",
    ]
    for row in lore["layers"]:
        block = row["block"]
        lines.append(
            f"  {row['layer']:>5}  {row['neurons']:>7} + {row['rank']:<4}  {row['error']:>8.3f}  "
            f"{row['base_error']:>10.3f}  {block['drop']:>8.4f}{block['base']:>8.4f}  {block['lore']:>8.4f} "
            f"({row['estimated']:.4f})"
        )
    return lines


def _fit(args: argparse.Namespace, bar: ProgressBar) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for path in args.text:
        name = path.name
        while name in texts:
            name += "'"
        texts[name] = path.read_text(encoding="utf-8", errors="replace")
    if args.output is not None:
        files.check_output(args.output, args.model, *args.text)
    options = fit.FitOptions(
        horizons=args.horizons,
        chunk=args.chunk,
        tokens=args.tokens,
        memory=args.memory,
        expert_used=args.experts_used,
        n_threads=args.threads,
        ram_budget=args.ram,
        heads=not args.no_heads,
        lore=args.lore,
    )
    return fit.fit(args.model, texts, args.output, options, progress=bar)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spice-fit",
        description="Learn from a text which experts a MoE model will choose, into MODEL.spice.gguf.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="the model, a .gguf file")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, action="append", required=True,
        help="a UTF-8 text; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="the file to write (default: MODEL.spice.gguf)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=command.count, default=0, help="use N tokens of the text"
    )
    parser.add_argument(
        "--lore", metavar="SIZE", type=command.count, default=0,
        help="fit stand-ins for experts, too; SIZE N, 8 to 64, is the bytes of rank N in F16 (32: about 4 %% "
        "of large experts)",
    )  # fmt: skip
    parser.add_argument("--no-heads", action="store_true", help="no prediction, stand-ins alone")
    parser.add_argument(
        "--horizons", metavar="N", type=command.count, default=6, help="MoE layers to look ahead (default 6)"
    )
    parser.add_argument(
        "--chunk", metavar="N", type=command.count, default=256,
        help="evaluate the text in sequences of N tokens, each from an empty context (default 256)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", type=command.size, default=2 << 30,
        help="for the sums; layers that do not fit are fitted in further passes over the text (default 2GiB)",
    )  # fmt: skip
    parser.add_argument("--ram", metavar="SIZE", default="auto", help="for experts, as in spice-run")
    parser.add_argument(
        "--experts-used", metavar="K", type=command.count, default=0,
        help="experts per token (default: the model's own number); use the same when running",
    )  # fmt: skip
    parser.add_argument("--threads", metavar="N", type=command.count, default=0, help="default: all cores")
    parser.add_argument("--json", action="store_true", help="print a JSON report on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
