"""Sizes of spice-tiny."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """llama.cpp's `deepseek2`: latent attention, a leading dense layer, shared and routed experts.

    nope, rope: plain and rotated values of a query head; value: values of a value head; rank: of the latent.
    tie: share of the embedding that is added to the output matrix, so that copying a word is easily learned.
    Rows are multiples of 256 wherever weights are many, so that the K-quants fit.
    """

    vocab: int = 2048
    embd: int = 256
    layers: int = 4
    dense_layers: int = 1
    heads: int = 8
    nope: int = 16
    rope: int = 16
    value: int = 32
    rank: int = 128
    dense_ff: int = 768
    experts: int = 16
    used: int = 4
    ff: int = 256
    shared: int = 1
    weights_scale: float = 2.0
    rope_base: float = 10000.0
    eps: float = 1e-5
    context: int = 1024
    tie: float = 0.1

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers
