"""Make the shipped model: `train_tiny.py --work DIR train --until HH:MM`, then `export`, then `check`.

Training goes on from DIR/model.pt if it is there, so it may be stopped and started at will.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `models` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.tiny import data, evaluate, export, train
from models.tiny.config import Config
from models.tiny.tokens import Tokens


def _tokens(work: Path, corpus: data.Corpus, config: Config) -> Tokens:
    path = work / "tokenizer.json"
    if not path.exists():
        Tokens.train(data.sample_texts(corpus), config.vocab).save(path)
    return Tokens.load(path)


def _train(args: argparse.Namespace) -> int:
    config = Config()
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = data.Corpus(args.texts or args.work / "texts")
    stream = data.Stream(corpus, _tokens(args.work, corpus, config))
    plan = train.Plan(
        until=train.clock(args.until), decay=60 * args.decay_minutes, rows=args.rows, time=args.time
    )
    train.run(args.work, config, stream, plan)
    return 0


def _export(args: argparse.Namespace) -> int:
    model = train.load_model(args.work / "model.pt")
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    tokens = Tokens.load(args.work / "tokenizer.json")
    exact = export.write_f32(args.work / "spice-tiny-f32.gguf", model.c, weights, tokens)
    small = export.quantize_q5_k_m(exact, args.output or args.work / "spice-tiny.gguf", args.threads)
    print(small, small.stat().st_size)
    return 0


def _check(args: argparse.Namespace) -> int:
    model = train.load_model(args.work / "model.pt")
    tokens = Tokens.load(args.work / "tokenizer.json")
    corpus = data.Corpus(args.texts or args.work / "texts")
    report = evaluate.report(
        model,
        tokens,
        corpus,
        exact=args.work / "spice-tiny-f32.gguf",
        small=args.gguf or args.work / "spice-tiny.gguf",
        rows=args.rows,
        questions=args.questions,
    )
    text = json.dumps(report, indent=1)
    (args.work / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", type=Path, required=True, help="folder of the checkpoint, tokenizer and exports")
    p.add_argument("--texts", type=Path, help="folder of the downloaded packages (default WORK/texts)")
    p.add_argument("--threads", type=int, default=2, help="PyTorch threads")
    commands = p.add_subparsers(required=True)
    t = commands.add_parser("train", help="train, or go on training, until a time of day")
    t.add_argument("--until", required=True, help="HH:MM at which training ends")
    t.add_argument(
        "--decay-minutes", type=float, default=20, help="the learning rate falls over these last minutes"
    )
    t.add_argument("--rows", type=int, default=4, help="rows per step")
    t.add_argument("--time", type=int, default=512, help="tokens per row")
    t.set_defaults(run=_train)
    e = commands.add_parser("export", help="write the checkpoint as GGUF: F32 and Q5_K_M")
    e.add_argument("-o", "--output", type=Path, help="the Q5_K_M file (default WORK/spice-tiny.gguf)")
    e.set_defaults(run=_export)
    c = commands.add_parser(
        "check", help="measure the exported files; the figures also go to WORK/report.json"
    )
    c.add_argument("--gguf", type=Path, help="the Q5_K_M file (default WORK/spice-tiny.gguf)")
    c.add_argument("--rows", type=int, default=12, help="held-out rows of 512 tokens per kind of text")
    c.add_argument("--questions", type=int, default=25, help="questions per task kind")
    c.set_defaults(run=_check)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
