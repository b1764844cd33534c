"""The tensors of each real architecture, planted: names and shapes as llama.cpp's loader expects them.

Source: src/models/<arch>.cpp of llama-cpp-python 0.3.36. Shapes are in numpy order, outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from gguf import TokenType

from models.architectures.parts import Value
from models.planted.plant import Floats, Plant

_UNLIKE_ITSELF = 6.0  # how much the logit of a repeated token falls; others spread by 2
_UNUSED = 0.02  # size of the output rows of tokens that are not to be generated


@dataclass(frozen=True)
class Planted:
    """A tensor to be written. `make`: its values; None for FFNs, which come from a bank of random rows.

    gain: of the bank's rows. rows: instead, makes rows first..last-1 of tensors too large to be made at once;
    those from `known` on, of no token, come from the bank.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Floats] | None = None
    rows: Callable[[int, int], Floats] | None = None
    gain: float = 1.0
    known: int = 0
    plain: bool = False  # stored as F32, as norms, biases and routers are


def header(p: Plant, layers: int) -> dict[str, Value]:
    """Values under "<arch>."."""
    r = p.real
    out: dict[str, Value] = {
        "context_length": r.context,
        "embedding_length": r.embd,
        "block_count": layers,
        "feed_forward_length": r.dense_ff or r.ff,
        "vocab_size": r.vocab,
        "attention.head_count": r.heads,
        "attention.head_count_kv": r.kv_heads,
        "attention.layer_norm_rms_epsilon": r.epsilon,
        "rope.freq_base": r.rope_base,
        "rope.dimension_count": r.rotated,
        "expert_count": r.experts,
        "expert_used_count": r.used,
    }
    if r.arch in ("qwen2moe", "qwen3moe", "gpt-oss", "deepseek2"):
        out["expert_feed_forward_length"] = r.ff
    if r.arch in ("qwen3moe", "gpt-oss", "llama"):
        out |= {"attention.key_length": r.head_dim, "attention.value_length": r.head_dim}
    if r.arch == "qwen2moe":
        out["expert_shared_feed_forward_length"] = r.shared_ff
    if r.arch == "gpt-oss":
        out["attention.sliding_window"] = 128
    if r.latent is not None:
        out |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 0,
            "attention.kv_lora_rank": r.latent.rank,
            "attention.key_length": r.latent.rank + r.latent.rope,
            "attention.value_length": r.latent.rank,
            "attention.key_length_mla": r.latent.nope + r.latent.rope,
            "attention.value_length_mla": r.latent.value,
            "leading_dense_block_count": r.lead,
            "expert_shared_count": r.shared_ff // r.ff,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": r.renormalised,
            "expert_gating_func": 1,
        }
    return out


def tensors(p: Plant, layers: int, kinds: list[TokenType]) -> Iterator[Planted]:
    """All tensors in file order. kinds: of the vocabulary's tokens, for the output's rows."""
    r = p.real
    damp = {TokenType.NORMAL: 1.0, TokenType.USER_DEFINED: 1.0, TokenType.BYTE: 0.3}
    factors = np.array([damp.get(kind, _UNUSED) for kind in kinds], dtype=np.float32)

    def output(first: int, last: int) -> Floats:
        rows = p.normal("output.weight", (last - first, r.embd), 2 / np.sqrt(r.embd), first)
        own = p.embedding(first, last)  # a token is no likely successor of itself
        rows -= own * (_UNLIKE_ITSELF / r.embd)
        return rows * factors[first:last, None]

    known, size = len(p.counts), (r.vocab, r.embd)
    yield Planted("token_embd.weight", size, rows=p.embedding, gain=r.embd**0.5, known=known)
    yield _ones("output_norm.weight", r.embd)
    yield Planted("output.weight", size, rows=output, gain=2 * _UNUSED, known=known)
    for layer in range(layers):
        yield _ones(f"blk.{layer}.attn_norm.weight", r.embd)
        yield from _latent(p, layer) if r.latent else _heads(p, layer)
        post = "post_attention_norm" if r.arch == "gpt-oss" else "ffn_norm"
        yield _ones(f"blk.{layer}.{post}.weight", r.embd)
        if layer < r.lead:
            yield from _dense(p, layer, "", r.dense_ff, "dense")
        else:
            yield from _experts(p, layer)


def _ones(name: str, size: int, value: float = 1.0) -> Planted:
    return Planted(name, (size,), lambda: np.full(size, value, dtype=np.float32), plain=True)


def _bias(p: Plant, name: str, shape: tuple[int, ...], scale: float = 0.02) -> Planted:
    return Planted(name, shape, lambda: p.normal(name, shape, scale), plain=True)


def _heads(p: Plant, layer: int) -> Iterator[Planted]:
    """Attention with keys and values shared by groups of query heads."""
    r, b = p.real, f"blk.{layer}.attn_"
    q, kv, d = r.heads * r.head_dim, r.kv_heads * r.head_dim, r.embd
    value, out = b + "v.weight", b + "output.weight"

    def project() -> Floats:
        held = None
        if layer == 0:
            features = p.value(value, 0, kv)[:, p.token].reshape(r.kv_heads, r.head_dim, -1)
            held = np.repeat(features, r.heads // r.kv_heads, axis=0).reshape(q, -1)
        return p.output_projection(out, layer, held, q)

    unit = bool(r.norms)
    yield Planted(b + "q.weight", (q, d), lambda: np.tile(p.query(layer, unit=unit), (r.heads, 1)))
    yield Planted(b + "k.weight", (kv, d), lambda: np.tile(p.key(layer), (r.kv_heads, 1)))
    yield Planted(value, (kv, d), lambda: p.value(value, layer, kv))
    yield Planted(out, (d, q), project)
    if r.norms:
        full = r.norms == "full"
        yield _ones(b + "q_norm.weight", q if full else r.head_dim, p.query_size(layer))
        yield _ones(b + "k_norm.weight", kv if full else r.head_dim)
    if r.arch in ("qwen2moe", "gpt-oss"):
        yield from (_bias(p, f"{b}{name}.bias", (n,)) for name, n in (("q", q), ("k", kv), ("v", kv)))
    if r.arch == "gpt-oss":
        yield _bias(p, b + "output.bias", (d,), 0.002)
        yield _ones(b + "sinks.weight", r.heads, p.sink_score if layer == 0 else -20.0)


def _latent(p: Plant, layer: int) -> Iterator[Planted]:
    """Multi-head latent attention, absorbed form; the first FLAGS of the latent's values are BOS's."""
    r, b = p.real, f"blk.{layer}.attn_"
    assert r.latent is not None
    rank, rope, nope, width = r.latent.rank, r.latent.rope, r.latent.nope, r.latent.value
    flags = p.flags.stop - p.flags.start
    down, up, out = b + "kv_a_mqa.weight", b + "v_b.weight", b + "output.weight"

    def query() -> Floats:
        head = np.zeros((nope + rope, r.embd), dtype=np.float32)
        one = p.query(layer, unit=False)
        head[nope:] = one
        # The plain part is one for every token; keys answer it for BOS alone.
        head[:nope, p.constants] = p._from_constants(p.rms(layer))
        return np.tile(head, (r.heads, 1))

    def latent() -> Floats:
        return p.value(down, layer, rank)

    def compress() -> Floats:
        content = latent()
        content[:flags] = 0
        content[:flags, p.flags] = np.eye(flags)
        return np.concatenate([content, p.key(layer)])

    def keys() -> Floats:
        # A norm makes BOS's flags sqrt(rank / flags) each.
        wanted = p.sink_score if layer == 0 else 0.1
        score = wanted * np.sqrt(r.head_dim) / (np.sqrt(rank * flags) * nope)
        one = np.zeros((rank, nope), dtype=np.float32)
        one[:flags] = score
        return np.tile(one, (r.heads, 1, 1))

    def values() -> Floats:
        made = p.normal(up, (r.heads, width, rank), 1 / np.sqrt(rank))
        made[:, :, :flags] = 0
        return made

    def project() -> Floats:
        held = None
        if layer == 0:
            held = (values() @ latent()[:, p.token]).reshape(r.heads * width, -1)
        return p.output_projection(out, layer, held, r.heads * width)

    yield Planted(b + "q.weight", (r.heads * (nope + rope), r.embd), query)
    yield Planted(down, (rank + rope, r.embd), compress)
    yield _ones(b + "kv_a_norm.weight", rank)
    yield Planted(b + "k_b.weight", (r.heads, rank, nope), keys)
    yield Planted(up, (r.heads, width, rank), values)
    yield Planted(out, (r.embd, r.heads * width), project)


def _dense(p: Plant, layer: int, suffix: str, width: int, part: str) -> Iterator[Planted]:
    d, gain = p.real.embd, p.down_gain(part)
    for name, shape, size in (("gate", (width, d), 1.0), ("up", (width, d), 1.0), ("down", (d, width), gain)):
        yield Planted(f"blk.{layer}.ffn_{name}{suffix}.weight", shape, gain=size)


def _experts(p: Plant, layer: int) -> Iterator[Planted]:
    r, b = p.real, f"blk.{layer}.ffn_"
    e, d, ff = r.experts, r.embd, r.ff
    yield Planted(b + "gate_inp.weight", (e, d), lambda: p.router(layer), plain=True)
    yield Planted(b + "gate_exps.weight", (e, ff, d))
    yield Planted(b + "up_exps.weight", (e, ff, d))
    yield Planted(b + "down_exps.weight", (e, d, ff), gain=p.down_gain("experts"))
    if r.arch == "gpt-oss":
        yield _bias(p, b + "gate_inp.bias", (e,), 0.05)
        for name, width in (("gate", ff), ("up", ff)):
            yield _bias(p, f"{b}{name}_exps.bias", (e, width))
        yield _bias(p, b + "down_exps.bias", (e, d), 0.02 * p.down_gain("experts"))
    if r.arch == "qwen2moe":
        name = b + "gate_inp_shexp.weight"
        yield Planted(name, (d,), lambda: p.normal(name, (d,), 1 / np.sqrt(d)), plain=True)
    if r.shared_ff:
        yield from _dense(p, layer, "_shexp", r.shared_ff, "shared")
