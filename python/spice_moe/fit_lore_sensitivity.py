"""What substitution costs: nats of KL to the exact model per unit of relative error power, layer by layer.

All substitutable experts of one layer at a time are replaced by their stand-ins, and the KL of the next-token
distributions is divided by the error that the file's calibration expects for it. Layers together cost less
or more than their sum, so a last run with a part of all layers' experts scales all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import llama_cpp
import llama_cpp._internals as internals
import numpy as np
from numpy.typing import NDArray

from .llama import Llama

_TOGETHER = 0.25  # share of misses in the run of all layers
_LEAST, _MOST = 0.25, 4.0  # bounds of the factor from that run


def measure(
    llm: Llama,
    lore: str | os.PathLike[str],
    pieces: Sequence[Sequence[int]],
    more: Sequence[Sequence[int]],
    layers: Sequence[int],
    step: Callable[[], None],
) -> dict[int, float]:
    """Sensitivity by layer; the stand-ins in the file `lore` need no sensitivities yet.

    pieces: token ids for each layer; more: for all together. Raises what `Llama.eval` raises.
    """
    core = llm.spice._core
    core.load_lore(os.fspath(lore))
    exact: list[NDArray[np.float32]] = []

    def cost(texts: Sequence[Sequence[int]], share: float, layer: int) -> tuple[float, float]:
        """Nats per token, and relative error power per row that the calibration expects."""
        core.set_substitution("lore", share, 0, layer)
        before = core.stats()["lore_error"]
        kl = [divergence(p, log_probabilities(llm, text)) for p, text in zip(exact, texts, strict=True)]
        rows = sum(map(len, texts))
        return float(np.concatenate(kl).mean()), (core.stats()["lore_error"] - before) / rows

    try:
        exact[:] = (log_probabilities(llm, text) for text in pieces)
        out: dict[int, float] = {}
        expected = 0.0
        for layer in layers:
            kl, error = cost(pieces, 1.0, layer)
            out[layer] = kl / max(error, 1e-30)
            expected += _TOGETHER * kl
            step()
        # One text at a time: their distributions take much memory.
        together = []
        for text in more:
            core.set_substitution("off")
            exact[:] = [log_probabilities(llm, text)]
            together.append(cost([text], _TOGETHER, -1)[0] * len(text))
        factor = sum(together) / sum(map(len, more)) / max(expected, 1e-30)
        step()
        return {layer: float(np.clip(factor, _LEAST, _MOST)) * value for layer, value in out.items()}
    finally:
        core.set_substitution("off")


def log_probabilities(llm: Llama, piece: Sequence[int]) -> NDArray[np.float32]:
    """[tokens, vocabulary], of the token after each, from an empty context."""
    memory = llama_cpp.llama_get_memory(llm.ctx)
    llama_cpp.llama_memory_clear(memory, True)
    batch = internals.LlamaBatch(n_tokens=llm.n_batch, embd=0, n_seq_max=1, verbose=False)
    rows = []
    try:
        for start in range(0, len(piece), llm.n_batch):
            part = piece[start : start + llm.n_batch]
            batch.set_batch(part, n_past=start, logits_all=True)
            with llm._failures_of_compute():
                llm._ctx.decode(batch)
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits(llm.ctx), shape=(len(part), llm.n_vocab())
            )
            rows.append(_log_softmax(logits))
    finally:
        batch.close()
        llama_cpp.llama_memory_clear(memory, True)
    return np.concatenate(rows)


def divergence(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float32]:
    """KL(p | q) [tokens] of log-probabilities [tokens, vocabulary]."""
    return (np.exp(p) * (p - q)).sum(axis=1)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
