"""Cutting a dense SwiGLU block into one shared expert and routed experts, exactly, with a linear router.

A SwiGLU block is a sum over its neurons: y = sum_n h_n(x) * down[:, n], h_n = silu(gate_n x) * (up_n x).
Any division of the neurons into experts keeps that sum when all experts are used. The division and the router
decide how little is lost when only the k best are: neurons that are strong together belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """A dense SwiGLU block: gate and up [neurons, embd], down [embd, neurons]."""

    gate: Floats
    up: Floats
    down: Floats

    def hidden(self, x: Floats) -> Floats:
        """h [tokens, neurons] of inputs x [tokens, embd]."""
        gate = x @ self.gate.T
        with np.errstate(over="ignore"):  # exp overflows to inf where silu is zero
            gate /= 1.0 + np.exp(-gate)
        gate *= x @ self.up.T
        return gate


@dataclass(frozen=True)
class Division:
    """Neurons of a block by expert: shared [n], experts [experts, width]; router [experts, embd]."""

    shared: Ints
    experts: Ints
    router: Floats


def divide(
    block: Block, x: Floats, *, experts: int, shared: int, ridge: float = 0.1, seed: int = 0
) -> Division:
    """Divide a block by what its neurons do on calibration inputs x [tokens, embd].

    The `shared` neurons that are strongest on average are always on. The rest is clustered by co-activation.
    The router is the ridge regression of the experts' log energies on x, its logits' spread scaled to one.
    Raises ValueError if the neurons left do not divide evenly.
    """
    neurons = len(block.gate)
    if (neurons - shared) % experts or shared >= neurons:
        raise ValueError(f"{neurons} neurons less {shared} shared do not divide into {experts} experts")
    hidden = block.hidden(x)
    # Root of what a neuron adds to the output: tames the few huge activations.
    strength = np.sqrt(np.abs(hidden) * np.linalg.norm(block.down, axis=0))
    rank = np.argsort(-strength.mean(axis=0), kind="stable")
    always, rest = np.sort(rank[:shared]), np.sort(rank[shared:])
    label = balanced_clusters(_sketch(strength[:, rest], seed), experts, seed=seed)
    groups = np.stack([rest[label == e] for e in range(experts)])
    logs = np.log(energies(block, hidden, groups) + 1e-9)
    return Division(always, groups, _router(x, logs, ridge))


def energies(block: Block, hidden: Floats, groups: Ints) -> Floats:
    """Squared length [tokens, experts] of what each expert adds to the output."""
    out = np.empty((len(hidden), len(groups)), dtype=np.float32)
    for e, group in enumerate(groups):
        down = block.down[:, group]
        own = hidden[:, group]
        out[:, e] = np.einsum("tn,tn->t", own @ (down.T @ down), own)
    return np.maximum(out, 0.0)


def _sketch(strength: Floats, seed: int, size: int = 192) -> Floats:
    """Each neuron's course over the tokens as `size` numbers that keep distances (random projection)."""
    rng = np.random.default_rng(seed)
    project = rng.standard_normal((size, len(strength)), dtype=np.float32) / np.float32(np.sqrt(size))
    return (project @ (strength - strength.mean(axis=0))).T


def balanced_clusters(points: Floats, clusters: int, *, seed: int = 0, rounds: int = 25) -> Ints:
    """k-means with clusters of equal size: labels [points]. The points most certain choose first."""
    rng = np.random.default_rng(seed)
    size = len(points) // clusters
    centres = points[rng.choice(len(points), clusters, replace=False)]
    label = np.full(len(points), -1)
    for _ in range(rounds):
        distance = ((points[:, None] - centres[None]) ** 2).sum(axis=-1)
        two = np.partition(distance, 1, axis=1)[:, :2] if clusters > 1 else distance[:, [0, 0]]
        wishes = np.argsort(distance, axis=1, kind="stable")
        room, before = np.full(clusters, size), label
        label = np.full(len(points), -1)
        for point in np.argsort(two[:, 0] - two[:, 1], kind="stable"):
            cluster = next(c for c in wishes[point] if room[c])
            label[point] = cluster
            room[cluster] -= 1
        if np.array_equal(label, before):
            break
        centres = np.stack([points[label == c].mean(axis=0) for c in range(clusters)])
    return label


def _router(x: Floats, logs: Floats, ridge: float) -> Floats:
    """Ridge regression of centred logs [tokens, experts] on x: [experts, embd], logits' spread one."""
    wanted = logs - logs.mean(axis=1, keepdims=True)
    gram = (x.T @ x).astype(np.float64)
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    weights = np.linalg.solve(gram, (x.T @ wanted).astype(np.float64)).T.astype(np.float32)
    spread = float((x @ weights.T).std())
    return weights / np.float32(spread) if spread > 0 else weights
