"""Low-rank stand-ins for missed experts (LoRE): what the options ask for, and what became of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _core
from .errors import SpiceFileNotFoundError, SpiceUnsupportedError

#: Expected KL divergence from the exact model that a token may cost, in nats, where nothing else is said.
DEFAULT_BUDGET = 0.02
_AUTO = "auto:"


def parse_auto(lore: object) -> float | None:
    """The bound of ``"auto:KL"``; None for everything else. Raises ValueError for one that is none."""
    if not (isinstance(lore, str) and lore.startswith(_AUTO)):
        return None
    try:
        bound = float(lore.removeprefix(_AUTO))
    except ValueError:
        bound = math.nan
    if not 0 < bound < math.inf:
        raise ValueError(f'lore={lore!r}: give nats of KL per token, as in "auto:0.01"')
    return bound


def switch(lore: object) -> object:
    """``"on"`` and ``"off"``, as command lines and settings have them, as True and False; else itself."""
    return {"on": True, "off": False}.get(lore.lower(), lore) if isinstance(lore, str) else lore


def check(lore: object, budget: object, prompts: object) -> None:
    """Raise TypeError or ValueError, naming the option, when a value makes no sense."""
    if not (lore is None or isinstance(lore, bool | str | os.PathLike)):
        raise TypeError(f'lore must be True, False, a path, or "auto:KL", not {lore!r}')
    if not isinstance(prompts, bool):
        raise TypeError(f"lore_prompts must be True or False, not {prompts!r}")
    auto = parse_auto(lore)
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"lore_budget must be nats of KL per token, not {budget!r}")
    if not budget > 0:
        raise ValueError(f"lore_budget must be above 0 nats per token, not {budget!r}")
    if auto is not None:
        raise ValueError(f"lore={lore!r} is a budget already; leave out lore_budget")
    if not lore:
        raise ValueError(
            f"lore_budget={budget!r} bounds what lore may cost, and lore is off: give lore=True or a file of "
            f"spice-fit --lore, or leave out lore_budget"
        )


@dataclass(frozen=True)
class LorePlan:
    """What was resolved."""

    path: str
    layers: int  #: that have stand-ins
    bytes: int  #: of memory, part of ``ram_budget``
    share: float  #: of the bytes of all the model's experts
    budget: float | None  #: nats of expected KL per token; None: thresholds alone
    auto: bool
    prompts: bool

    def __str__(self) -> str:
        bound = "" if self.budget is None else f", expected KL at most {self.budget:g} nats per token"
        chosen = "thresholds chosen by cost" if self.auto else "light experts only"
        where = "" if self.prompts else ", prompts exact"
        return (
            f"approximate: missed experts may be replaced by stand-ins of {self.share:.1%} of their size "
            f"({Path(self.path).name}; {chosen}{bound}{where})"
        )


def load(
    core: _core.Model, *, lore: object, budget: float | None, prompts: bool, sidecar: Callable[[], str]
) -> LorePlan | None:
    """Read the stand-ins that the options ask for into memory and switch them on; None: none are asked for.

    ``sidecar``: gives the default file, "" for none. Raises the subclasses of SpiceError: no such file, a
    file that does not fit the model, or a budget that the file's calibration cannot keep.
    """
    if lore is None or lore is False:
        return None
    auto = parse_auto(lore)
    named = lore is not True and auto is None
    path = os.fspath(lore) if named else sidecar()  # type: ignore[arg-type]
    if not path or not Path(path).exists():
        what = f"no such file: {path}" if path else "the model has no sidecar beside it"
        raise SpiceFileNotFoundError(f"lore: {what}; fit stand-ins with spice-fit --lore 32")
    core.load_lore(path)
    facts = core.lore()
    assert facts is not None
    bound = auto if auto is not None else DEFAULT_BUDGET if budget is None else float(budget)
    if not facts["calibrated"] and not math.isinf(bound):
        raise SpiceUnsupportedError(
            f"{path}: does not say what its stand-ins cost, so no budget can be kept; fit them again with "
            f'spice-fit, or give lore_budget=float("inf")'
        )
    wide = {"max_share": 1.0, "max_mass": 1.0, "max_confidence": 1.0} if auto is not None else {}
    core.use_lore(budget=bound, prompts=prompts, **wide)
    kept = None if math.isinf(bound) else bound
    share = facts["bytes"] / core.summary()["expert_bytes"]
    return LorePlan(path, facts["layers"], facts["bytes"], share, kept, auto is not None, prompts)


def from_text(text: str) -> object:
    """The option from a command line. Raises ValueError as :func:`check`."""
    parse_auto(text)
    return switch(text)


def summary(stats: Mapping[str, Any], moe_layers: int) -> str:
    """What was replaced, for the one-line summary; "" where nothing was."""
    if not stats["lore_rows"]:
        return ""
    share = stats["lore_substituted"] / max(stats["lore_pairs"], 1)
    text = f"{100 * share:.1f} % of experts replaced by stand-ins"
    if stats["lore_kl"]:
        text += f" (expected KL {stats['lore_kl'] / stats['lore_rows'] * moe_layers:.2g} nats per token)"
    return text
