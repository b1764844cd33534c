"""The parts that architectures are built from: dimensions, tensors, attention and feed-forward blocks.

Shapes are in numpy order (outermost first): a matrix that maps n_in to n_out is [n_out, n_in], experts are
[experts, n_out, n_in]; GGUF lists the same numbers backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Value = int | float | bool | str | list[int] | list[float] | list[bool]


@dataclass(frozen=True)
class Dims:
    """Sizes of one model. `shared_ff`: width of all shared experts together; `dense_ff`: of dense layers."""

    layers: int = 2
    embd: int = 256
    experts: int = 8
    used: int = 2
    ff: int = 256
    vocab: int = 512
    shared_ff: int = 512
    dense_ff: int = 512
    context: int = 4096
    fused_gate_up: bool = False
    expert_scales: bool = False
    shared: bool = True

    @property
    def heads(self) -> int:
        """Attention heads: of 128 values in models of real width, at least four heads in small ones."""
        return max(4, self.embd // 128)

    @property
    def head_dim(self) -> int:
        return self.embd // self.heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads where the architecture shares them: one per two query heads."""
        return self.heads // 2

    @property
    def branch_gain(self) -> float:
        """Gain of what a layer adds to the residual stream.

        All layers together add about as much variance as the embedding has, so tokens stay apart in deep
        layers, too, and the routing there follows the token. (With a gain of one the stream converges to what
        tokens share.)
        """
        return min(0.7, (1.0 / self.layers) ** 0.5)


@dataclass(frozen=True)
class Tensor:
    """One tensor to be filled: `role` says how (see `models.synth`), `gain` scales its random weights.

    Roles: matrix, experts (matrices per expert), router, vector_matrix (a matrix of one row), kernel (of a
    convolution), norm and scale (near one), bias, decay (negative), embedding, output.
    """

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to make a model of one llama.cpp architecture.

    name: what `synth` calls it; gguf_name: `general.architecture`, if that is another (variants).
    header: values under "<arch>." beyond the common ones; what: one line on what is special about it.
    fuses: the loader takes gate and up as one tensor; scales: the graph multiplies by a scale of each expert;
    has_shared: the loader demands shared experts; dense_lead: leading dense layers; least_layers: fewer fail;
    unused_layers: last ones that llama.cpp does not compute; encoder: gives embeddings, no logits.
    Subclasses say where the tensors come from: `Spelled`, `loader.FromHeader`.
    """

    name: str
    gguf_name: str = ""
    header: Callable[[Dims], dict[str, Value]] = field(default=lambda d: {})
    what: str = ""
    fuses: bool = False
    scales: bool = False
    has_shared: bool = False
    dense_lead: int = 0
    least_layers: int = 1
    unused_layers: int = 0
    encoder: bool = False

    @property
    def arch(self) -> str:
        return self.gguf_name or self.name

    def common_header(self, d: Dims) -> dict[str, Value]:
        """Keys every architecture reads (llama_model_base::load_hparams), overlaid with its own."""
        values: dict[str, Value] = {
            "context_length": d.context,
            "embedding_length": d.embd,
            "block_count": d.layers,
            "feed_forward_length": d.ff,
            "vocab_size": d.vocab,
            "attention.head_count": d.heads,
            "attention.head_count_kv": d.heads,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
            "rope.dimension_count": d.head_dim,
            "expert_count": d.experts,
            "expert_used_count": d.used,
        }
        return values | self.header(d)

    def tensors(self, d: Dims) -> list[Tensor]:
        """All tensors in file order: embedding, output head, then layer by layer."""
        out = []
        for tensor in self.plain_tensors(d):
            out.append(tensor)
            if d.expert_scales and tensor.role == "experts" and "gate_up" not in tensor.name:
                name = tensor.name.removesuffix("weight") + "scale"
                out.append(Tensor(name, tensor.shape[:1], "scale"))
        return out

    def plain_tensors(self, d: Dims) -> list[Tensor]:
        """All tensors but scales of experts."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Spelled(Architecture):
    """An architecture whose tensors are listed here. layer: the tensors of layer il."""

    layer: Callable[[Dims, int], list[Tensor]]

    def plain_tensors(self, d: Dims) -> list[Tensor]:
        out = [
            Tensor("token_embd.weight", (d.vocab, d.embd), "embedding"),
            Tensor("output_norm.weight", (d.embd,), "norm"),
            Tensor("output.weight", (d.vocab, d.embd), "output", 2.0),
        ]
        for il in range(d.layers):
            out += self.layer(d, il)
        return out


def attention(
    d: Dims, il: int, *, kv_heads: int | None = None, bias: bool = False, head_norm: int = 0
) -> list[Tensor]:
    """Multi-head attention with its norm. head_norm: length of the norms on queries and keys (0: none)."""
    b, q, kv = f"blk.{il}.", d.heads * d.head_dim, (kv_heads or d.heads) * d.head_dim
    out = [
        Tensor(b + "attn_norm.weight", (d.embd,), "norm"),
        Tensor(b + "attn_q.weight", (q, d.embd)),
        Tensor(b + "attn_k.weight", (kv, d.embd)),
        Tensor(b + "attn_v.weight", (kv, d.embd)),
        Tensor(b + "attn_output.weight", (d.embd, q), gain=d.branch_gain),
    ]
    if bias:
        out += [Tensor(f"{b}attn_{p}.bias", (n,), "bias", 0.1) for p, n in (("q", q), ("k", kv), ("v", kv))]
    if head_norm:
        q_norm, k_norm = (q, kv) if head_norm == q else (head_norm, head_norm)
        out += [
            Tensor(b + "attn_q_norm.weight", (q_norm,), "norm"),
            Tensor(b + "attn_k_norm.weight", (k_norm,), "norm"),
        ]
    return out


def dense(d: Dims, il: int) -> list[Tensor]:
    """A dense SwiGLU block with its norm."""
    return [Tensor(f"blk.{il}.ffn_norm.weight", (d.embd,), "norm"), *_swiglu(d, il, "", d.dense_ff)]


def moe(
    d: Dims, il: int, *, shared: bool = False, shared_gate: bool = False, gain: float = 2.0
) -> list[Tensor]:
    """Router and SwiGLU experts with their norm; optionally shared experts, with a sigmoid gate or without.

    gain: makes up for gate weights below one (they come from a softmax over all experts).
    """
    b, e = f"blk.{il}.", d.experts
    out = [
        Tensor(b + "ffn_norm.weight", (d.embd,), "norm"),
        Tensor(b + "ffn_gate_inp.weight", (e, d.embd), "router", 2.0),
    ]
    if d.fused_gate_up:
        out += [Tensor(b + "ffn_gate_up_exps.weight", (e, 2 * d.ff, d.embd), "experts")]
    else:
        out += [Tensor(f"{b}ffn_{p}_exps.weight", (e, d.ff, d.embd), "experts") for p in ("gate", "up")]
    out += [Tensor(b + "ffn_down_exps.weight", (e, d.embd, d.ff), "experts", gain * d.branch_gain)]
    if shared and shared_gate:
        out += [Tensor(b + "ffn_gate_inp_shexp.weight", (d.embd,), "vector_matrix")]
    if shared:
        out += _swiglu(d, il, "_shexp", d.shared_ff)
    return out


def _swiglu(d: Dims, il: int, suffix: str, width: int) -> list[Tensor]:
    b = f"blk.{il}.ffn_"
    return [
        Tensor(f"{b}gate{suffix}.weight", (width, d.embd)),
        Tensor(f"{b}up{suffix}.weight", (width, d.embd)),
        Tensor(f"{b}down{suffix}.weight", (d.embd, width), gain=d.branch_gain),
    ]
