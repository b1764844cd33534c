"""Architectures with ordinary attention and one kind of MoE layer throughout."""

from __future__ import annotations

from models.architectures.parts import Dims, Spelled, Value, attention, moe


def _qwen2moe(d: Dims) -> dict[str, Value]:
    return {
        "feed_forward_length": d.shared_ff,
        "expert_feed_forward_length": d.ff,
        "expert_shared_feed_forward_length": d.shared_ff,
    }


def _qwen3moe(d: Dims) -> dict[str, Value]:
    return {
        "attention.head_count_kv": d.kv_heads,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "expert_feed_forward_length": d.ff,
    }


ALL = (
    Spelled(
        name="qwen2moe",
        layer=lambda d, il: attention(d, il, bias=True) + moe(d, il, shared=True, shared_gate=True),
        header=_qwen2moe,
        what="shared expert behind a gate of its own",
        has_shared=True,
    ),
    Spelled(
        name="qwen3moe",
        layer=lambda d, il: attention(d, il, kv_heads=d.kv_heads, head_norm=d.head_dim) + moe(d, il),
        header=_qwen3moe,
        what="weights of the chosen experts sum to one",
        scales=True,
    ),
    Spelled(
        name="olmoe",
        layer=lambda d, il: attention(d, il, head_norm=d.embd) + moe(d, il),
        what="weights do not sum to one",
    ),
    Spelled(
        name="llama",
        layer=lambda d, il: attention(d, il, kv_heads=d.kv_heads) + moe(d, il),
        header=lambda d: {"attention.head_count_kv": d.kv_heads},
        what="Mixtral",
        scales=True,
    ),
)
