"""One run of bench/device.py: `device_worker.py JSON`. Prints JSON; exits with 3 when nothing loads."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
from decoding import PROMPT, decode, read_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_emulator import Emulator, Speed, library_path
from bench.device_like import awake, everything, fill, host_speed, likeness


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
    if job["kind"] == "learn":
        job = job | dict(vram="0")
    if job["kind"] == "stock":
        return StockWithExpertsOnCpu(job["model"], job["n_cpu_moe"], **options)
    from spice_moe import Llama

    return Llama(
        job["model"],
        ram_budget=job["ram"],
        vram_budget=job["vram"],
        placement=job["placement"],
        strategy=job.get("strategy") or None,
        preload="fill" not in job,
        timeline=job.get("timeline"),
        **options,
    )


def main() -> int:
    """Run the job of argv[1]; see the parent for its fields."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    emulator = None
    report: dict[str, Any] = {"factor": 1.0, "prefill": {}}
    if job["emulate"] is not None:
        emulator = Emulator(library_path())
        emulator.configure(Speed(**job["emulate"]))
    elif "like" in job:
        emulator = Emulator(library_path())
        like = likeness(job["like"], job["types"])
        emulator.configure(like.speed)
        report |= dict(factor=like.factor, host_before=like.host_speed, speed=asdict(like.speed))
    started = time.perf_counter()
    try:
        llm = load(job)
    except (ValueError, MemoryError) as error:
        print(f"{job['label']}: {error}", file=sys.stderr)
        return 3
    report["load_seconds"] = time.perf_counter() - started
    warm, counted = job["warm"], job["decode"]
    text = read_text(llm, job["text"], max([*job["prefills"], PROMPT + warm + counted]))
    if job["kind"] == "learn":
        decode(llm, text[-counted:], 0, counted - PROMPT)
        print(json.dumps(dict(experts=everything(llm.spice._core.uses()))))  # type: ignore[attr-defined]
        llm.close()
        return 0
    if "fill" in job and job["kind"] == "spice":
        fill(llm.spice._core, job["fill"])  # type: ignore[attr-defined]
    for length in job["prefills"]:
        llm.reset()
        started = time.perf_counter()
        llm.eval(text[:length])
        report["prefill"][str(length)] = time.perf_counter() - started
    before: dict[str, float] = {}

    def start() -> None:
        if job["kind"] == "spice":
            llm.spice.reset_stats()  # type: ignore[attr-defined]
        if emulator is not None:
            emulator.reset_counters()
        before.update(energy())

    with awake() if "like" in job else contextlib.nullcontext():
        report["decode_seconds"], report["best"] = decode(llm, text, warm, counted, start=start)
    report["joules"] = {name: joules - before[name] for name, joules in energy().items() if name in before}
    if job["kind"] == "spice":
        stats = llm.spice.stats()  # type: ignore[attr-defined]
        report["plan"] = stats.pop("plan")
        report["counters"] = stats
    if emulator is not None:
        report["device"] = emulator.counters()
    llm.close()
    if "like" in job:
        report["host_after"] = host_speed(job["types"])
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
