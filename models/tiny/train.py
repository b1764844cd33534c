"""The training loop: resumable, and always in time (the learning rate falls to zero at a given hour)."""

from __future__ import annotations

import csv
import signal
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F

from models.tiny import optim
from models.tiny.config import Config
from models.tiny.data import Stream
from models.tiny.model import Tiny


@dataclass(frozen=True)
class Plan:
    """until: when the learning rate reaches zero and training ends, as seconds since the epoch.

    decay: seconds before that in which it falls linearly; until then it is constant after `warmup` steps.
    rows, time: shape of a step's batch. balance: weight of the load-balancing loss.
    steps: stop after so many, whatever the time.
    """

    until: float
    decay: float = 1200.0
    rows: int = 4
    time: int = 512
    warmup: int = 40
    lr: float = 0.006
    adam_lr: float = 0.0015
    balance: float = 0.03
    save_every: float = 150.0
    steps: int = 1 << 30


def clock(text: str, now: datetime | None = None) -> float:
    """The next moment at which the clock shows HH:MM, as seconds since the epoch."""
    now = now or datetime.now()
    hour, minute = map(int, text.split(":"))
    then = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (then if then > now else then + timedelta(days=1)).timestamp()


def learning_rate(plan: Plan, step: int, now: float) -> float:
    """The share of the peak learning rate at this step and time."""
    return max(0.0, min(1.0, (step + 1) / plan.warmup, (plan.until - now) / plan.decay))


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old one or the new one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load_model(path: Path, *, precise: bool = True) -> Tiny:
    """The model of a checkpoint, for evaluation and export."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = Tiny(Config(**state["config"]), precise=precise)
    model.load_state_dict(state["model"])
    return model.eval()


class _Stop:
    """Set by SIGTERM or SIGINT: save and leave after this step."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


def run(folder: Path, config: Config, stream: Stream, plan: Plan) -> None:
    """Train until plan.until, on from folder/model.pt if it is there; a line per 10 steps to loss.csv."""
    torch.manual_seed(0)
    model = Tiny(config)
    optimizers = optim.make(model, plan.lr, plan.adam_lr)
    path, step, tokens, spent = folder / "model.pt", 0, 0, 0.0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step, tokens, spent = state["step"], state["tokens"], state["seconds"]
        for optimizer, fresh in zip(optimizers, optim.make(model, plan.lr, plan.adam_lr), strict=True):
            for group, new in zip(optimizer.param_groups, fresh.param_groups, strict=True):
                group["peak"] = new["peak"]

    def checkpoint() -> None:
        save(
            path,
            dict(
                config=asdict(config), model=model.state_dict(), step=step, tokens=tokens, seconds=spent,
                optimizers=[o.state_dict() for o in optimizers],
            ),
        )  # fmt: skip

    stop, last_save, losses = _Stop(), time.time(), []
    while not stop.wanted and time.time() < plan.until and step < plan.steps:
        began = time.time()
        share = learning_rate(plan, step, began)
        loss, balance = _step(model, optimizers, stream, plan, step, share)
        step, tokens, spent = step + 1, tokens + plan.rows * plan.time, spent + time.time() - began
        losses.append(loss)
        if step % 10 == 0:
            loads = torch.stack([e.load for e in model.experts()]) * config.experts
            row = [step, tokens, round(spent), round(sum(losses) / len(losses), 4), round(share, 4),
                   round(balance, 3), round(loads.min().item(), 3), round(loads.max().item(), 3)]  # fmt: skip
            with (folder / "loss.csv").open("a", newline="") as out:
                csv.writer(out).writerow(row)
            speed = plan.rows * plan.time / (time.time() - began)
            print(f"{datetime.now():%H:%M:%S}", *row, f"{speed:.0f} tok/s", flush=True)
            losses = []
        if time.time() - last_save > plan.save_every:
            checkpoint()
            last_save = time.time()
    checkpoint()
    print("stopped at step", step, flush=True)


def _step(
    model: Tiny, optimizers: list[torch.optim.Optimizer], stream: Stream, plan: Plan, step: int, share: float
) -> tuple[float, float]:
    """One update; returns the weighted loss per token and the balancing loss."""
    ids, weights = (torch.from_numpy(a) for a in stream.batch(step, plan.rows, plan.time))
    logits = model(ids[:, :-1]).flatten(0, 1).float()
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    loss = (each * counted).sum() / counted.sum()
    balance = sum((e.balance for e in model.experts()), torch.zeros(())) / len(model.experts())
    (loss + plan.balance * balance).backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item(), balance.item()
