"""A process with an emulated accelerator, in which device tests run their functions.

A registered ggml device cannot be taken back and changes where llama.cpp computes, so it stays out of pytest's
own process. ``DeviceProcess.run(function, *arguments)`` calls a function of a test module in the child; what it
raises, asserts included, is raised here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from bench.device_emulator import Emulator, Speed

#: In the child: its devices.
emulator: Emulator | None = None


def _set_up(library: Path, n_devices: int) -> None:
    global emulator
    emulator = Emulator(library, n_devices)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    assert emulator is not None
    for device in range(len(emulator.names)):
        emulator.configure(Speed(), device)
        for what in ("allocation", "copy", "compute"):
            emulator.fail(what, 0, device)
        emulator.reset_counters(device)
    result = function(*arguments)
    for device in range(len(emulator.names)):
        assert emulator.misuse(device) == ""
    return result


class DeviceProcess:
    """One child; replaced by a fresh one when a function kills it."""

    def __init__(self, library: Path, n_devices: int) -> None:
        self._arguments = (library, n_devices)
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(*arguments)`` in the child, its devices in their default state."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_set_up,
                initargs=self._arguments,
            )
        try:
            return self._pool.submit(_call, function, arguments).result()
        except BrokenProcessPool:
            self.close()
            raise

    def close(self) -> None:
        """End the child."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
