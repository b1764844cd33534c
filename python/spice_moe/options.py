"""What a user can ask of SPICE, checked when it is asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _core, budget, device, files, lore
from .budget import Budget
from .device import VramBudget

#: Called with the loaded fraction, 0.0 to 1.0; returning False (not None) stops the load.
ProgressCallback = Callable[[float], "bool | None"]

MAX_IO_THREADS = 64


def strategies() -> tuple[str, ...]:
    """The names that ``strategy`` takes; the default first."""
    return tuple(_core.policy.eviction_names())


def predictors() -> tuple[str, ...]:
    """The names that ``predictor`` takes; the default first (``replay`` is told the future: for benches)."""
    return tuple(_core.policy.predictor_names())


@dataclass(frozen=True, kw_only=True)
class SpiceOptions:
    """Options of SPICE for one model. The defaults are exact: output bit-identical to llama.cpp's.

    Raises ``TypeError`` or ``ValueError``, naming the option, when a value makes no sense.
    """

    enabled: bool = True
    """False loads the model with plain llama.cpp, as ``llama_cpp.Llama`` would."""

    repack: bool = False
    """Let llama.cpp repack the weights that are not experts. Faster prompts on some CPUs; the last bits of
    the logits may then differ from llama.cpp without repacking. Has no effect on plain models, which stay
    as llama.cpp loads them."""

    ram_budget: Budget = "auto"
    """Memory for experts: ``"6GiB"``, ``"6G"``, a number of bytes, a fraction of the experts (``0.5`` or
    ``"50%"``), or ``"auto"``: what is free once everything else is loaded, at most what all experts take."""

    vram_budget: VramBudget = "auto"
    """Memory of the GPU for experts, as ``ram_budget``; ``"auto"``: what is free there once everything else
    is loaded, if ``n_gpu_layers`` is not 0; 0: none. With several GPUs, of each, or a list for each of them
    (``"6GiB,4GiB"``). :attr:`Plan.vram_reason` says what came of it."""

    placement: str | None = None
    """Who computes which expert when there are experts on the GPU: a name of ``spice_moe.placements()``."""

    strategy: str | None = None
    """Which expert leaves a full pool: a name of ``spice_moe.strategies()``; None is the default one."""

    direct_io: bool = True
    """Read experts past the page cache where the file system allows it."""

    io_threads: int | None = None
    """Reads kept in flight. None tries a few numbers on the first reads and keeps the best."""

    prefetch: bool | str = True
    """Read experts ahead of need, and send them to the GPU ahead of need. Each of both turns itself off while
    it does not pay; ``"always"`` keeps them on."""

    predictor: str | None = None
    """What predicts the next layers' experts: a name of ``spice_moe.predictors()``; None is the default."""

    sidecar: str | os.PathLike[str] | None = None
    """The file that ``spice-fit`` made for this model; None takes ``MODEL.spice.gguf`` if it is there."""

    lore: bool | str | os.PathLike[str] | None = None
    """Approximate, off by default: replace missed experts that matter little by low-rank stand-ins, from a
    file of ``spice-fit --lore``. True or ``"on"`` takes the sidecar beside the model, a path names the file,
    ``"auto:0.01"`` takes the sidecar and replaces what costs least, at 0.01 nats of expected KL per token;
    False, ``"off"`` and None are off (a file called ``off`` is ``"./off"``)."""

    lore_budget: float | None = None
    """With ``lore``: nats of expected KL divergence per token that stand-ins may cost on average, by the
    file's own calibration; None is 0.02, ``float("inf")`` is no bound but the thresholds."""

    lore_prompts: bool = False
    """With ``lore``: also in batches of more than 8 tokens, which are exact otherwise."""

    preload: bool = True
    """Between the load and the first token, read the experts that earlier runs of a large model used most
    into free room. Keeps what was used in a small file in the user's cache directory."""

    timeline: str | os.PathLike[str] | None = None
    """Write what happened when to this file as the model is closed, in Chrome's trace format, which Perfetto
    opens. Only for models that SPICE runs."""

    progress: ProgressCallback | bool | None = None
    """Progress of loading: True draws a bar on stderr, a callable gets fractions, None or False is silent."""

    def __post_init__(self) -> None:
        for name in ("enabled", "repack", "direct_io", "preload"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        object.__setattr__(self, "lore", lore.switch(self.lore))  # frozen: no plain assignment
        lore.check(self.lore, self.lore_budget, self.lore_prompts)
        budget.check(self.ram_budget)
        device.check_vram(self.vram_budget)
        if self.timeline is not None:
            files.check_output(files.name(self.timeline))
        if not (self.placement is None or isinstance(self.placement, str)):
            raise TypeError(f"placement must be a name, not {self.placement!r}")
        if self.placement is not None and self.placement not in device.placements():
            raise ValueError(
                f"no placement is called {self.placement!r}; choose one of: {' '.join(device.placements())}"
            )
        if not (self.strategy is None or isinstance(self.strategy, str)):
            raise TypeError(f"strategy must be a name, not {self.strategy!r}")
        if not (isinstance(self.prefetch, bool) or self.prefetch == "always"):
            raise TypeError(f'prefetch must be True, False or "always", not {self.prefetch!r}')
        if not (self.predictor is None or isinstance(self.predictor, str)):
            raise TypeError(f"predictor must be a name, not {self.predictor!r}")
        if not (self.sidecar is None or isinstance(self.sidecar, str | os.PathLike)):
            raise TypeError(f"sidecar must be a path, not {self.sidecar!r}")
        if isinstance(self.io_threads, bool) or not isinstance(self.io_threads, int | None):
            raise TypeError(f"io_threads must be a whole number, not {self.io_threads!r}")
        if self.io_threads is not None and not 1 <= self.io_threads <= MAX_IO_THREADS:
            raise ValueError(f"io_threads must be 1 to {MAX_IO_THREADS}, not {self.io_threads}")
        if not (self.progress is None or isinstance(self.progress, bool) or callable(self.progress)):
            raise TypeError(f"progress must be True, False, None or a callable, not {self.progress!r}")

    def with_overrides(self, **fields: Any) -> SpiceOptions:
        """A copy with the given fields replaced; a field given as None keeps its value.

        ``lore=False`` takes the bound with it: what is off needs none.
        """
        given = {k: v for k, v in fields.items() if v is not None}
        if lore.switch(given.get("lore")) is False:
            given.setdefault("lore_budget", None)
        return dataclasses.replace(self, **given)
