"""The `--like` part of `python models/synth.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from models.planted.real import REAL
from models.planted.write import make_like, parse_size

_RENAMED = {"expert_type": "file_type"}
_TAKEN = {"layers", "size", "file_type", "seed", "split", "embd", "ff", "tokens_from", "thin", "progress"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `--like`; it shares --layers, --seed, --split, --embd, --ff, --type and -v."""
    group = parser.add_argument_group("models with planted routing")
    group.add_argument(
        "--like", choices=sorted(REAL), metavar="NAME",
        help=f"a real model's shape and routing statistics: {', '.join(sorted(REAL))}; "
        "here --type is a tensor type, Q4_K_M, Q5_K_M or MXFP4",
    )  # fmt: skip
    group.add_argument("--size", type=parse_size, help="as many layers as fit, for instance 10G")
    group.add_argument(
        "--thin", action="store_true", help="the routed experts with next to nothing around them (benchmarks)"
    )
    group.add_argument("--tokens-from", type=Path, metavar="GGUF", help="copy that file's tokenizer")


def make(name: str, path: Path, options: dict[str, object]) -> Path:
    """Write the model that the command line asks for. Raises ValueError for options that do not apply."""
    options = {_RENAMED.get(key, key): value for key, value in options.items()}
    strange = sorted(set(options) - _TAKEN)
    if strange:
        raise ValueError(f"--like has no option --{strange[0].replace('_', '-')}")
    return make_like(name, path, **options)  # type: ignore[arg-type]
