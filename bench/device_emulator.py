"""The emulated accelerator from Python: builds its library, registers its devices, sets and reads them.

A device that is registered stays for the life of the process, and llama.cpp gives it to every context: do it
in a process of its own. See cpp/emulator/emulator.h for what the numbers mean.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAILURES = {"allocation": 0, "copy": 1, "compute": 2, "event": 3}


class EmulatorUnavailableError(Exception):
    """The library cannot be built here; the text says why."""


class Settings(ctypes.Structure):
    """``spice_emulator_settings``."""

    _fields_ = [
        ("memory_bytes", ctypes.c_uint64),
        ("pinned_bytes", ctypes.c_uint64),
        ("upload_per_second", ctypes.c_double),
        ("download_per_second", ctypes.c_double),
        ("copy_latency_seconds", ctypes.c_double),
        ("pageable_speed", ctypes.c_double),
        ("compute_slowdown", ctypes.c_double),
        ("launch_seconds", ctypes.c_double),
        ("expert_bytes_per_second", ctypes.c_double),
        ("threads", ctypes.c_int32),
    ]


class Counters(ctypes.Structure):
    """``spice_emulator_counters``."""

    _fields_ = [
        ("upload_bytes", ctypes.c_uint64),
        ("uploads", ctypes.c_uint64),
        ("pinned_upload_bytes", ctypes.c_uint64),
        ("download_bytes", ctypes.c_uint64),
        ("downloads", ctypes.c_uint64),
        ("graphs", ctypes.c_uint64),
        ("nodes", ctypes.c_uint64),
        ("matmul_id_nodes", ctypes.c_uint64),
        ("upload_busy_seconds", ctypes.c_double),
        ("download_busy_seconds", ctypes.c_double),
        ("compute_busy_seconds", ctypes.c_double),
        ("late_seconds", ctypes.c_double),
        ("memory_used", ctypes.c_uint64),
        ("memory_peak", ctypes.c_uint64),
        ("pinned_used", ctypes.c_uint64),
    ]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a device and its link can do. The defaults cost no time and have no limits."""

    memory_bytes: int = 1 << 40
    pinned_bytes: int = 1 << 40
    upload_per_second: float = 0.0
    download_per_second: float = 0.0
    copy_latency_seconds: float = 0.0
    pageable_speed: float = 1.0
    compute_slowdown: float = 1.0
    launch_seconds: float = 0.0
    expert_bytes_per_second: float = 0.0
    threads: int = 1


def library_path() -> Path:
    """The library: $SPICE_EMULATOR_LIBRARY, or built under build/ (seconds, incremental).

    Raises :class:`EmulatorUnavailableError` where there is no CMake or no compiler.
    """
    if given := os.environ.get("SPICE_EMULATOR_LIBRARY"):
        return Path(given)
    cmake = shutil.which("cmake")
    if cmake is None:
        raise EmulatorUnavailableError("the emulated accelerator needs CMake to build, and there is none")
    folder = ROOT / "build" / "emulator"
    options = ["-DSPICE_EMULATOR=ON", "-DSPICE_BINDINGS=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    options.append(f"-DCMAKE_PREFIX_PATH={sysconfig.get_paths()['purelib']}")
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--target", "spice_emulator", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise EmulatorUnavailableError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return next(folder.glob("libspice_emulator.*"))


class Emulator:
    """The devices of this process. Make one, once; the methods may be called at any time after."""

    def __init__(self, library: Path, n_devices: int = 1) -> None:
        import llama_cpp  # noqa: F401  (loads the ggml libraries that the emulator links to)

        self._library = ctypes.CDLL(str(library))
        self._library.spice_emulator_misuse.restype = ctypes.c_char_p
        self.names = [f"EMU{index}" for index in range(n_devices)]
        self._check(self._library.spice_emulator_register(n_devices))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise ValueError("the emulator refused the call: a wrong number, or registered before")

    def configure(self, speed: Speed, device: int = 0) -> None:
        """Set what the device can do from now on. Raises ``ValueError`` for numbers that make no sense."""
        settings = Settings(*(getattr(speed, name) for name, _ in Settings._fields_))
        self._check(self._library.spice_emulator_configure(device, ctypes.byref(settings)))

    def fail(self, what: str, nth: int, device: int = 0) -> None:
        """Let the ``nth`` operation of that kind (:data:`FAILURES`) from now on fail; 0 takes it back."""
        self._check(self._library.spice_emulator_fail(device, FAILURES[what], ctypes.c_uint64(nth)))

    def counters(self, device: int = 0) -> dict[str, int | float]:
        """What the device has done since the last reset."""
        counters = Counters()
        self._check(self._library.spice_emulator_read_counters(device, ctypes.byref(counters)))
        return {name: getattr(counters, name) for name, _ in Counters._fields_}

    def reset_counters(self, device: int = 0) -> None:
        """Set the counters to zero."""
        self._check(self._library.spice_emulator_reset_counters(device))

    def misuse(self, device: int = 0) -> str:
        """What was asked of the device since the last reset that no device could do, or ``""``."""
        return self._library.spice_emulator_misuse(device).decode()
