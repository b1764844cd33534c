"""Fixtures of the Python tests: processes with devices that are no CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rpc_device
from device_child import DeviceProcess, set_up_emulator

from bench.device_emulator import EmulatorUnavailableError, library_path


@pytest.fixture(scope="session")
def emulated() -> Iterator[DeviceProcess]:
    """A process with one emulated accelerator; skips where the emulator cannot be built."""
    try:
        library = library_path()
    except EmulatorUnavailableError as error:
        pytest.skip(str(error))
    process = DeviceProcess(set_up_emulator, library, 1)
    yield process
    process.close()


@pytest.fixture(scope="session")
def emulated_two() -> Iterator[DeviceProcess]:
    """A process with two emulated accelerators; skips where the emulator cannot be built."""
    try:
        library = library_path()
    except EmulatorUnavailableError as error:
        pytest.skip(str(error))
    process = DeviceProcess(set_up_emulator, library, 2)
    yield process
    process.close()


@pytest.fixture(scope="session")
def rpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    """A process with ggml's RPC backend as its device; skips where that cannot be built."""
    try:
        library = rpc_device.build(tmp_path_factory.mktemp("rpc"))
    except rpc_device.RpcUnavailableError as error:
        pytest.skip(str(error))
    with rpc_device.server(library) as endpoint:
        process = DeviceProcess(rpc_device.connect, library, endpoint)
        yield process
        process.close()


@pytest.fixture(params=["emulated", "rpc"])
def device(request: pytest.FixtureRequest) -> DeviceProcess:
    """Both kinds of device, one after the other."""
    return request.getfixturevalue(request.param)
