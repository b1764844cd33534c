"""spice-tiny in PyTorch: the function of llama.cpp's graph for `deepseek2`, for training on a CPU.

Weights are float32; matrices multiply in bfloat16 while training (two to three times as fast on CPUs that
have it) and in float32 with `precise`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.tiny.config import Config


def _init(*shape: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (gain / shape[-1] ** 0.5))


class Norm(nn.Module):
    """RMS norm with a gain; float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [..., time, rope] (llama.cpp's NORM kind)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention: keys and values are made from a latent of `rank` values per token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q = _init(c.heads * (c.nope + c.rope), c.embd)
        self.kv_a = _init(c.rank + c.rope, c.embd)
        self.kv_norm = Norm(c.rank, c.eps)
        self.k_b = nn.Parameter(torch.randn(c.heads, c.rank, c.nope) / c.rank**0.5)
        self.v_b = _init(c.heads, c.value, c.rank)
        self.out = nn.Parameter(torch.zeros(c.embd, c.heads * c.value))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (batch, time, _), kind = self.c, x.shape, x.dtype
        q = F.linear(x, self.q.to(kind)).view(batch, time, c.heads, c.nope + c.rope).transpose(1, 2)
        latent, k_rope = F.linear(x, self.kv_a.to(kind)).split((c.rank, c.rope), -1)
        latent = self.kv_norm(latent).to(kind)
        k_b = self.k_b.transpose(1, 2).reshape(c.heads * c.nope, c.rank)
        kv = F.linear(latent, torch.cat((k_b, self.v_b.flatten(0, 1))).to(kind))
        k_nope, v = kv.split((c.heads * c.nope, c.heads * c.value), -1)
        k_nope = k_nope.view(batch, time, c.heads, c.nope).transpose(1, 2)
        v = v.view(batch, time, c.heads, c.value).transpose(1, 2)
        k_rope = rotate(k_rope[:, None], cos, sin).to(kind).expand(-1, c.heads, -1, -1)
        q = torch.cat((q[..., : c.nope], rotate(q[..., c.nope :], cos, sin).to(kind)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        # In float32: the gradients of scores are small differences that bfloat16 would round away.
        y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(kind)
        return F.linear(y.transpose(1, 2).flatten(2), self.out.to(kind))


class FeedForward(nn.Module):
    """A gated feed-forward block; gate and up are one matrix [2 * ff, embd]."""

    def __init__(self, embd: int, ff: int) -> None:
        super().__init__()
        self.gate_up = _init(2 * ff, embd)
        self.down = nn.Parameter(torch.zeros(embd, ff))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up.to(x.dtype)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down.to(x.dtype))


class Experts(nn.Module):
    """Routed experts (softmax gates, the chosen ones renormalised) beside a shared expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Parameter(torch.randn(c.experts, c.embd) * 0.5 / c.embd**0.5)
        self.gate_up = _init(c.experts, 2 * c.ff, c.embd)
        self.down = nn.Parameter(torch.zeros(c.experts, c.embd, c.ff))
        self.shared = FeedForward(c.embd, c.shared * c.ff)
        self.balance = torch.zeros(())  # the last call's load-balancing loss
        self.load = torch.zeros(c.experts)  # the last call's share of choices per expert
        self.entropy = torch.zeros(())  # the last call's mean entropy of the gates, in nats
        self.shuffle = False  # ablation: let random experts answer

    def forward(self, x: Tensor) -> Tensor:
        c, shape, kind = self.c, x.shape, x.dtype
        x = x.reshape(-1, c.embd)
        logits = F.linear(x.float(), self.router)
        probs = logits.softmax(-1)
        chosen = (
            torch.rand_like(probs).topk(c.used, -1).indices
            if self.shuffle
            else probs.topk(c.used, -1).indices
        )
        weights = probs.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c.weights_scale
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=c.experts)
        self.load = counts / counts.sum()
        self.entropy = -(probs * probs.clamp_min(1e-9).log()).sum(-1).mean().detach()
        self.balance = (
            c.experts * (self.load * probs.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
        )
        order = flat.argsort()
        parts = x.index_select(0, order.div(c.used, rounding_mode="floor")).split(counts.tolist())
        done = []
        for part, gate_up, down in zip(
            parts, self.gate_up.to(kind).unbind(), self.down.to(kind).unbind(), strict=True
        ):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            done.append(F.linear(F.silu(gate) * up, down))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        routed = torch.cat(done).index_select(0, back).view(-1, c.used, c.embd)
        mixed = torch.bmm(weights[:, None].to(kind), routed)[:, 0]
        return (mixed + self.shared(x)).view(shape)


class Block(nn.Module):
    def __init__(self, c: Config, dense: bool) -> None:
        super().__init__()
        self.attn_norm = Norm(c.embd, c.eps)
        self.attn = Attention(c)
        self.ffn_norm = Norm(c.embd, c.eps)
        self.ffn: FeedForward | Experts = FeedForward(c.embd, c.dense_ff) if dense else Experts(c)

    def forward(self, x: Tensor, kind: torch.dtype, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x).to(kind), cos, sin)
        return x + self.ffn(self.ffn_norm(x).to(kind))


class Tiny(nn.Module):
    """The language model: token ids [batch, time] to logits [batch, time, vocab]."""

    def __init__(self, c: Config, *, precise: bool = False) -> None:
        super().__init__()
        self.c, self.precise = c, precise
        self.embed = nn.Parameter(torch.randn(c.vocab, c.embd) * 0.5)
        self.blocks = nn.ModuleList(Block(c, il < c.dense_layers) for il in range(c.layers))
        self.norm = Norm(c.embd, c.eps)
        self.output = nn.Parameter(torch.zeros(c.vocab, c.embd))
        angles = torch.outer(
            torch.arange(c.context).float(), c.rope_base ** (-torch.arange(0, c.rope, 2).float() / c.rope)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def experts(self) -> list[Experts]:
        return [b.ffn for b in self.blocks if isinstance(b.ffn, Experts)]

    def forward(self, ids: Tensor) -> Tensor:
        kind = torch.float32 if self.precise else torch.bfloat16
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.embedding(ids, self.embed)
        for block in self.blocks:
            x = block(x, kind, cos, sin)
        return F.linear(self.norm(x).to(kind), (self.output + self.c.tie * self.embed).to(kind))
