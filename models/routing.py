"""Statistics of MoE routing, vectorised over layers and sequences, and the published figures to compare with.

Everything takes expert ids [layers, tokens, k] with all sequences concatenated along tokens, and `lens`, the
tokens of each sequence. Nothing crosses from one sequence to the next: caches start cold in each. Results are
averages over layers and sequences, weighted by accesses, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]
Floats = NDArray[np.floating]

LAGS = (1, 2, 4, 8, 32)
WINDOWS = (2, 4, 8, 16)
AHEAD = (1, 2, 3, 4, 5)
_NEVER = np.int32(2**30)


def sequences(ids: Ids, lens: Sequence[int] | NDArray[np.integer]) -> Iterator[Ids]:
    """The ids [layers, tokens, k] of each sequence. Raises ValueError if `lens` does not add up."""
    ends = np.cumsum(lens)
    if len(ends) == 0 or ends[-1] != ids.shape[1]:
        raise ValueError(f"sequences of {int(np.sum(lens))} tokens, ids of {ids.shape[1]}")
    for end, length in zip(ends, lens, strict=True):
        yield ids[:, end - length : end]


def cut(
    ids: Ids, lens: Sequence[int], *, first: int, at_least: int = 0, most: int = 0
) -> tuple[Ids, list[int]]:
    """The `first` tokens of each sequence that has `at_least`, of `most` sequences (0: of all)."""
    kept = [s[:, :first] for s in sequences(ids, lens) if s.shape[1] >= at_least]
    kept = kept[:most] if most else kept
    if not kept:
        raise ValueError(f"no sequence has {at_least} tokens")
    return np.concatenate(kept, axis=1), [s.shape[1] for s in kept]


def used(ids: Ids, n_expert: int) -> NDArray[np.bool_]:
    """Which experts each token uses: ids [..., k] to bool [..., n_expert]."""
    out = np.zeros((*ids.shape[:-1], n_expert), dtype=np.bool_)
    np.put_along_axis(out, ids.astype(np.int64), True, axis=-1)
    return out


def repeat(ids: Ids, lens: Sequence[int], n_expert: int, lag: int) -> float:
    """P(an expert of token t is also used at t + lag); nan if no sequence is longer than the lag."""
    hits = total = 0
    for part in sequences(ids, lens):
        if part.shape[1] <= lag:
            continue
        later = np.take_along_axis(used(part[:, lag:], n_expert), part[:, :-lag].astype(np.int64), axis=-1)
        hits, total = hits + int(later.sum()), total + later.size
    return hits / total if total else float("nan")


def gini(counts: NDArray[np.number]) -> Floats:
    """Gini coefficient along the last axis: 0 if all are equal, 1 - 1/n if one has everything."""
    ordered = np.sort(np.asarray(counts, dtype=np.float64), axis=-1)
    n = ordered.shape[-1]
    total = ordered.sum(axis=-1)
    weighted = (ordered * (2 * np.arange(1, n + 1) - n - 1)).sum(axis=-1)
    return np.divide(weighted, n * total, out=np.zeros_like(total), where=total > 0)


def counts(ids: Ids, n_expert: int) -> NDArray[np.int64]:
    """Uses of each expert: ids [layers, tokens, k] to [layers, n_expert]."""
    layers = ids.shape[0]
    flat = ids.reshape(layers, -1).astype(np.int64) + n_expert * np.arange(layers)[:, None]
    return np.bincount(flat.ravel(), minlength=layers * n_expert).reshape(layers, n_expert)


def gini_in_sequence(ids: Ids, lens: Sequence[int], n_expert: int) -> float:
    """Mean Gini of the experts' uses within one sequence and layer."""
    return float(np.mean([gini(counts(part, n_expert)).mean() for part in sequences(ids, lens)]))


def gini_corpus(ids: Ids, n_expert: int) -> float:
    """Mean Gini of the experts' uses over all sequences, by layer."""
    return float(gini(counts(ids, n_expert)).mean())


def unique(ids: Ids, lens: Sequence[int], n_expert: int, window: int) -> float:
    """Mean number of different experts in a layer over `window` tokens; nan if none is so long."""
    total = places = 0
    for part in sequences(ids, lens):
        if part.shape[1] < window:
            continue
        seen = np.cumsum(used(part, n_expert), axis=1, dtype=np.int32)
        inside = seen[:, window - 1 :].copy()
        inside[:, 1:] -= seen[:, :-window]
        total, places = total + int((inside > 0).sum()), places + inside.shape[0] * inside.shape[1]
    return total / places if places else float("nan")


def unique_iid(k: int, n_expert: int, window: int) -> float:
    """The same for independent, uniform routing."""
    return n_expert * (1 - (1 - k / n_expert) ** window)


def _aligned(ids: Ids, lens: Sequence[int]) -> Iterator[Ids]:
    """Sequences of one length together, as [rows, tokens, k] with a row per layer and sequence."""
    parts: dict[int, list[Ids]] = {}
    for part in sequences(ids, lens):
        parts.setdefault(part.shape[1], []).append(part)
    for length in sorted(parts):
        group = parts[length]
        step = max(1, 4_000_000 // max(1, length * ids.shape[0] * ids.shape[2]))
        for i in range(0, len(group), step):
            yield np.concatenate(group[i : i + step])


def lru_distances(ids: Ids, n_expert: int) -> NDArray[np.int64]:
    """How often each LRU stack distance occurs: [n_expert + 1], the last for first uses.

    ids: [rows, tokens, k], each row a cache of its own. The distance of an access is the number of experts
    used more recently; a cache of c slots holds it, before the token's own step, exactly if that is below c.
    Within a token the best expert (rank 0) counts as the most recent.
    """
    rows, tokens, k = ids.shape
    stamps = np.full((rows, n_expert), -1, dtype=np.int32)
    out = np.zeros(n_expert + 1, dtype=np.int64)
    rank = np.arange(k - 1, -1, -1, dtype=np.int32)
    for t in range(tokens):
        now = ids[:, t].astype(np.int64)
        mine = np.take_along_axis(stamps, now, axis=1)
        newer = (stamps[:, None, :] > mine[:, :, None]).sum(axis=-1)
        out += np.bincount(np.where(mine < 0, n_expert, newer).ravel(), minlength=n_expert + 1)
        np.put_along_axis(stamps, now, np.broadcast_to(t * k + rank, now.shape), axis=1)
    return out


def lru(ids: Ids, lens: Sequence[int], n_expert: int) -> Floats:
    """LRU hit rate for 0, 1, ... n_expert slots per layer: [n_expert + 1]."""
    found = sum(lru_distances(rows, n_expert) for rows in _aligned(ids, lens))
    assert isinstance(found, np.ndarray)
    return np.concatenate([[0.0], np.cumsum(found[:-1])]) / found.sum()


def _next_uses(ids: Ids, n_expert: int) -> NDArray[np.int32]:
    """[tokens, rows, n_expert]: the first token after t that uses the expert, _NEVER if none."""
    rows, tokens, _ = ids.shape
    out = np.empty((tokens, rows, n_expert), dtype=np.int32)
    after = np.full((rows, n_expert), _NEVER, dtype=np.int32)
    for t in range(tokens - 1, -1, -1):
        out[t] = after
        np.put_along_axis(after, ids[:, t].astype(np.int64), np.int32(t), axis=1)
    return out


def _replay(ids: Ids, n_expert: int, slots: int, policy: str) -> tuple[int, int]:
    """(hits, accesses) of [rows, tokens, k] with `slots` per row, for "belady" or "lfu".

    What a token uses passes through slots, so it stays for the next token; the other slots keep the best of
    what they held: by next use, or by uses so far in the sequence (the later used first among equals).
    """
    rows, tokens, k = ids.shape
    held = np.zeros((rows, n_expert), dtype=np.bool_)
    value = np.zeros((rows, n_expert), dtype=np.int64)
    future = _next_uses(ids, n_expert) if policy == "belady" else None
    hits = 0
    for t in range(tokens):
        now = ids[:, t].astype(np.int64)
        hits += int(np.take_along_axis(held, now, axis=1).sum())
        np.put_along_axis(held, now, True, axis=1)
        if future is not None:
            value = -future[t].astype(np.int64)
        else:  # uses in the high part, time of the last use in the low part
            uses = (np.take_along_axis(value, now, axis=1) >> 32) + 1
            np.put_along_axis(value, now, (uses << 32) + t, axis=1)
        if slots < n_expert:
            score = np.where(held, value, np.iinfo(np.int64).min)
            np.put_along_axis(score, now, np.iinfo(np.int64).max, axis=1)
            out = np.argpartition(score, n_expert - slots - 1, axis=1)[:, : n_expert - slots]
            np.put_along_axis(held, out, False, axis=1)
    return hits, rows * tokens * k


def hit_rate(ids: Ids, lens: Sequence[int], n_expert: int, slots: int, policy: str) -> float:
    """Hit rate of "lru", "lfu" or "belady" (the bound) with slots per layer.

    Raises ValueError for another policy or for slots outside k..n_expert.
    """
    if not ids.shape[2] <= slots <= n_expert:
        raise ValueError(f"{slots} slots for {ids.shape[2]} of {n_expert} experts")
    if policy == "lru":
        return float(lru(ids, lens, n_expert)[slots])
    if policy not in ("lfu", "belady"):
        raise ValueError(f"unknown policy {policy!r}; known: lru, lfu, belady")
    results = [_replay(rows, n_expert, slots, policy) for rows in _aligned(ids, lens)]
    return sum(h for h, _ in results) / sum(n for _, n in results)


def recall_from_ids(ids: Ids, lens: Sequence[int], n_expert: int) -> float:
    """Share of the next layer's experts that this layer's experts foretell, by counts from other tokens.

    Score of e' = sum over e in use of P(e' in layer l+1 | e in layer l), estimated on the odd sequences (or
    the first half of a single one) and tested on the others; the top k scores are the guess.
    """
    if ids.shape[0] < 2:
        return float("nan")
    parts = list(sequences(ids, lens))
    if len(parts) == 1:
        half = ids.shape[1] // 2
        parts = [ids[:, half:], ids[:, :half]]
    learn = used(np.concatenate(parts[1::2], axis=1), n_expert).astype(np.float32)
    test = np.concatenate(parts[0::2], axis=1)
    mask, k = used(test, n_expert).astype(np.float32), ids.shape[2]
    rates = []
    for layer in range(ids.shape[0] - 1):
        joint = learn[layer].T @ learn[layer + 1]
        given = joint / np.maximum(1.0, learn[layer].sum(axis=0))[:, None]
        guess = top_k(mask[layer] @ given, k)
        rates.append(_overlap(guess, test[layer + 1], n_expert))
    return float(np.mean(rates))


def top_k(scores: Floats, k: int) -> NDArray[np.int64]:
    """Indices [..., k] of the largest scores [..., n], in no particular order."""
    return np.argpartition(scores, scores.shape[-1] - k, axis=-1)[..., -k:]


def _overlap(guess: Ids, truth: Ids, n_expert: int) -> float:
    return float(np.take_along_axis(used(guess, n_expert), truth.astype(np.int64), axis=-1).mean())


def recall_ahead(
    ids: Ids,
    inputs: Floats,
    routers: Floats,
    ahead: int,
    *,
    bias: Floats | None = None,
    selection_bias: Floats | None = None,
) -> float:
    """Recall of the router of layer l + ahead applied to the router input of layer l: the draft-free guess.

    inputs: [layers, tokens, width], what each router reads; routers: [layers, n_expert, width]; bias:
    [layers, n_expert], added to the logits; selection_bias: the same, added to their sigmoid. nan if the
    model has too few layers.
    """
    layers, n_expert, k = ids.shape[0], routers.shape[1], ids.shape[2]
    rates = []
    for layer in range(layers - ahead):
        target = layer + ahead
        scores = inputs[layer].astype(np.float32) @ routers[target].astype(np.float32).T
        if bias is not None:
            scores += bias[target]
        if selection_bias is not None:
            scores = 1 / (1 + np.exp(-scores)) + selection_bias[target]
        rates.append(_overlap(top_k(scores, k), ids[target], n_expert))
    return float(np.mean(rates)) if rates else float("nan")


@dataclass(frozen=True)
class Statistics:
    """Routing statistics of one trace, or published ones. Missing figures are absent from the dicts.

    repeat: by lag; lru, lfu, belady: hit rate by slots per layer; unique: by window; recall: of the next
    routers, by layers ahead.
    """

    n_expert: int
    k: int
    repeat: dict[int, float] = field(default_factory=dict)
    gini_sequence: float | None = None
    gini_corpus: float | None = None
    lru: dict[int, float] = field(default_factory=dict)
    lfu: dict[int, float] = field(default_factory=dict)
    belady: dict[int, float] = field(default_factory=dict)
    unique: dict[int, float] = field(default_factory=dict)
    recall_ids: float | None = None
    recall: dict[int, float] = field(default_factory=dict)

    def rows(self) -> dict[str, float]:
        """All figures by a short name, in the order in which they are shown."""
        out: dict[str, float] = {}
        for name, values in (("repeat lag", self.repeat), ("LRU hit, slots", self.lru)):
            out |= {f"{name} {key}": value for key, value in values.items()}
        for name, values in (("LFU hit, slots", self.lfu), ("Belady hit, slots", self.belady)):
            out |= {f"{name} {key}": value for key, value in values.items()}
        out |= {f"unique in {key}": value for key, value in self.unique.items()}
        singles = (
            ("Gini in sequence", self.gini_sequence),
            ("Gini corpus", self.gini_corpus),
            ("recall from ids", self.recall_ids),
        )
        out |= {name: value for name, value in singles if value is not None}
        out |= {f"recall, {key} ahead": value for key, value in self.recall.items()}
        return out


def slots_to_show(n_expert: int, k: int) -> list[int]:
    """An eighth, a quarter, half and three quarters of the experts, as far as a token's own fit."""
    return [s for s in (n_expert // 8, n_expert // 4, n_expert // 2, 3 * n_expert // 4) if s >= k]


def statistics(
    ids: Ids,
    lens: Sequence[int],
    n_expert: int,
    *,
    inputs: Floats | None = None,
    routers: Floats | None = None,
    bias: Floats | None = None,
    selection_bias: Floats | None = None,
    optional: bool = True,
) -> Statistics:
    """All statistics of a trace. optional: LFU, Belady and recall from ids, too (slower)."""
    k = ids.shape[2]
    longest = max(lens)
    curve, slots = lru(ids, lens, n_expert), slots_to_show(n_expert, k)
    replays: dict[str, dict[int, float]] = {"lfu": {}, "belady": {}}
    if optional:
        for policy, out in replays.items():
            out.update({s: hit_rate(ids, lens, n_expert, s, policy) for s in slots})
    recall: dict[int, float] = {}
    if inputs is not None and routers is not None:
        layers = ids.shape[0]
        biases = {"bias": bias, "selection_bias": selection_bias}
        recall = {a: recall_ahead(ids, inputs, routers, a, **biases) for a in AHEAD if a < layers}
    return Statistics(
        n_expert=n_expert,
        k=k,
        repeat={lag: repeat(ids, lens, n_expert, lag) for lag in LAGS if lag < longest},
        gini_sequence=gini_in_sequence(ids, lens, n_expert),
        gini_corpus=gini_corpus(ids, n_expert) if len(lens) > 1 else None,
        lru={s: float(curve[s]) for s in slots},
        lfu=replays["lfu"],
        belady=replays["belady"],
        unique={w: unique(ids, lens, n_expert, w) for w in WINDOWS if w <= longest},
        recall_ids=recall_from_ids(ids, lens, n_expert) if optional and ids.shape[0] > 1 else None,
        recall=recall,
    )


def _by(keys: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    return dict(zip(keys, values, strict=True))


# Recall of training-free drafts ahead, published for two models with WikiText (SPICE's evidence files).
_RECALL_DEEPSEEK = _by(AHEAD, (0.873, 0.816, 0.770, 0.733, 0.697))
_RECALL_QWEN = _by(AHEAD, (0.884, 0.838, 0.806, 0.778, 0.752))

# Measured on public traces of the real models; top-k is what those traces were recorded with. Traces of one
# short sequence (OLMoE 299 tokens, Qwen3 128, gpt-oss 64) inflate Gini and cap LRU at the cold misses.
TARGETS: dict[str, Statistics] = {
    "deepseek-v2-lite": Statistics(
        n_expert=64,
        k=6,
        repeat=_by(LAGS, (0.265, 0.202, 0.174, 0.160, 0.147)),
        gini_sequence=0.35,
        gini_corpus=0.12,
        lru=_by((8, 12, 16, 24, 32, 48), (0.32, 0.40, 0.48, 0.60, 0.71, 0.88)),
        lfu=_by((16, 32), (0.50, 0.73)),
        belady=_by((8, 16, 24, 32, 48), (0.42, 0.66, 0.78, 0.85, 0.93)),
        unique=_by(WINDOWS, (10.5, 17.6, 28.0, 40.3)),
        recall_ids=0.470,
        recall=_RECALL_DEEPSEEK,
    ),
    "olmoe-1b-7b": Statistics(
        n_expert=64,
        k=8,
        repeat=_by(LAGS, (0.435, 0.349, 0.311, 0.304, 0.288)),
        gini_sequence=0.45,
        lru=_by((8, 16, 24, 32, 48), (0.42, 0.57, 0.67, 0.77, 0.93)),
        lfu=_by((16, 32), (0.59, 0.80)),
        belady=_by((16, 32), (0.70, 0.89)),
        unique=_by(WINDOWS, (12.4, 19.3, 28.7, 39.0)),
        recall_ids=0.510,
    ),
    "qwen3-30b-a3b": Statistics(
        n_expert=128,
        k=6,
        repeat=_by(LAGS, (0.380, 0.289, 0.277, 0.267, 0.236)),
        gini_sequence=0.77,
        lru=_by((12, 32, 48), (0.52, 0.81, 0.89)),
        lfu=_by((12, 32), (0.57, 0.82)),
        belady=_by((12, 32), (0.67, 0.88)),
        unique=_by(WINDOWS, (9.6, 16.4, 23.8, 33.2)),
        recall_ids=0.486,
    ),
    "gpt-oss-120b": Statistics(
        n_expert=128,
        k=2,
        repeat=_by(LAGS, (0.179, 0.210, 0.134, 0.131, 0.118)),
        gini_sequence=0.85,
        lru=_by((4, 32), (0.33, 0.71)),
        lfu=_by((4,), (0.32,)),
        belady=_by((4,), (0.47,)),
        unique=_by(WINDOWS, (3.6, 6.0, 10.3, 16.3)),
        recall_ids=0.412,
    ),
    # Published for other texts, and only in part: repeat at lag 1 from its top-k Jaccard .128.
    "qwen1.5-moe-a2.7b": Statistics(
        n_expert=60, k=4, repeat={1: 0.227}, unique={8: 22.1}, recall=_RECALL_QWEN
    ),
}
