"""Architectures with ordinary attention and one kind of MoE layer throughout."""

from __future__ import annotations

from models.architectures.parts import Architecture, Dims, Value, attention, moe


def _gqa(d: Dims) -> int:
    """Key-value heads where the architecture shares them: one per two query heads."""
    return d.heads // 2


def _qwen2moe(d: Dims) -> dict[str, Value]:
    return {
        "feed_forward_length": d.shared_ff,
        "expert_feed_forward_length": d.ff,
        "expert_shared_feed_forward_length": d.shared_ff,
    }


def _qwen3moe(d: Dims) -> dict[str, Value]:
    return {
        "attention.head_count_kv": _gqa(d),
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "expert_feed_forward_length": d.ff,
    }


ALL = (
    Architecture(
        "qwen2moe",
        lambda d, il: attention(d, il, bias=True) + moe(d, il, shared=True, shared_gate=True),
        _qwen2moe,
        has_shared=True,
    ),
    Architecture(
        "qwen3moe",
        lambda d, il: attention(d, il, kv_heads=_gqa(d), head_norm=d.head_dim) + moe(d, il),
        _qwen3moe,
    ),
    Architecture("olmoe", lambda d, il: attention(d, il, head_norm=d.embd) + moe(d, il)),
    Architecture(
        "llama",
        lambda d, il: attention(d, il, kv_heads=_gqa(d)) + moe(d, il),
        lambda d: {"attention.head_count_kv": _gqa(d)},
    ),
)
