"""Header values that many architectures share."""

from __future__ import annotations

from models.architectures.parts import Dims, Value

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SQRT_SOFTPLUS = 1, 2, 3, 4  # llama.cpp's expert_gating_func


def widths(d: Dims, *, lead: int = 0) -> dict[str, Value]:
    """Grouped-query attention, and experts and dense layers of different widths."""
    values: dict[str, Value] = {
        "attention.head_count_kv": d.kv_heads,
        "feed_forward_length": d.dense_ff,
        "expert_feed_forward_length": d.ff,
    }
    return values | ({"leading_dense_block_count": lead} if lead else {})


def shared_width(d: Dims) -> dict[str, Value]:
    """All shared experts as one, by its width."""
    return {"expert_shared_feed_forward_length": d.shared_ff} if d.shared else {}


def shared_count(d: Dims) -> dict[str, Value]:
    """Shared experts as wide as routed ones, by their number."""
    if d.shared_ff % d.ff:
        raise ValueError(f"shared width {d.shared_ff} is no multiple of the expert width {d.ff}")
    return {"expert_shared_count": d.shared_ff // d.ff}


def gating(kind: int, *, norm: bool = True, scale: float = 1.5) -> dict[str, Value]:
    """How router scores become weights. norm: they sum to one before `scale`."""
    return {"expert_gating_func": kind, "expert_weights_norm": norm, "expert_weights_scale": scale}


def groups(d: Dims) -> dict[str, Value]:
    """Experts in groups, of which a token may use half (DeepSeek-V3); none with too few experts for that."""
    for n in (8, 4):
        if d.experts % n == 0 and d.experts // n >= 2 and d.experts // 2 >= d.used:
            return {"expert_group_count": n, "expert_group_used_count": n // 2}
    return {}


def window(d: Dims, size: int = 16) -> dict[str, Value]:
    """Sliding-window attention; which layers is the architecture's own pattern."""
    return {"attention.sliding_window": size}


def alternating(d: Dims, size: int = 16) -> dict[str, Value]:
    """Sliding-window attention in every layer but each second one, spelled out layer by layer."""
    return window(d, size) | {"attention.sliding_window_pattern": [il % 2 == 0 for il in range(d.layers)]}


def latent(d: Dims, *, query: bool = True) -> dict[str, Value]:
    """Multi-head latent attention (MLA). query: queries through a latent, too."""
    rank, rope, nope = d.embd // 4, d.head_dim // 2, d.head_dim
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": rank if query else 0,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": nope,
        "rope.dimension_count": rope,
    }


def indexer(d: Dims) -> dict[str, Value]:
    """DeepSeek sparse attention: an indexer chooses the keys (here: all of a short text)."""
    return {
        "attention.indexer.head_count": d.heads,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 1024,
    }


def delta_net(d: Dims) -> dict[str, Value]:
    """Gated delta net in all layers but each second one (Qwen3-Next: each fourth)."""
    return {
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": d.embd,
        "ssm.state_size": d.head_dim,
        "ssm.time_step_rank": d.heads,
        "ssm.group_count": d.kv_heads,
    }


def kimi_delta(d: Dims) -> dict[str, Value]:
    """Kimi delta attention (KDA) in all layers but each second one, which has latent attention."""
    return {
        "attention.head_count_kv": [0 if il % 2 == 0 else 1 for il in range(d.layers)],
        "ssm.conv_kernel": 4,
        "kda.head_dim": d.head_dim,
        "kda.gate_lower_bound": -5.0,
    }


def mamba(d: Dims, *, rank: int, groups: int = 1) -> dict[str, Value]:
    """State-space layers, twice as wide as the residual stream."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * d.embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": rank,
        "ssm.group_count": groups,
    }


def sections(d: Dims) -> dict[str, Value]:
    """RoPE in sections for text and image positions."""
    quarter = d.head_dim // 8
    return {"rope.dimension_sections": [quarter, quarter, quarter, quarter]}
