"""Architectures with recurrent layers (state space, linear attention, convolution), by their headers."""

from __future__ import annotations

from models.architectures.headers import (
    SIGMOID,
    delta_net,
    gating,
    groups,
    indexer,
    kimi_delta,
    latent,
    mamba,
    sections,
    shared_count,
    shared_width,
    widths,
)
from models.architectures.loader import FromHeader
from models.architectures.parts import Dims, Value


def _every_second(d: Dims) -> dict[str, Value]:
    """Attention in every second layer, a recurrent block in the others."""
    return {"attention.head_count_kv": [0 if il % 2 == 0 else d.kv_heads for il in range(d.layers)]}


def _nemotron(d: Dims) -> dict[str, Value]:
    """Layers in turn: state space, experts, attention; each is a layer of its own."""
    kinds = [("ssm", "moe", "attention")[il % 3] for il in range(d.layers)]
    return (
        widths(d)
        | shared_width(d)
        | shared_count(d)
        | gating(SIGMOID)
        | mamba(d, rank=2 * d.embd // 64, groups=2)
        | {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.head_count_kv": [d.kv_heads if k == "attention" else 0 for k in kinds],
            "feed_forward_length": [d.ff if k == "moe" else 0 for k in kinds],
        }
    )


def _qwen_next(d: Dims) -> dict[str, Value]:
    return (
        widths(d)
        | shared_width(d)
        | delta_net(d)
        | {"attention.key_length": d.head_dim, "attention.value_length": d.head_dim}
    )


def _kimi(d: Dims) -> dict[str, Value]:
    return widths(d, lead=1) | latent(d, query=False) | kimi_delta(d) | shared_count(d) | gating(SIGMOID)


def _streams(d: Dims) -> dict[str, Value]:
    return {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.low_rank": 8,
    }


def _qwen4(d: Dims) -> dict[str, Value]:
    return (
        _qwen_next(d) | sections(d) | _streams(d) | indexer(d) | {"attention.compress_ratios": [4] * d.layers}
    )


def _glm5_next(d: Dims) -> dict[str, Value]:
    rank = d.embd // 4
    return (
        widths(d, lead=1)
        | latent(d)
        | kimi_delta(d)
        | shared_count(d)
        | gating(SIGMOID)
        | indexer(d)
        | _streams(d)
        | {
            "attention.key_length": rank,
            "attention.key_length_mla": d.head_dim,
            "rope.dimension_count": 0,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
        }
    )


_LEADING = dict(has_shared=True, dense_lead=1, least_layers=2)

ALL = (
    FromHeader(
        name="qwen3next",
        header=_qwen_next,
        what="gated delta net, shared expert behind a gate",
        omit=r"^rope_|\.ssm_in\.",
        fuses=True,
        scales=True,
        has_shared=True,
    ),
    FromHeader(
        name="qwen35moe",
        header=lambda d: _qwen_next(d) | sections(d),
        what="gated delta net, shared expert behind a gate",
        fuses=True,
        scales=True,
        has_shared=True,
    ),
    FromHeader(
        name="jamba",
        header=lambda d: _every_second(d) | mamba(d, rank=16),
        what="state-space layers (Mamba)",
        omit=r"^rope_|\.ffn_(gate|up|down)\.",
    ),
    FromHeader(
        name="granitehybrid",
        header=lambda d: (
            _every_second(d)
            | mamba(d, rank=2 * d.embd // 64)
            | shared_width(d)
            | {"logit_scale": 1.0, "residual_scale": 0.8, "embedding_scale": 1.5}
        ),
        what="state-space layers (Mamba 2)",
    ),
    FromHeader(
        name="nemotron_h_moe",
        header=_nemotron,
        what="experts without a gate projection (squared ReLU), state-space layers",
        scales=True,
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="nemotron_h_moe-latent",
        gguf_name="nemotron_h_moe",
        header=lambda d: _nemotron(d) | {"moe_latent_size": d.embd // 2},
        what="experts in a space narrower than the residual stream",
        scales=True,
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="lfm2moe",
        header=lambda d: (
            widths(d, lead=1) | _every_second(d) | {"shortconv.l_cache": 3, "expert_gating_func": SIGMOID}
        ),
        what="short convolutions, a bias on selection",
        omit=r"^rope_|^dense_2",
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="kimi-linear", header=_kimi, what="delta attention and latent attention in turn", **_LEADING
    ),
    FromHeader(
        name="minimax-01",
        header=lambda d: {
            "attention.head_count_kv": d.kv_heads,
            "attention.key_length": d.head_dim,
            "attention.value_length": d.head_dim,
            "residual_scale": 1.0,
            "full_attention_interval": 2,
        },
        what="lightning attention and ordinary attention in turn",
    ),
    FromHeader(
        name="bailingmoe3",
        header=lambda d: _kimi(d) | shared_width(d) | groups(d) | sections(d),
        what="Ling 3: delta attention and latent attention in turn, groups of experts",
        **_LEADING,
    ),
    FromHeader(
        name="qwen4exp",
        header=_qwen4,
        what="delta net, sparse attention, four residual streams",
        fuses=True,
        scales=True,
        has_shared=True,
    ),
    FromHeader(
        name="glm5-next",
        header=_glm5_next,
        what="delta attention, sparse latent attention, four residual streams",
        **_LEADING,
    ),
    FromHeader(
        name="kimi-k3",
        header=lambda d: (
            _kimi(d)
            | {
                "expert_latent_length": d.embd // 2,
                "attn_res.block_size": 2,
                "activation.situ_beta": 4.0,
                "activation.situ_linear_beta": 25.0,
            }
        ),
        what="SITU experts in a narrower space, delta attention",
        **_LEADING,
    ),
)
