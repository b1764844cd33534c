"""One model's tie between llama.cpp's loader and the SPICE core."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import llama_cpp

from . import _core, files, lore
from .budget import FreeMemory, free_memory, is_auto, resolve
from .device import (
    DeviceShare,
    VramChoice,
    budgets_for,
    owners,
    pinned_limit,
    resolve_vram,
    warn_if_pageable,
)
from .errors import SpiceBudgetError, SpiceMemoryError
from .loading import LoadMonitor
from .options import SpiceOptions
from .plan import EXACT, EXACT_STOCK, ON_DEVICE, REPACKED, Plan, format_bytes
from .sidecar import default_path
from .usage import add_run, hottest_first, read_uses, usage_file, write_uses

#: Bytes of experts below which reading them takes no time that anybody would notice.
WORTH_PRELOADING = 2**30

# What is asked of a GPU whose free memory is not to be had in one piece, or went to others meanwhile.
AUTO_SHARES = (1.0, 0.8, 0.5, 0.25)

# Biases and scales of experts: SPICE computes with them on the host, and llama.cpp would otherwise put them
# on the GPU and copy all of them back for every layer call.
_BESIDE_EXPERTS = rb"^blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_(exps|chexps)\.(bias|scale)$"
_USED_KEY = ".expert_used_count"
# (memory-mapped, locked) -> what the plan calls it
_LOAD_MODES = {
    (True, False): "mmap",
    (True, True): "mmap+mlock",
    (False, False): "read",
    (False, True): "read+mlock",
}


class _BuftOverride(ctypes.Structure):
    """``struct llama_model_tensor_buft_override`` of llama.h; llama-cpp-python has no class for it."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def open_core(path: str, options: SpiceOptions, kv_overrides: dict[str, Any] | None) -> _core.Model:
    """Read and check the headers of the model. Blocks on disk. Raises the subclasses of SpiceError."""
    asked = {key: used for key, used in (kv_overrides or {}).items() if key.endswith(_USED_KEY)}
    # bool is an int to Python and a type mismatch to llama.cpp, which refuses it by itself.
    used = next((n for n in asked.values() if isinstance(n, int) and not isinstance(n, bool)), 0)
    settings = {
        "io_threads": options.io_threads or 0,
        "eviction": options.strategy or "",
        "direct_io": options.direct_io,
        "prefetch": bool(options.prefetch),
        "prefetch_always": options.prefetch == "always",
        "predictor": options.predictor or "",
        "sidecar": sidecar_for(path, options),
        "sidecar_required": options.sidecar is not None,
    }
    try:
        core = _core.Model(path, expert_used=used, **settings)
        core.summary()
    except UnicodeDecodeError as error:
        raise files.not_utf8(path, error) from error
    if used and f"{core.summary()['architecture']}{_USED_KEY}" not in asked:  # meant for another architecture
        core.close()
        core = _core.Model(path, expert_used=0, **settings)
    return core


def sidecar_for(path: str, options: SpiceOptions, *, beside: bool | None = None) -> str:
    """What ``spice-fit`` made for the model: the file asked for, or the one beside the model; "" for none.

    ``beside``: look beside the model; None: if something is to be read ahead.
    """
    if options.sidecar is not None:
        return files.name(options.sidecar)
    look = bool(options.prefetch) if beside is None else beside
    neighbour = default_path(path)
    return str(neighbour) if look and neighbour.is_file() else ""


class Attachment:
    """Decides how one model is loaded and, if SPICE runs it, puts that into llama.cpp's parameters.

    Owns the core model and every ctypes object that llama.cpp sees during the load. Used by the thread that
    constructs and closes the model.
    """

    def __init__(self, path: str, options: SpiceOptions, arguments: dict[str, Any]) -> None:
        """``arguments`` are the keyword arguments for ``llama_cpp.Llama``. Raises as :func:`open_core`."""
        self.options = options
        self.mmap: bool = bool(arguments.get("use_mmap", True))
        self.mlock: bool = bool(arguments.get("use_mlock", False))
        self._lora = arguments.get("lora_path") is not None
        self._kv_overrides: dict[str, Any] | None = arguments.get("kv_overrides")
        self._preload = ""
        self._offloaded = bool(arguments.get("n_gpu_layers", 0))
        self._vram: dict[str, VramChoice] = {}  # by device
        self._auto: set[str] = set()  # the devices with vram_budget="auto"
        self._needs: list[dict[str, Any]] = []
        self._n_threads = 1
        self._lore: lore.LorePlan | None = None
        self._pool_bytes: int | None = None  # "auto" is not known before the rest is loaded
        core = open_core(path, options, self._kv_overrides)
        try:
            self._summary = core.summary()
            self.n_layers = int(self._summary["n_layers"])
            self.mode, self.reason = self._decide(bool(arguments.get("vocab_only", False)))
            self._overrides = (_BuftOverride * 3)()  # the last stays NULL: the end of the list
            if self.mode == "spice":
                self._pool = core.pool()
                self._lore = lore.load(
                    core,
                    lore=options.lore,
                    budget=options.lore_budget,
                    prompts=options.lore_prompts,
                    sidecar=lambda: sidecar_for(path, options, beside=True),
                )
                if not is_auto(self.options.ram_budget):  # refuse what cannot work before the long load
                    self._pool_bytes = self._resolve(FreeMemory(0, "unused"))
                    if self._pool_bytes < self._pool["smallest"]:
                        least = self._pool["smallest"] + self._lore_bytes
                        raise SpiceBudgetError(
                            f"{path}: ram_budget={self.options.ram_budget!r} is too small for its experts; "
                            f"give at least {least} bytes ({format_bytes(least)})"
                        )
                _core.register_backend()
                self._overrides[0] = _BuftOverride(core.override_pattern.encode(), core.buffer_type())
                # llama.cpp chooses better where there is a choice: GPU layers, repacked weights.
                if not (options.repack or self._offloaded):
                    self._overrides[1] = _BuftOverride(core.host_pattern.encode(), core.host_buffer_type())
                elif self._offloaded:
                    self._overrides[1] = _BuftOverride(_BESIDE_EXPERTS, core.host_buffer_type())
        except BaseException:
            core.close()
            raise
        if self.mode == "plain":
            core.close()
        self.core: _core.Model | None = core if self.mode == "spice" else None
        total = self._summary["other_bytes"] + self._summary["expert_bytes"]
        spared = self._summary["expert_bytes"] if self.mode == "spice" else 0
        self.monitor = LoadMonitor(
            options.progress,
            portion=(total - spared) / max(total, 1),
            verbose=bool(arguments.get("verbose", True)),
        )

    def _decide(self, vocab_only: bool) -> tuple[str, str]:
        if not self.options.enabled:
            return "plain", "asked for by enabled=False"
        if self._summary["dense"]:
            reason = "the model is dense: it has no experts"
            if self.options.lore:  # a wish for something lossy and fast is not dropped in silence
                reason += ", so lore does nothing"
                warnings.warn(reason, stacklevel=2)
            return "plain", reason
        if vocab_only:
            return "plain", "vocab_only loads no weights"
        return "spice", "the model has experts"

    def apply(self, params: llama_cpp.llama_model_params) -> None:
        """Set what SPICE needs on the parameters of the load; everything else is the user's."""
        params.progress_callback = self.monitor.progress_callback
        if self.mode == "plain":
            return
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p).value
        # llama.cpp's mmap reads the whole file (MAP_POPULATE), experts included.
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MLOCK if self.mlock else llama_cpp.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = self.options.repack

    def finish_load(self) -> None:
        """Give the expert tensors their names back, once llama.cpp has loaded the model."""
        if self.core is not None:
            self.core.finish_load()

    def build_pool(self, n_threads: int) -> None:
        """Make the pool of experts, once everything else is in memory. Raises SpiceBudgetError.

        ``n_threads``: for single tokens, for the probe of what a GPU and the CPU do with experts.
        """
        if self.core is None:
            return
        self._n_threads = n_threads
        if self._pool_bytes is None:
            self._pool_bytes = self._resolve(free_memory())
        if self.options.timeline is not None:
            self.core.start_timeline()
        needs = self._choose_devices(self.core)
        first = next((one for one in needs if self._vram[one["device"]].bytes), None)
        name, limit = ("", 0) if first is None else (first["device"], pinned_limit())
        self.core.build_pool(self._pool_bytes, limit, name)
        self._pool = self.core.pool()
        for one in needs:
            if self._vram[one["device"]].bytes:
                self._build_device_pool(self.core, one)
        self._preload = self._start_preload(self.core)

    def _choose_devices(self, core: _core.Model) -> list[dict[str, Any]]:
        """What each GPU that llama.cpp uses would need for its layers' experts; sets what it may take."""
        held = owners(self.monitor.layer_devices, core.moe_layers())
        budgets = budgets_for(self.options.vram_budget, list(held))
        needs = [core.device_needs(name, layers) | {"layers": layers} for name, layers in held.items()]
        for budget, one in zip(budgets, needs, strict=True):
            self._vram[one["device"]] = resolve_vram(budget, one, offloaded=self._offloaded)
            self._auto |= {one["device"]} if is_auto(budget) else set()
        self._needs = needs
        return needs

    def _build_device_pool(self, core: _core.Model, needs: dict[str, Any]) -> None:
        """Make a GPU's pool. Where "auto" took more than it gives after all, a smaller one or none."""
        name = needs["device"]
        asked = self._vram[name].bytes
        for share in AUTO_SHARES if name in self._auto else (1.0,):
            size = max(int(share * asked), needs["smallest"])
            try:
                core.build_device_pool(
                    name, needs["layers"], size, self.options.placement or "", self._n_threads
                )
            except SpiceMemoryError as error:
                if name not in self._auto:
                    raise
                self._vram[name] = VramChoice(0, str(error))
            else:
                reason = self._vram[name].reason if size == asked else "what it gave"
                self._vram[name] = VramChoice(size, reason)
                warn_if_pageable(needs, self._pool)
                return

    def _locked(self) -> bool:
        """Whether llama.cpp could lock what it loaded, if that was asked for; warns if not."""
        refused = next((line for line in self.monitor.messages if "failed to mlock" in line), None)
        if self.mlock and refused:
            warnings.warn(
                f"use_mlock: the weights are not locked in memory ({refused}); raise `ulimit -l`",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.mlock and refused is None

    def _device_plan(self) -> dict[str, Any]:
        """The plan's fields about GPUs."""
        pools = {} if self.core is None else {pool["device"]: pool for pool in self.core.device_pools()}
        shares = tuple(
            DeviceShare(
                device=one["device"],
                layers=tuple(one["layers"]),
                vram_budget=pool.get("budget", 0),
                slots=pool.get("n_slots", 0),
                reason=self._vram[one["device"]].reason,
                **{name: pool.get(name, 0.0) for name in ("link_speed", "device_speed", "host_speed")},
            )
            for one in self._needs
            for pool in (pools.get(one["device"], {}),)
        )
        reasons = dict.fromkeys(share.reason for share in shares)
        return dict(
            device=", ".join(share.device for share in shares if share.vram_budget),
            vram_budget=sum(share.vram_budget for share in shares),
            vram_slots=sum(share.slots for share in shares),
            vram_reason="; ".join(reasons),
            devices=tuple(share for share in shares if share.device),
            placement=next((pool["placement"] for pool in pools.values()), ""),
        )

    def _start_preload(self, core: _core.Model) -> str:
        """Read what earlier runs used most, as long as nothing else is to do; says what, or why not."""
        if not self.options.preload:
            return "off"
        if self._summary["expert_bytes"] < WORTH_PRELOADING:
            return "off: the model is small"
        try:
            uses = read_uses(usage_file(self._files()))
        except (OSError, ValueError) as error:
            return f"nothing: {error}"
        wanted = [] if uses is None else hottest_first(uses, core.uses())[: self._pool["n_slots"]]
        if not wanted:
            return "nothing: no earlier run"
        core.preload(wanted)
        return f"{len(wanted)} experts that earlier runs used most, until the first token"

    def _remember_uses(self, core: _core.Model) -> None:
        """Note which experts this run used, for the next one. Nothing depends on it, so no error leaves."""
        if not self.options.preload or self._summary["expert_bytes"] < WORTH_PRELOADING:
            return
        run = core.uses()
        if not any(map(any, run.values())):
            return
        with contextlib.suppress(OSError, ValueError):
            file = usage_file(self._files())
            before = None
            with contextlib.suppress(ValueError):  # damaged: this run takes its place
                before = read_uses(file)
            write_uses(file, add_run(before, run))

    def _files(self) -> list[Path]:
        return [Path(file["path"]) for file in self._summary["files"]]

    @property
    def certain_bytes(self) -> int:
        """Memory that the load takes in any case, the context's aside. A mapped file takes none."""
        if self.mode == "spice":
            return int(self._summary["other_bytes"]) + self._pool["smallest"] + self._lore_bytes
        mapped = self.mmap and not self._lora and not self.mlock
        return 0 if mapped else int(self._summary["other_bytes"] + self._summary["expert_bytes"])

    @property
    def _lore_bytes(self) -> int:
        return 0 if self._lore is None else self._lore.bytes

    def _resolve(self, free: FreeMemory) -> int:
        """Bytes of the pool. Stand-ins share an explicit budget; free memory is what they left."""
        beside = 0 if is_auto(self.options.ram_budget) else self._lore_bytes
        budget = resolve(
            self.options.ram_budget,
            everything=self._pool["everything"] + beside,
            smallest=self._pool["smallest"],
            free=free.bytes,
        )
        return budget - beside

    def write_timeline(self) -> None:
        """Write the timeline, if there is one. Raises ``SpiceIOError``."""
        if self.core is not None and self.options.timeline is not None:
            self.core.write_timeline(os.fspath(self.options.timeline))

    def forget_devices(self) -> None:
        """Drop what is in the GPUs' memory: a compute failed, and it may be incomplete."""
        if self.core is not None:
            self.core.forget_devices()

    def take_error(self) -> tuple[int, str] | None:
        """The core's last failure while computing, or None."""
        return None if self.core is None else self.core.take_error()

    def close(self) -> None:
        """Free the core. llama.cpp's model and contexts must be gone. Safe to call twice."""
        core, self.core = self.core, None
        if core is not None:
            self._remember_uses(core)
            core.close()

    def plan(self, *, n_threads: int, n_threads_batch: int) -> Plan:
        """The plan that ``llm.spice.plan`` shows."""
        summary = self._summary
        spice = self.mode == "spice"
        exactness = EXACT_STOCK
        if spice:
            on_device = any(choice.bytes for choice in self._vram.values())
            exactness = REPACKED if self.options.repack else ON_DEVICE if on_device else EXACT
        if self._lore is not None:
            exactness = str(self._lore)
        pool = self._pool if spice else {}
        used = (self._kv_overrides or {}).get(
            f"{summary['architecture']}{_USED_KEY}", summary["n_expert_used"]
        )
        return Plan(
            mode=self.mode,
            reason=self.reason,
            architecture=summary["architecture"],
            moe_layers=summary["n_layers_moe"],
            experts_per_layer=summary["n_expert"],
            experts_used=used,
            experts_total=summary["n_experts_total"],
            expert_types=tuple(sorted(name.upper() for name in summary["expert_types"])),
            expert_bytes=summary["expert_bytes"],
            slab_bytes_min=summary["slab_bytes_min"],
            slab_bytes_max=summary["slab_bytes_max"],
            other_bytes=summary["other_bytes"],
            load_mode=_LOAD_MODES[self.mmap and not self._lora and not spice, self._locked()],
            repack=self.options.repack if spice else True,
            ram_budget=pool.get("budget", 0),
            slots=pool.get("n_slots", 0),
            working_set_bytes=pool.get("working_set", 0),
            smallest_budget=pool.get("smallest", 0),
            strategy=pool.get("eviction", ""),
            **self._device_plan(),
            pinned_bytes=pool.get("pinned", 0),
            direct_io=pool.get("direct_io", False),
            predictor=pool.get("predictor", ""),
            predictor_bytes=pool.get("head_bytes", 0),
            predictor_note=pool.get("head_reason", ""),
            sidecar=pool.get("sidecar", ""),
            io_threads=self.options.io_threads if spice else 0,
            lore=dataclasses.asdict(self._lore) if self._lore is not None else {},
            kv_cache_bytes=self.monitor.cache_bytes,
            preload=self._preload,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            exact=exactness is not REPACKED and self._lore is None,
            exactness=exactness,
        )
