"""Muon for matrices (momentum, then the nearest orthogonal matrix) and Adam for the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Experts are most of the weights: momentum is kept at every step, the update made at every fourth one.
EXPERTS_EVERY = 4


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """About the nearest orthogonal matrix of each matrix of g [..., rows, columns] (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = (g.mT if tall else g).float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for parameters of two or more dimensions; leading dimensions are a batch of matrices."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["n"] = state.get("n", 0) + 1
                state["m"].lerp_(p.grad, 1 - group["momentum"])
                if p.ndim == 3 and p.shape[-1] > 128 and state["n"] % EXPERTS_EVERY:
                    continue
                update = orthogonalize(p.grad.lerp(state["m"], group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * scale)


def make(model: nn.Module, lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """The optimisers of the model: Muon for hidden matrices, Adam for tables, routers and norms."""
    muon, tables, routers, small = [], [], [], []
    for name, p in model.named_parameters():
        if name in ("embed", "output"):
            tables.append(p)
        elif p.ndim == 1 or "router" in name:
            (routers if "router" in name else small).append(p)
        else:
            muon.append(p)
    groups = [
        dict(params=tables, lr=adam_lr),
        dict(params=routers, lr=adam_lr / 8),  # faster, the choice of experts would swing from step to step
        dict(params=small, lr=adam_lr),
    ]
    made = [Muon(muon, lr), torch.optim.Adam(groups, betas=(0.9, 0.98), eps=1e-10)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made
