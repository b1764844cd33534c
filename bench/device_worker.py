"""One side of bench/device.py: `device_worker.py JSON`, driven over its pipes (worker.TurnWorker).

The first answer comes when the model is loaded and warm; the exit code is 3 when it does not load.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
from decoding import PROMPT, decode_on, read_text, warm_up
from worker import take_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_emulator import Emulator, Speed, library_path
from bench.device_like import everything, fill, set_apart


class _Override(ctypes.Structure):
    """``struct llama_model_tensor_buft_override`` of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class StockWithExpertsOnCpu(llama_cpp.Llama):
    """Plain llama-cpp-python with the experts of the first ``n_cpu_moe`` layers in the CPU's memory."""

    def __init__(self, model: str, n_cpu_moe: int, **options: Any) -> None:
        cpu = ctypes.CDLL("libggml-cpu.so.0").ggml_backend_cpu_buffer_type
        cpu.restype = ctypes.c_void_p
        self._overrides = (_Override * (n_cpu_moe + 1))()
        for layer in range(n_cpu_moe):
            pattern = rf"blk\.{layer}\.ffn_(gate|up|down|gate_up)_(ch)?exps"
            self._overrides[layer] = _Override(pattern.encode(), cpu())
        super().__init__(model, **options)

    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        """The parameters of the load, with the overrides and without repacking, as SPICE runs."""
        self._params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p).value
        self._params.use_extra_bufts = False
        return self._params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        self._params = params


def energy() -> dict[str, float]:
    """Joules so far, of the CPU packages (RAPL) and the GPU (NVML), as far as they can be read."""
    joules: dict[str, float] = {}
    for zone in sorted(Path("/sys/class/powercap").glob("intel-rapl:?")):
        try:
            joules[(zone / "name").read_text().strip()] = int((zone / "energy_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        joules["gpu"] = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
    except Exception:  # no NVML, no such counter: there is no figure then
        pass
    return joules


def load(job: dict[str, Any]) -> llama_cpp.Llama:
    """The model of one side. Raises ValueError, or a SpiceError, when it does not fit."""
    options: dict[str, Any] = dict(
        n_ctx=2048,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        n_gpu_layers=-1,
        verbose=False,
        seed=1,
    )
    if job["kind"] == "stock":
        return StockWithExpertsOnCpu(job["model"], job["n_cpu_moe"], **options)
    from spice_moe import Llama

    return Llama(
        job["model"],
        ram_budget=job["ram"],
        vram_budget=job["vram"],
        placement=job["placement"],
        strategy=job.get("strategy") or None,
        prefetch=job.get("prefetch", True),
        preload="fill" not in job,
        timeline=job.get("timeline"),
        **options,
    )


class Side:
    """A model that is loaded and warm, and what it measures of itself."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._emulator = None
        if job["emulate"] is not None:
            self._emulator = Emulator(library_path())
            self._emulator.configure(Speed(**job["emulate"]))
        started = time.perf_counter()
        self._llm = load(job)
        self._spice = getattr(self._llm, "spice", None)
        self.loaded: dict[str, Any] = {"load_seconds": time.perf_counter() - started, "prefill": {}}
        self._joules: dict[str, float] = {}
        text = read_text(
            self._llm, job["text"], max([*job["prefills"], PROMPT + job["warm"] + job["decode"]])
        )
        if "fill" in job and self._spice is not None:
            fill(self._spice._core, job["fill"])
        for length in job["prefills"]:
            self._llm.reset()
            started = time.perf_counter()
            self._llm.eval(text[:length])
            self.loaded["prefill"][str(length)] = time.perf_counter() - started
        if job["apart"]:
            set_apart()
        self._rest = list(
            text[-job["decode"] :] if job["from_end"] else warm_up(self._llm, text, job["warm"])
        )
        if self._spice is not None:
            self._spice.reset_stats()
        if self._emulator is not None:
            self._emulator.reset_counters()

    def decode(self, tokens: int) -> dict[str, Any]:
        """The text's next tokens."""
        now, self._rest = self._rest[:tokens], self._rest[tokens:]
        before = energy()
        seconds, best = decode_on(self._llm, now)
        for name, joules in energy().items():
            self._joules[name] = self._joules.get(name, 0.0) + joules - before.get(name, joules)
        return {"seconds": seconds, "best": best}

    def report(self) -> dict[str, Any]:
        """What the decoding so far was made of."""
        report: dict[str, Any] = {"joules": self._joules}
        if self._spice is not None:
            stats = self._spice.stats()
            report["plan"] = stats.pop("plan")
            report["counters"] = stats
        if self._emulator is not None:
            report["device"] = self._emulator.counters()
        return report

    def uses(self) -> dict[str, Any]:
        """All experts, those first that the tokens so far used most."""
        assert self._spice is not None
        return {"experts": everything(self._spice._core.uses())}

    def close(self) -> None:
        """Free the model; writes the timeline."""
        self._llm.close()


def main() -> int:
    """Serve requests for the job of argv[1] until stdin ends; see the parent for its fields."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    try:
        side = Side(job)
    except (ValueError, MemoryError) as error:
        print(f"{job['label']}: {error}", file=sys.stderr)
        return 3
    take_turns(side.loaded, {"decode": side.decode, "report": side.report, "uses": side.uses})
    side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
