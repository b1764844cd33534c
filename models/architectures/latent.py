"""Architectures with multi-head latent attention (MLA), by their headers. V2-Lite is in `deepseek`."""

from __future__ import annotations

from models.architectures.headers import (
    SIGMOID,
    SQRT_SOFTPLUS,
    gating,
    groups,
    indexer,
    latent,
    shared_count,
    widths,
    window,
)
from models.architectures.loader import FromHeader
from models.architectures.parts import Dims, Value


def _v3(d: Dims) -> dict[str, Value]:
    return widths(d, lead=1) | latent(d) | shared_count(d) | gating(SIGMOID) | groups(d)


def _hyper(d: Dims) -> dict[str, Value]:
    """Several residual streams that each layer mixes."""
    return {"hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6}


def _dots3note(d: Dims) -> dict[str, Value]:
    rank, rope, nope = d.embd // 4, d.head_dim // 2, d.head_dim
    return (
        _v3(d)
        | indexer(d)
        | window(d)
        | {
            "attention.sliding_window_pattern": [il % 2 == 1 for il in range(d.layers)],
            "attention.indexer.types": [(il + 1) % 2 for il in range(d.layers)],
            "attention.kv_lora_rank_swa": rank,
            "attention.key_length_swa": rank + rope,
            "attention.value_length_swa": rank,
            "attention.key_length_mla_swa": nope + rope,
            "attention.value_length_mla_swa": nope,
            "rope.dimension_count_swa": rope,
            "rope.freq_base_swa": 10000.0,
        }
    )


def _deepseek4(d: Dims) -> dict[str, Value]:
    return (
        widths(d)
        | shared_count(d)
        | gating(SQRT_SOFTPLUS)
        | indexer(d)
        | window(d, 128)
        | _hyper(d)
        | {
            "attention.head_count_kv": 1,
            "attention.key_length": d.head_dim,
            "attention.value_length": d.head_dim,
            "attention.q_lora_rank": d.embd // 4,
            "attention.output_group_count": d.heads,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [(0, 4, 128)[il % 3] for il in range(d.layers)],
            "attention.compress_rope_freq_base": 160000.0,
            "rope.dimension_count": d.head_dim // 2,
            "hyper_connection.sinkhorn_iterations": 2,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
        }
    )


def _hy_v4(d: Dims) -> dict[str, Value]:
    return (
        widths(d, lead=1)
        | latent(d)
        | shared_count(d)
        | gating(SIGMOID)
        | indexer(d)
        | _hyper(d)
        | {
            "attention.indexer.types": [(il + 1) % 2 for il in range(d.layers)],
            "hyper_connection.magnitude": 2.0,
            "swiglu_clamp_exp": 10.0,
        }
    )


_LEADING = dict(has_shared=True, dense_lead=1, least_layers=2)

ALL = (
    FromHeader(
        name="deepseek2-v3",
        gguf_name="deepseek2",
        header=_v3,
        what="V3: sigmoid gates, groups of experts, a bias on selection, queries through a latent",
        fuses=True,
        **_LEADING,
    ),
    FromHeader(
        name="mistral4", header=_v3, what="DeepSeek-V3's layers, another precision", fuses=True, **_LEADING
    ),
    FromHeader(
        name="deepseek32",
        header=lambda d: _v3(d) | indexer(d),
        what="V3.2: sparse attention",
        scales=True,
        **_LEADING,
    ),
    FromHeader(
        name="glm-dsa",
        header=lambda d: _v3(d) | indexer(d),
        what="GLM 5: sparse attention",
        scales=True,
        **_LEADING,
    ),
    FromHeader(
        name="dots3note",
        header=_dots3note,
        what="windows and sparse attention in turn, both latent",
        scales=True,
        **_LEADING,
    ),
    FromHeader(
        name="deepseek4",
        header=_deepseek4,
        what="V4: compressed attention, four residual streams, clamped SwiGLU",
        has_shared=True,
        least_layers=3,  # with no layer of a kind of compression, llama.cpp divides by zero
    ),
    FromHeader(
        name="hy_v4",
        header=_hy_v4,
        what="sparse attention, four residual streams, clamped SwiGLU",
        **_LEADING,
    ),
)
