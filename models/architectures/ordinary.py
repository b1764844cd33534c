"""Architectures with ordinary attention over the whole text, described by their headers."""

from __future__ import annotations

from models.architectures.headers import (
    SIGMOID,
    SOFTMAX,
    gating,
    groups,
    sections,
    shared_count,
    shared_width,
    widths,
)
from models.architectures.loader import FromHeader
from models.architectures.parts import Dims, Value


def _one_width(d: Dims) -> dict[str, Value]:
    """For loaders that read the experts' width from feed_forward_length, which is `ff` by default."""
    return {"attention.head_count_kv": d.kv_heads}


def _scales(logits: float = 1.0) -> dict[str, Value]:
    """Granite's factors; the real models have others, which do not suit random weights."""
    return {"logit_scale": logits, "residual_scale": 0.8, "embedding_scale": 1.5, "attention.scale": 0.125}


def _whole_head(d: Dims) -> dict[str, Value]:
    return {"attention.key_length": d.head_dim, "attention.value_length": d.head_dim}


ALL = (
    FromHeader(
        name="llama4",
        header=lambda d: widths(d) | {"interleave_moe_layer_step": 1},
        what="gate weight applied to the expert's input; attention in chunks",
        has_shared=True,
        least_layers=4,  # each fourth is without RoPE, and llama.cpp aborts if there is none
    ),
    FromHeader(
        name="llama4-interleaved",
        gguf_name="llama4",
        header=lambda d: widths(d) | {"interleave_moe_layer_step": 2},
        what="Maverick: every second layer is dense",
        has_shared=True,
        dense_lead=1,
        least_layers=4,
    ),
    FromHeader(name="phimoe", header=_one_width, what="LayerNorm with biases, biases in attention"),
    FromHeader(
        name="qwen3vlmoe",
        header=lambda d: widths(d) | _whole_head(d) | sections(d) | {"n_deepstack_layers": 0},
        what="text part of the vision model: RoPE in sections",
    ),
    FromHeader(
        name="granitemoe",
        header=lambda d: _one_width(d) | _scales() | shared_width(d),
        what="scaled embedding, residual stream and logits; shared experts",
    ),
    FromHeader(
        name="glm4moe",
        header=lambda d: widths(d, lead=1) | shared_count(d) | gating(SIGMOID),
        what="sigmoid gates with a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="glm4moe-mtp",
        gguf_name="glm4moe",
        header=lambda d: widths(d, lead=1) | shared_count(d) | gating(SIGMOID) | {"nextn_predict_layers": 1},
        what="with the layer that predicts a second token, which llama.cpp does not load",
        has_shared=True,
        dense_lead=1,
        least_layers=3,
        unused_layers=1,
    ),
    FromHeader(
        name="ernie4_5-moe",
        header=lambda d: widths(d, lead=1) | shared_width(d) | {"interleave_moe_layer_step": 1},
        what="bias on selection, shared experts",
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="hunyuan-moe",
        header=lambda d: widths(d) | shared_width(d),
        what="norms on queries and keys after RoPE, shared expert",
        has_shared=True,
    ),
    FromHeader(
        name="minimax-m2",
        header=lambda d: widths(d) | _whole_head(d) | {"expert_gating_func": SIGMOID},
        what="sigmoid gates with a bias on selection",
    ),
    FromHeader(
        name="bailingmoe",
        header=lambda d: widths(d, lead=1) | shared_count(d) | gating(SOFTMAX, scale=1.0),
        what="Ling: shared experts",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="bailingmoe2",
        header=lambda d: widths(d, lead=1) | shared_width(d) | shared_count(d) | gating(SIGMOID) | groups(d),
        what="Ling 2: sigmoid gates, groups of experts, a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="grovemoe",
        header=lambda d: (
            widths(d)
            | _whole_head(d)
            | {
                "expert_chunk_feed_forward_length": d.ff // 2,
                "expert_group_scale": 0.05,
                "experts_per_group": 2,
            }
        ),
        what="adjugate experts (chexps), one for two experts: a token may choose one twice",
    ),
    FromHeader(
        name="dbrx",
        header=lambda d: _one_width(d) | {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0},
        what="LayerNorm, clamped queries, keys and values",
    ),
    FromHeader(
        name="grok",
        header=lambda d: (
            widths(d)
            | {
                "logit_scale": 1.0,
                "embedding_scale": 1.0,
                "attention.output_scale": 0.125,
            }
        ),
        what="GELU experts beside a dense block, capped router scores",
    ),
    FromHeader(name="arctic", header=_one_width, what="experts beside a dense block, in every layer"),
    FromHeader(
        name="dots1",
        header=lambda d: (
            widths(d, lead=1)
            | shared_count(d)
            | gating(SIGMOID)
            | {"attention.head_count_kv": d.heads}  # its graph knows no others
        ),
        what="sigmoid gates with a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="hy_v3",
        header=lambda d: widths(d, lead=1) | _whole_head(d) | shared_width(d) | gating(SIGMOID),
        what="sigmoid gates with a bias on selection",
        fuses=True,
        scales=True,
        either=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="llada-moe",
        header=lambda d: widths(d) | {"attention.causal": False},
        what="diffusion: attention in both directions",
    ),
    FromHeader(
        name="rnd1",
        header=lambda d: widths(d) | _whole_head(d) | {"attention.causal": False},
        what="diffusion: attention in both directions",
    ),
    FromHeader(
        name="deepseek2-ocr",
        header=lambda d: widths(d, lead=1) | shared_count(d) | {"attention.head_count_kv": d.heads},
        what="text part of the vision model: DeepSeek's layers without latent attention",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="nomic-bert-moe",
        header=lambda d: {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.causal": False,
            "moe_every_n_layers": 2,
            "expert_weights_scale": 1.0,
        },
        what="text encoder: experts without a gate projection (GELU) in every second layer",
        encoder=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="granite",
        header=lambda d: _one_width(d) | _scales() | shared_width(d),
        what="granitemoe under the name of the dense models",
    ),
    FromHeader(name="minicpm", header=_one_width, what="Mixtral's experts, scaled residual stream"),
    FromHeader(
        name="llama-embed",
        header=lambda d: _one_width(d) | {"attention.causal": False},
        what="Mixtral with attention in both directions",
        encoder=True,
        scales=True,
    ),
    FromHeader(name="mistral3", header=_one_width, what="Mixtral under its newer name", scales=True),
)
