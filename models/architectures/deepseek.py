"""The DeepSeek family: a leading dense layer, fine-grained and shared experts; V2: latent attention (MLA)."""

from __future__ import annotations

from models.architectures.parts import Dims, Spelled, Tensor, Value, attention, dense, moe

_LEAD = 1


def _mla_sizes(d: Dims) -> tuple[int, int, int]:
    """Rank of the latent, rotated and plain values of a query head (V2-Lite at embd 2048: 512, 64, 128)."""
    return d.embd // 4, d.head_dim // 2, d.head_dim


def _mla(d: Dims, il: int) -> list[Tensor]:
    """V2-Lite's attention: plain queries, keys and values through a latent (absorbed form: k_b and v_b)."""
    b = f"blk.{il}."
    rank, rope, nope = _mla_sizes(d)
    return [
        Tensor(b + "attn_norm.weight", (d.embd,), "norm"),
        Tensor(b + "attn_q.weight", (d.heads * (nope + rope), d.embd)),
        Tensor(b + "attn_kv_a_mqa.weight", (rank + rope, d.embd)),
        Tensor(b + "attn_kv_a_norm.weight", (rank,), "norm"),
        Tensor(b + "attn_k_b.weight", (d.heads, rank, nope), gain=(nope / rank) ** 0.5),
        Tensor(b + "attn_v_b.weight", (d.heads, nope, rank)),
        Tensor(b + "attn_output.weight", (d.embd, d.heads * nope), gain=d.branch_gain),
    ]


def _experts_header(d: Dims) -> dict[str, Value]:
    if d.shared_ff % d.ff:
        raise ValueError(f"shared width {d.shared_ff} is no multiple of the expert width {d.ff}")
    return {
        "feed_forward_length": d.dense_ff,
        "leading_dense_block_count": _LEAD,
        "expert_feed_forward_length": d.ff,
        "expert_shared_count": d.shared_ff // d.ff,
        "expert_weights_scale": 1.0,
    }


def _deepseek2(d: Dims) -> dict[str, Value]:
    rank, rope, nope = _mla_sizes(d)
    return _experts_header(d) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": nope,
        "rope.dimension_count": rope,
        "expert_gating_func": 1,
        "expert_weights_norm": False,
    }


def _ffn(d: Dims, il: int) -> list[Tensor]:
    return dense(d, il) if il < _LEAD else moe(d, il, shared=True)


ALL = (
    Spelled(
        name="deepseek2",
        layer=lambda d, il: _mla(d, il) + _ffn(d, il),
        header=_deepseek2,
        what="V2-Lite: latent attention, a dense layer first, shared experts",
        fuses=True,
        has_shared=True,
        dense_lead=_LEAD,
    ),
    Spelled(
        name="deepseek",
        layer=lambda d, il: attention(d, il) + _ffn(d, il),
        header=_experts_header,
        what="a dense layer first, shared experts",
        has_shared=True,
        dense_lead=_LEAD,
    ),
)
