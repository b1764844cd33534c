"""Fixtures of the Python tests: processes with devices that are no CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_child import DeviceProcess

from bench.device_emulator import EmulatorUnavailableError, library_path


@pytest.fixture(scope="session")
def device() -> Iterator[DeviceProcess]:
    """A process with two emulated accelerators; skips where the emulator cannot be built."""
    try:
        library = library_path()
    except EmulatorUnavailableError as error:
        pytest.skip(str(error))
    process = DeviceProcess(library, n_devices=2)
    yield process
    process.close()
