"""What spice-tiny can do: perplexity and experts in PyTorch, perplexity, logits and tasks in llama.cpp."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from numpy.typing import NDArray

from models.tiny import data, export, stories, tasks
from models.tiny.model import Tiny
from models.tiny.tokens import END_OF_TEXT, Tokens

Row = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Routing:
    """How one layer used its experts: share of choices per expert, mean entropy of the gates in nats."""

    load: NDArray[np.float64]
    gate_entropy: float

    @property
    def load_entropy(self) -> float:
        """Entropy of the load as a share of the greatest possible: 1 if all experts work equally."""
        used = self.load[self.load > 0]
        return float(-(used * np.log(used)).sum() / np.log(len(self.load)))


def held_out(corpus: data.Corpus, tokens: Tokens, kind: str, rows: int = 12, time: int = 512) -> list[Row]:
    """Rows of text that was not trained on: unseen prose, unseen tasks' arguments, newly drawn stories."""
    r = random.Random(f"held out {kind}")
    stock = iter(corpus.held_out_prose * rows)
    out: list[Row] = []
    for _ in range(rows):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < time:
            if kind == data.CHAT:
                text = data.render([tasks.draw(r, held_out=True) for _ in range(4)])
            else:
                text = stories.story(r) if kind == data.STORY else next(stock)
            more = [*tokens.encode(text), END_OF_TEXT]
            counted = data.chat_weights(more) if kind == data.CHAT else [1.0] * len(more)
            ids += more
            weights += [float(w == 1.0) for w in counted]
        out.append((ids[:time], weights[:time]))
    return out


def _surprise(logits: NDArray[np.float32], row: Row) -> tuple[float, float]:
    """Summed negative log-likelihood of a row's counted tokens, and their number."""
    ids, weights = np.array(row[0][1:]), np.array(row[1][1:])
    scores = logits[:-1].astype(np.float64)
    top = scores.max(-1)
    likelihood = scores[np.arange(len(ids)), ids] - top - np.log(np.exp(scores - top[:, None]).sum(-1))
    return float(-(likelihood * weights).sum()), float(weights.sum())


def _perplexity(parts: Iterable[tuple[float, float]]) -> float:
    lost, counted = np.array(list(parts)).sum(0)
    return float(np.exp(lost / counted))


@torch.no_grad()
def torch_logits(model: Tiny, ids: Sequence[int]) -> NDArray[np.float32]:
    return model(torch.tensor([list(ids)]))[0].float().numpy()


def torch_perplexity(model: Tiny, rows: Sequence[Row], *, random_experts: bool = False) -> float:
    """Perplexity of the PyTorch model; random_experts lets random experts answer, with the router's gates."""
    torch.manual_seed(0)
    for layer in model.experts():
        layer.shuffle = random_experts
    try:
        return _perplexity(_surprise(torch_logits(model, row[0]), row) for row in rows)
    finally:
        for layer in model.experts():
            layer.shuffle = False


def routing(model: Tiny, rows: Sequence[Row]) -> list[Routing]:
    """How each MoE layer routes the rows."""
    layers = model.experts()
    loads = np.zeros((len(rows), len(layers), model.c.experts))
    entropies = np.zeros((len(rows), len(layers)))
    for i, (ids, _) in enumerate(rows):
        torch_logits(model, ids)
        loads[i] = torch.stack([e.load for e in layers]).numpy()
        entropies[i] = [e.entropy.item() for e in layers]
    return [Routing(a, float(b)) for a, b in zip(loads.mean(0), entropies.mean(0), strict=True)]


def open_gguf(path: Path, *, all_logits: bool = False, threads: int = 1) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=1024, n_batch=512, logits_all=all_logits, verbose=False, n_threads=threads, seed=0
    )


def gguf_logits(llm: llama_cpp.Llama, ids: Sequence[int]) -> NDArray[np.float32]:
    llm.reset()
    llm.eval(list(ids))
    return np.array(llm.scores[: len(ids)])


def gguf_perplexity(llm: llama_cpp.Llama, rows: Sequence[Row]) -> float:
    """Perplexity in llama.cpp; llm must have been opened with all_logits."""
    return _perplexity(_surprise(gguf_logits(llm, row[0]), row) for row in rows)


def reply(llm: llama_cpp.Llama, question: str, limit: int = 60) -> str:
    """The greedy answer to one question through the chat template."""
    made = llm.create_chat_completion(
        [{"role": "user", "content": question}], temperature=0.0, max_tokens=limit
    )
    return made["choices"][0]["message"]["content"]


def random_router(path: Path, model: Tiny, tokens: Tokens) -> Path:
    """Write the model in F32 with the rows of every router drawn anew at the old scale; return path."""
    torch.manual_seed(0)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        if name.endswith("router"):
            weights[name] = (torch.randn_like(value) * value.std()).numpy()
    return export.write_f32(path, model.c, weights, tokens)


def accuracy(llm: llama_cpp.Llama, count: int = 25) -> dict[str, float]:
    """Share of exactly right answers per task kind, on held-out arguments where the kind has any."""
    out = {}
    for task in tasks.SHARES:
        r = random.Random(f"accuracy {task.__name__}")
        right = 0
        for _ in range(count):
            question, answer = tasks.draw(r, held_out=task in tasks.COMBINATORIAL, task=task)
            right += reply(llm, question) in (tasks.accepted(question) or (answer,))
        out[task.__name__] = right / count
    return out


def _rounded(values: Iterable[float], digits: int = 3) -> list[float]:
    return [round(float(v), digits) for v in values]


def report(
    model: Tiny,
    tokens: Tokens,
    corpus: data.Corpus,
    *,
    exact: Path,
    small: Path,
    rows: int = 12,
    questions: int = 25,
) -> dict[str, object]:
    """All figures of models/README.md. exact, small: the exported F32 and Q5_K_M files."""
    kinds = (data.CHAT, data.STORY, data.PROSE)
    texts = {kind: held_out(corpus, tokens, kind, rows) for kind in kinds}
    whole = open_gguf(exact, all_logits=True)
    ids = texts[data.CHAT][0][0]
    apart = np.abs(torch_logits(model, ids) - gguf_logits(whole, ids)).max()
    quantised = open_gguf(small, all_logits=True)
    perplexity: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        blind = open_gguf(random_router(Path(folder) / "random.gguf", model, tokens), all_logits=True)
        for kind in kinds:
            perplexity[kind] = {
                "torch F32": torch_perplexity(model, texts[kind]),
                "torch F32, random experts": torch_perplexity(model, texts[kind], random_experts=True),
                "llama.cpp F32": gguf_perplexity(whole, texts[kind]),
                "llama.cpp F32, random routers": gguf_perplexity(blind, texts[kind]),
                "llama.cpp Q5_K_M": gguf_perplexity(quantised, texts[kind]),
            }
    experts = {kind: routing(model, texts[kind]) for kind in kinds}
    scores = accuracy(open_gguf(small), questions)
    return {
        "bytes": small.stat().st_size,
        "logits, greatest difference between PyTorch and llama.cpp in F32": round(float(apart), 5),
        "perplexity": {k: {n: round(v, 3) for n, v in p.items()} for k, p in perplexity.items()},
        "experts": {
            kind: [
                {
                    "load": _rounded(layer.load),
                    "load entropy": round(layer.load_entropy, 3),
                    "gate entropy": round(layer.gate_entropy, 3),
                }
                for layer in layers
            ]
            for kind, layers in experts.items()
        },
        "accuracy": {name: round(value, 3) for name, value in scores.items()},
        "mean accuracy": round(float(np.mean(list(scores.values()))), 3),
    }
