"""Shapes of real MoE models, and how strongly their routing follows token, context and depth.

Sources of the shapes: the models' published config.json files, with the names llama.cpp gives to their values
(src/models/<arch>.cpp of llama-cpp-python 0.3.36). File types are those of the GGUFs that people run.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """How the routing of a model is planted; see `models.planted.plant` for the arithmetic.

    features: width of what the routers read of the token, and again of the context. context: strength of
    the context against the token. decay: exponent of the attention's power law over distance. sink: weight
    of the first token (BOS) in that attention, against 1 for the token itself. drift: variance that a layer
    adds, against that of the features. slow: part of the drift that attention adds, the rest comes from
    experts. skew: spread of the experts' popularity against that of the logits. spread: of the logits.
    """

    features: int = 16
    context: float = 1.5
    decay: float = 0.9
    sink: float = 6.0
    drift: float = 0.053
    slow: float = 0.1
    skew: float = 0.0
    spread: float = 1.2


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: rank of keys and values, rotated and plain part of a head, value width."""

    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Real:
    """The shape of one model.

    ff: width of one expert; shared_ff: of all shared experts together; dense_ff: of the `lead` dense layers.
    norms: "head" or "full", norms on queries and keys. renormalised: gate weights of a token sum to one.
    neox: rotary pairs are half a head apart instead of adjacent. target: name in `models.routing.TARGETS`.
    """

    name: str
    arch: str
    layers: int
    embd: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    used: int
    ff: int
    vocab: int
    file_type: str
    context: int
    rope_base: float
    target: str
    recipe: Recipe = field(default_factory=Recipe)
    lead: int = 0
    dense_ff: int = 0
    shared_ff: int = 0
    norms: str = ""
    renormalised: bool = False
    neox: bool = True
    epsilon: float = 1e-6
    latent: Latent | None = None

    @property
    def rotated(self) -> int:
        """Rotated values of a head."""
        return self.latent.rope if self.latent else self.head_dim


REAL: dict[str, Real] = {
    r.name: r
    for r in (
        Real(
            "deepseek-v2-lite", "deepseek2", layers=27, embd=2048, heads=16, kv_heads=16, head_dim=192,
            experts=64, used=6, ff=1408, vocab=102400, file_type="Q5_K_M", context=163840, rope_base=1e4,
            target="deepseek-v2-lite", lead=1, dense_ff=10944, shared_ff=2816, neox=False,
            latent=Latent(rank=512, rope=64, nope=128, value=128),
        ),
        Real(
            "qwen3-30b-a3b", "qwen3moe", layers=48, embd=2048, heads=32, kv_heads=4, head_dim=128,
            experts=128, used=8, ff=768, vocab=151936, file_type="Q4_K_M", context=40960, rope_base=1e6,
            recipe=Recipe(context=2.8, decay=0.85, drift=0.03, skew=0.92),
            target="qwen3-30b-a3b", dense_ff=6144, norms="head", renormalised=True,
        ),
        Real(
            "gpt-oss-20b", "gpt-oss", layers=24, embd=2880, heads=64, kv_heads=8, head_dim=64,
            experts=32, used=4, ff=2880, vocab=201088, file_type="MXFP4", context=131072, rope_base=150000.0,
            recipe=Recipe(context=1.3, decay=0.85, drift=0.045, skew=0.35),
            target="gpt-oss-120b", renormalised=True, epsilon=1e-5,
        ),
        Real(
            "qwen1.5-moe-a2.7b", "qwen2moe", layers=24, embd=2048, heads=16, kv_heads=16, head_dim=128,
            experts=60, used=4, ff=1408, vocab=151936, file_type="Q5_K_M", context=8192, rope_base=1e6,
            recipe=Recipe(context=1.6, decay=1.0, drift=0.031),
            target="qwen1.5-moe-a2.7b", dense_ff=5632, shared_ff=5632,
        ),
        Real(
            "olmoe-1b-7b", "olmoe", layers=16, embd=2048, heads=16, kv_heads=16, head_dim=128,
            experts=64, used=8, ff=1024, vocab=50304, file_type="Q4_K_M", context=4096, rope_base=1e4,
            recipe=Recipe(context=3.6, decay=0.78, drift=0.045, skew=0.3),
            target="olmoe-1b-7b", norms="full", epsilon=1e-5,
        ),
        Real(
            "mixtral-8x7b", "llama", layers=32, embd=4096, heads=32, kv_heads=8, head_dim=128,
            experts=8, used=2, ff=14336, vocab=32000, file_type="Q4_K_M", context=32768, rope_base=1e6,
            recipe=Recipe(context=1.0),
            target="", renormalised=True, neox=False, epsilon=1e-5,
        ),
    )
}  # fmt: skip
