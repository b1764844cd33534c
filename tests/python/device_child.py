"""A process with a device that is no CPU, in which device tests run their functions.

A registered ggml device cannot be taken back and changes where llama.cpp computes, so it stays out of
pytest's own process. ``DeviceProcess.run(function, *arguments)`` calls a function of a test module in the
child; what it raises, asserts included, is raised here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from bench.device_emulator import FAILURES, Emulator, Speed

#: In a child with emulated devices: these.
emulator: Emulator | None = None


def set_up_emulator(library: Path, n_devices: int) -> None:
    """Make this process one with emulated devices."""
    global emulator
    emulator = Emulator(library, n_devices)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    devices = range(0 if emulator is None else len(emulator.names))
    for device in devices:
        emulator.configure(Speed(), device)
        for what in FAILURES:
            emulator.fail(what, 0, device)
        emulator.reset_counters(device)
    result = function(*arguments)
    for device in devices:
        assert emulator.misuse(device) == ""
    return result


class DeviceProcess:
    """One child, made by ``setup(*arguments)``; replaced by a fresh one when a function kills it."""

    def __init__(self, setup: Callable[..., None], *arguments: Any) -> None:
        self._setup = setup
        self._arguments = arguments
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(*arguments)`` in the child; emulated devices are in their default state."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=self._setup,
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
