"""Architectures with sliding-window attention in some layers, described by their headers."""

from __future__ import annotations

from models.architectures.headers import (
    SIGMOID,
    alternating,
    gating,
    shared_count,
    shared_width,
    widths,
    window,
)
from models.architectures.loader import FromHeader
from models.architectures.parts import Dims, Value


def _gemma4(d: Dims) -> dict[str, Value]:
    return (
        widths(d)
        | alternating(d)
        | {
            "attention.key_length": d.head_dim,
            "attention.value_length": d.head_dim,
            "attention.key_length_swa": d.head_dim,
            "attention.value_length_swa": d.head_dim,
            "rope.dimension_count_swa": d.head_dim,
            "rope.freq_base_swa": 10000.0,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }
    )


def _two_head_lengths(d: Dims) -> dict[str, Value]:
    return {
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "rope.freq_base_swa": 10000.0,
    }


ALL = (
    FromHeader(
        name="gpt-oss",
        header=lambda d: widths(d) | window(d),
        what="biases on experts and router, attention sinks; real files have MXFP4 experts",
    ),
    FromHeader(
        name="gemma4",
        header=_gemma4,
        what="GELU experts beside a dense block, scaled router input",
        omit="",
        fuses=True,
        scales=True,
    ),
    FromHeader(
        name="afmoe",
        header=lambda d: widths(d, lead=1) | window(d) | shared_count(d) | gating(SIGMOID),
        what="gated attention, sigmoid gates with a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="cohere2moe",
        header=lambda d: (
            widths(d, lead=1)
            | window(d)
            | shared_width(d)
            | shared_count(d)
            | gating(SIGMOID)
            | {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 1.0}
        ),
        what="experts in parallel with attention",
        fuses=True,
        scales=True,
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="exaone-moe",
        header=lambda d: widths(d, lead=1) | window(d) | shared_count(d) | shared_width(d) | gating(SIGMOID),
        what="sigmoid gates with a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="granite_swa",
        header=lambda d: (
            {"attention.head_count_kv": d.kv_heads, "logit_scale": 1.0} | alternating(d) | shared_width(d)
        ),
        what="attention sinks, shared experts",
        fuses=True,
    ),
    FromHeader(
        name="laguna",
        header=lambda d: widths(d, lead=1) | window(d) | shared_width(d) | gating(SIGMOID),
        what="sigmoid gates with a bias on selection",
        has_shared=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="maple",
        header=lambda d: widths(d) | alternating(d) | {"swiglu_clamp_exp": 7.0},
        what="clamped SwiGLU",
    ),
    FromHeader(name="mellum", header=lambda d: widths(d) | window(d), what="windows", scales=True),
    FromHeader(
        name="mimo2",
        header=lambda d: widths(d) | alternating(d) | _two_head_lengths(d),
        what="attention sinks, sigmoid gates with a bias on selection",
        either=True,
        dense_lead=1,
        least_layers=2,
    ),
    FromHeader(
        name="smallthinker",
        header=lambda d: widths(d) | window(d) | {"expert_gating_func": SIGMOID},
        what="router before attention, ReLU experts",
    ),
    FromHeader(
        name="step35",
        header=lambda d: (
            widths(d)
            | alternating(d)
            | shared_width(d)
            | gating(SIGMOID)
            | {"rope.freq_base_swa": 10000.0, "swiglu_clamp_exp": [7.0] * d.layers}
        ),
        what="clamped SwiGLU, gated attention, sigmoid gates with a bias on selection",
        either=True,
        dense_lead=1,
        least_layers=2,
    ),
)
