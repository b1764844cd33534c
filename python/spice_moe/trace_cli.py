"""``spice-trace``: record which experts a model uses for a text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, command, files, trace
from .loading import ProgressBar

_EPILOG = """\
examples:
  spice-trace model.gguf -f book.txt -o book.npz --tokens 2000
  spice-trace model.gguf -f a.txt -f b.txt -o t.npz --router-inputs --decode --json
  spice-trace model.gguf -f book.txt -o book.npz --predictions ensemble     for spice-sim --predictor recorded

The text is evaluated by stock llama.cpp, slowly, because every layer is watched. The format is in
docs/trace-format.md; spice_moe.trace.load() reads it. Exit codes are those of spice-run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: ``sys.argv[1:]``) and return its exit code; see ``--help``."""
    args = _parse(argv)
    return command.run("spice-trace", lambda: _run(args), json_errors=args.json, verbose=args.verbose)


def _run(args: argparse.Namespace) -> int:
    summary = _record(args)
    if args.json:
        print(json.dumps(summary))
    else:
        command.say(
            "spice-trace",
            f"{args.output}: {summary['tokens']} tokens, {summary['layers']} layers, "
            f"top {summary['top_k']} of {summary['n_expert']} experts, "
            f"{summary['tokens_per_s']:.1f} tokens/s",
        )
    return command.OK


def _record(args: argparse.Namespace) -> dict[str, Any]:
    files.check_output(args.output, args.model, args.sidecar, *args.file)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in args.file]
    terminal = sys.stderr.isatty()
    bar = ProgressBar("tracing", quiet=not terminal)
    started = time.monotonic()
    try:
        summary = trace.record(
            args.model,
            texts,
            args.output,
            router_inputs=args.router_inputs,
            tokens=args.tokens,
            sequence=args.sequence,
            decode=args.decode,
            batch=args.batch,
            threads=args.threads,
            predictions=args.predictions,
            sidecar=args.sidecar,
            progress=bar,
            show_load=terminal,
        )
    finally:
        bar.close()
    seconds = time.monotonic() - started
    return {
        "file": str(args.output),
        "bytes": args.output.stat().st_size,
        **summary,
        "seconds": seconds,
        "tokens_per_s": summary["tokens"] / seconds,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spice-trace",
        description="Record the experts and gate weights that a MoE model uses for each token of a text.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="the model, a .gguf file")
    parser.add_argument(
        "-f", "--file", metavar="TEXT", type=Path, action="append", required=True,
        help="a UTF-8 text; may be given several times",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="T.npz", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--router-inputs", action="store_true", help="write what the routers read, too (large)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=command.count, default=0, help="stop after N tokens in all"
    )
    parser.add_argument(
        "--sequence", metavar="N", type=command.count, default=512,
        help="cut the text into sequences of N tokens, each from an empty context (default 512)",
    )  # fmt: skip
    parser.add_argument(
        "--decode", action="store_true", help="evaluate one token at a time, as when generating"
    )
    parser.add_argument(
        "--batch", metavar="N", type=command.count, default=64, help="tokens at a time otherwise (default 64)"
    )
    parser.add_argument(
        "--predictions", metavar="NAME",
        help="write what this predictor expects of each layer call, too: ensemble, router, history, ...",
    )  # fmt: skip
    parser.add_argument(
        "--sidecar", metavar="FILE", help="with --predictions: what spice-fit made for the model"
    )
    parser.add_argument("--threads", metavar="N", type=command.count, default=0, help="default: all cores")
    parser.add_argument("--json", action="store_true", help="print a JSON summary on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
