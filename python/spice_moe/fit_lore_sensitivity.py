"""What substitution costs: nats of KL to the exact model, layer by layer and all layers together.

Sensitivity: all substitutable experts of one layer at a time are replaced by their stand-ins, and the KL of
the next-token distributions is divided by the error that the file's calibration expects for it. Layers
together cost less than their sum, as what can happen to a token is bounded. So shares of all layers' experts
are replaced by lot, and the KL over the sum of what each expert costs alone is a curve of the file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import llama_cpp
import llama_cpp._internals as internals
import numpy as np
from numpy.typing import NDArray

from .llama import Llama

SHARES = (0.015625, 0.0625, 0.25, 0.5, 1.0)  # replaced, at the points of the curve
_RISE = 1e-3  # from point to point, relative, where the curve would be flat


def sensitivities(
    llm: Llama,
    lore: str | os.PathLike[str],
    pieces: Sequence[Sequence[int]],
    layers: Sequence[int],
    step: Callable[[], None],
) -> dict[int, float]:
    """Nats of KL per unit of relative error power, by layer, on the token ids of the pieces.

    The stand-ins in the file `lore` need no sensitivities yet. Raises what `Llama.eval` raises.
    """
    core = llm.spice._core
    core.load_lore(os.fspath(lore))
    exact = [log_probabilities(llm, piece) for piece in pieces]
    out: dict[int, float] = {}
    try:
        for layer in layers:
            core.set_substitution("lore", 1.0, 0, layer)
            before = core.stats()["lore_error"]
            kl = [divergence(p, log_probabilities(llm, q)).sum() for p, q in zip(exact, pieces, strict=True)]
            out[layer] = float(sum(kl)) / max(core.stats()["lore_error"] - before, 1e-30)
            step()
    finally:
        core.set_substitution("off")
    return out


def curve(
    llm: Llama, lore: str | os.PathLike[str], pieces: Sequence[Sequence[int]], step: Callable[[], None]
) -> list[tuple[float, float]]:
    """Points (sum of what each replaced expert costs alone, KL), both in nats per token, of SHARES of the
    experts replaced.

    `lore`: a file with sensitivities and without a curve. Raises what `Llama.eval` raises.
    """
    core = llm.spice._core
    core.load_lore(os.fspath(lore))
    sums, nats = np.zeros(len(SHARES)), np.zeros(len(SHARES))
    try:
        for number, piece in enumerate(pieces):  # one at a time: their distributions take much memory
            core.set_substitution("off")
            exact = log_probabilities(llm, piece)
            for at, share in enumerate(SHARES):
                core.set_substitution("lore", share, number)
                before = core.stats()["lore_kl"]
                nats[at] += divergence(exact, log_probabilities(llm, piece)).sum()
                sums[at] += core.stats()["lore_kl"] - before
            step()
    finally:
        core.set_substitution("off")
    tokens = sum(map(len, pieces))
    return concave([(x / tokens, y / tokens) for x, y in zip(sums.tolist(), nats.tolist(), strict=True)])


def concave(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The concave growing curve from (0, 0) that is nearest to the points, at their x: none where all is 0.

    sum_j a_j min(x, x_j) with a_j >= 0, by least squares of the relative errors, so that the noise of single
    points evens out. Concave, it keeps a budget of the mean KL: tokens that are replaced more than the mean
    cost less than the mean's slope says.
    """
    kept = [(x, y) for x, y in sorted(points) if x > 0 and y > 0]
    if not kept:
        return []
    x, y = np.array(kept).T
    x, at = np.unique(x, return_inverse=True)
    basis = np.minimum(x[at][:, None], x) / y[:, None]
    best, values = np.inf, x
    for used in itertools.product((False, True), repeat=len(x)):  # few points: every set of corners
        a = np.zeros(len(x))
        if any(used):
            a[list(used)] = np.linalg.lstsq(basis[:, used], np.ones(len(y)), rcond=None)[0]
        error = float(np.square(basis @ a - 1).sum())
        if (a >= 0).all() and error < best:
            best, values = error, np.minimum(x[:, None], x) @ a
    values = np.maximum.accumulate(values * (1 + _RISE * np.arange(len(x))))  # so that it has an inverse
    return list(zip(x.tolist(), values.tolist(), strict=True))


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
