"""Weights that make a random model route like a real one.

The residual stream has `features` dimensions that hold what the token is, as many that hold its context, some
that are the same for every token, and the rest, which only the experts and the attention read. Routers read
the first two: logit = w.(token + context), with random w for each expert and layer. So

* the token's part makes routing follow the token; few features make layers foretell each other;
* the context's part is written by the first layer's attention: keys and queries come from the constant
  dimensions, so scores depend on the distance alone, through the rotary embedding, which is planted to give
  weights (1 + distance)^-decay. Their sum over recent tokens is slow, and gives experts that stay in use;
* BOS catches part of that attention, so the sum is no average that fades as the text grows;
* what later layers add (experts, and attention with the same weights) drifts: it makes routing change with
  depth, and the next layer's router applied early wrong at a known rate.

All lengths below are in units of the embedding's root mean square, which is one for every token.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from models.planted.real import Real

Floats = NDArray[np.float32]

CONSTANTS, CONSTANT = 8, 2.0  # dimensions that are +-CONSTANT for every token but BOS
FLAGS = 4  # dimensions that only BOS uses
_ROWS = 512  # rows of the embedding drawn at once
_KERNEL_REACH = 1024  # tokens over which the power law is fitted
_TYPICAL = 128  # tokens of context for which variances are worked out
_SILU2 = 0.355  # mean square of silu(x) * y for normal x, y
_OAI2 = 0.80  # of gpt-oss's gated unit


def kernel(theta: NDArray[np.float64], decay: float) -> NDArray[np.float64]:
    """Amplitudes a >= 0 such that sum a_i cos(theta_i d) falls like -decay * log(1 + d) from d = 0.

    theta: [pairs], the rotary frequencies. Non-negative least squares by multiplicative updates.
    """
    d = np.unique(np.geomspace(1, _KERNEL_REACH, 200).astype(int)).astype(np.float64)
    drop, wanted = 1 - np.cos(np.outer(d, theta)), decay * np.log1p(d)
    a = np.full(len(theta), decay / max(1, len(theta)))
    up, square = drop.T @ wanted, drop.T @ drop
    for _ in range(2000):
        a *= up / np.maximum(square @ a, 1e-12)
    return a


@dataclass(frozen=True)
class Plant:
    """The planted tensors of one model. `counts`: [tokens], how often each token occurs in text."""

    real: Real
    counts: NDArray[np.floating]
    bos: int
    seed: int

    def rng(self, name: str, part: int = 0) -> np.random.Generator:
        """A stream of its own for each tensor, so that bytes do not depend on the order of writing."""
        return np.random.Generator(np.random.PCG64([self.seed, part, zlib.crc32(name.encode())]))

    def normal(self, name: str, shape: tuple[int, ...], scale: float, part: int = 0) -> Floats:
        return self.rng(name, part).standard_normal(shape, dtype=np.float32) * np.float32(scale)

    # Where things are in the residual stream.

    @property
    def token(self) -> slice:
        return slice(0, self.real.recipe.features)

    @property
    def around(self) -> slice:
        return slice(self.real.recipe.features, 2 * self.real.recipe.features)

    @property
    def constants(self) -> slice:
        return slice(self.around.stop, self.around.stop + CONSTANTS)

    @property
    def flags(self) -> slice:
        return slice(self.constants.stop, self.constants.stop + FLAGS)

    @property
    def rest(self) -> slice:
        return slice(self.flags.stop, self.real.embd)

    @cached_property
    def signs(self) -> Floats:
        return np.where(np.arange(CONSTANTS) % 2, -1, 1).astype(np.float32)

    # Powers.

    def _focus(self, layer: int) -> float:
        """Sum of squared attention weights after a typical number of tokens."""
        w = (1.0 + np.arange(_TYPICAL)) ** -self.real.recipe.decay
        return float((w**2).sum() / (w.sum() + (self.real.recipe.sink if layer == 0 else 0.0)) ** 2)

    @cached_property
    def context_power(self) -> float:
        """Variance of a context feature; a token feature has one."""
        r = self.real.recipe
        return (r.context * r.sink) ** 2 * self._focus(0)

    @property
    def layer_power(self) -> float:
        """Variance that one layer adds to each dimension."""
        return self.real.recipe.drift * (1 + self.context_power) / 2

    def rms(self, layer: float) -> float:
        """Root mean square of the residual stream before layer `layer` (+0.5: before its FFN)."""
        context = self.real.recipe.features * self.context_power / self.real.embd
        return float(np.sqrt(1 + (context if layer > 0 else 0.0) + layer * self.layer_power))

    # Embedding, output, router.

    @cached_property
    def token_features(self) -> Floats:
        """[tokens, features], with mean zero over text."""
        z = self.normal("token features", (len(self.counts), self.real.recipe.features), 1.0)
        z -= (self.counts / self.counts.sum()).astype(np.float32) @ z
        return z

    def embedding(self, first: int, last: int) -> Floats:
        """Rows first..last-1 of the embedding, each of mean square one."""
        d = self.real.embd
        out = np.zeros((last - first, d), dtype=np.float32)
        known = self.token_features[first:last]
        out[: len(known), self.token] = known
        out[:, self.constants] = CONSTANT * self.signs
        room = np.maximum(d - (out**2).sum(axis=1), 0.0)
        rest = self._rest(first, last)
        out[:, self.rest] = rest * np.sqrt(room / (rest**2).sum(axis=1))[:, None]
        if first <= self.bos < last:
            out[self.bos - first] = 0
            out[self.bos - first, self.flags] = np.sqrt(d / FLAGS)
        return out

    def _rest(self, first: int, last: int) -> Floats:
        """Random values of the other dimensions; those of the commonest tokens have mean zero over text."""
        blocks = [self._random_rest(b) for b in range(first // _ROWS, -(-last // _ROWS))]
        return np.concatenate(blocks)[first % _ROWS :][: last - first] - self._rest_mean

    def _random_rest(self, block: int) -> Floats:
        return self.normal("token_embd.weight", (_ROWS, self.rest.stop - self.rest.start), 1.0, block)

    @cached_property
    def _rest_mean(self) -> Floats:
        share = (self.counts / self.counts.sum()).astype(np.float32)
        blocks = range(-(-len(share) // _ROWS))
        return sum(share[b * _ROWS : (b + 1) * _ROWS] @ self._part(b, len(share)) for b in blocks)

    def _part(self, block: int, tokens: int) -> Floats:
        return self._random_rest(block)[: tokens - block * _ROWS]

    def router(self, layer: int) -> Floats:
        """[experts, embd]: reads token and context alike, and the experts' popularity off the constants."""
        r = self.real.recipe
        name = f"blk.{layer}.ffn_gate_inp.weight"
        w = self.normal(name, (self.real.experts, r.features), 1.0)
        w /= np.linalg.norm(w, axis=1, keepdims=True)
        rms = self.rms(layer + 0.5)
        std = np.sqrt(1 + self.context_power + 2 * layer * self.layer_power) / rms
        out = np.zeros((self.real.experts, self.real.embd), dtype=np.float32)
        out[:, self.token] = out[:, self.around] = w * (r.spread / std)
        popularity = self.normal(name, (self.real.experts, 1), r.skew * r.spread, 1)
        out[:, self.constants] = popularity * self._from_constants(rms)
        return out

    def _from_constants(self, rms: float) -> Floats:
        """[CONSTANTS]: weights that read one off the constants of a normalised residual stream."""
        return self.signs * np.float32(rms / (CONSTANTS * CONSTANT))

    # Attention.

    @cached_property
    def _theta(self) -> NDArray[np.float64]:
        n = self.real.rotated
        return self.real.rope_base ** (-np.arange(0, n, 2) / n)

    @cached_property
    def _near(self) -> NDArray[np.int64]:
        """The rotary pairs that make the power law; the slowest one is left for the sink."""
        fast = np.flatnonzero(self._theta * _KERNEL_REACH > 0.5)
        return fast[fast < len(self._theta) - 1]

    @cached_property
    def _amplitudes(self) -> NDArray[np.float64]:
        return kernel(self._theta[self._near], self.real.recipe.decay)

    @property
    def sink_score(self) -> float:
        """Attention score of the first layer that weighs `sink` where a token's with itself weighs one.

        Later layers have no sink: what BOS gathers on its way is the same for every text and would add up.
        """
        return float(self._amplitudes.sum() + np.log(self.real.recipe.sink))

    def _places(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the first value of each rotary pair lies in the rotated part of a head."""
        return pairs if self.real.neox else 2 * pairs

    @cached_property
    def _key_size(self) -> float:
        """Value of each planted key component: keys of tokens have mean square one, as norms make them."""
        return float(np.sqrt(self.real.rotated / len(self._near)))

    def query_pattern(self, layer: int) -> Floats:
        """[rotated]: the query of every token. llama.cpp divides scores by sqrt(head_dim)."""
        out = np.zeros(self.real.rotated, dtype=np.float32)
        scale = np.sqrt(self.real.head_dim)
        out[self._places(self._near)] = self._amplitudes * scale / self._key_size
        if layer == 0 and self.real.latent is None and self.real.arch != "gpt-oss":
            slowest = np.array([len(self._theta) - 1])
            out[self._places(slowest)] = self.sink_score * scale / np.sqrt(self.real.rotated)
        return out

    def query(self, layer: int, *, unit: bool) -> Floats:
        """[rotated, embd]: makes the query pattern. unit: of mean square one, where a norm follows."""
        pattern = self.query_pattern(layer) / (self.query_size(layer) if unit else 1.0)
        out = np.zeros((len(pattern), self.real.embd), dtype=np.float32)
        out[:, self.constants] = np.outer(pattern, self._from_constants(self.rms(layer)))
        return out

    def query_size(self, layer: int) -> float:
        """Root mean square of the query pattern."""
        return float(np.sqrt((self.query_pattern(layer) ** 2).mean()))

    def key(self, layer: int) -> Floats:
        """[rotated, embd]: the same key for every token; for BOS only the sink's component."""
        out = np.zeros((self.real.rotated, self.real.embd), dtype=np.float32)
        read = self._from_constants(self.rms(layer))
        out[self._places(self._near), self.constants] = self._key_size * read
        slowest = self._places(np.array([len(self._theta) - 1]))
        out[slowest, self.flags] = np.sqrt(self.real.rotated) * self._from_flags(layer)
        return out

    def _from_flags(self, layer: int) -> float:
        """Weight on each flag dimension that reads one for BOS."""
        return self.rms(layer) / (FLAGS * float(np.sqrt(self.real.embd / FLAGS)))

    def value(self, name: str, layer: int, rows: int) -> Floats:
        """[rows, embd]: reads the token's features and, weakly, all else that has mean zero over text."""
        d, n = self.real.embd, self.real.recipe.features
        out = self.normal(name, (rows, d), 0.2 / np.sqrt(d))
        out[:, self.constants] = out[:, self.flags] = 0
        out[:, self.token] = self.normal(name, (rows, n), self.rms(layer) / np.sqrt(n), 1)
        return out

    def output_projection(self, name: str, layer: int, values: Floats | None, width: int) -> Floats:
        """[embd, width]: random; in the first layer the context dimensions get the averaged token features.

        values: [width, features], what the attention's result holds per token feature (first layer).
        """
        r = self.real.recipe
        power = r.slow * self.layer_power / (width * self._focus(layer))
        out = self.normal(name, (self.real.embd, width), np.sqrt(power))
        if values is not None:
            inverse = np.linalg.pinv(values.astype(np.float64))
            out[self.around] = inverse * (r.context * r.sink)
        return out

    # Experts.

    @cached_property
    def gates(self) -> float:
        """Expected sum of a token's squared gate weights, by sampling."""
        logits = np.random.default_rng(0).standard_normal((2000, self.real.experts)) * self.real.recipe.spread
        p = np.exp(logits)
        p /= p.sum(axis=1, keepdims=True)
        top = np.sort(p, axis=1)[:, -self.real.used :]
        if self.real.renormalised:
            top /= top.sum(axis=1, keepdims=True)
        return float((top**2).sum(axis=1).mean())

    def down_gain(self, part: str) -> float:
        """Gain of the down projections of "experts", "shared" or "dense" FFNs, for the planted drift."""
        fast = (1 - self.real.recipe.slow) * self.layer_power
        shared = 0.4 if self.real.shared_ff else 0.0
        if part == "dense":
            return float(np.sqrt(fast / _SILU2))
        if part == "shared":
            gate = 0.3 if self.real.arch == "qwen2moe" else 1.0  # mean square of its sigmoid gate
            return float(np.sqrt(shared * fast / (_SILU2 * gate)))
        active = _OAI2 if self.real.arch == "gpt-oss" else _SILU2
        return float(np.sqrt((1 - shared) * fast / (active * self.gates)))
