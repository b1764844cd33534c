"""ggml's RPC backend on loopback: a device beside the CPU that nobody here wrote, with memory of its own.

Its library is not in llama-cpp-python's wheel; it is two files of llama.cpp's source, which this builds where
``SPICE_LLAMA_CPP_SOURCE`` names the ``vendor/llama.cpp`` of the sdist of the very version that is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SOURCE_VARIABLE = "SPICE_LLAMA_CPP_SOURCE"


class RpcUnavailableError(Exception):
    """The library cannot be built here; the text says why."""


def build(folder: Path) -> Path:
    """Compile libggml-rpc.so into ``folder`` (half a minute). Raises :class:`RpcUnavailableError`."""
    source = os.environ.get(SOURCE_VARIABLE)
    if source is None:
        raise RpcUnavailableError(f"{SOURCE_VARIABLE} names no source of llama.cpp to build ggml's RPC from")
    compiler = shutil.which("c++")
    if compiler is None:
        raise RpcUnavailableError("there is no C++ compiler to build ggml's RPC with")
    ggml = Path(source) / "ggml"
    library = folder / "libggml-rpc.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    command += ["-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED"]
    command += [f"-I{ggml}/include", f"-I{ggml}/src"]
    command += [f"{ggml}/src/ggml-rpc/{name}.cpp" for name in ("ggml-rpc", "transport")]
    command += ["-o", str(library), f"-L{_libraries()}", "-lggml-base"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RpcUnavailableError(f"ggml's RPC does not compile: {done.stderr[:2000]}")
    return library


def _libraries() -> Path:
    import llama_cpp

    return Path(llama_cpp.__file__).parent / "lib"


def _load(library: Path) -> ctypes.CDLL:
    import llama_cpp  # noqa: F401  (loads the ggml libraries that this one links to)

    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def server(library: Path) -> Iterator[str]:
    """A server process with the CPU as its device; gives its endpoint, ``host:port``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, __file__, str(library), endpoint],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        else:
            raise RpcUnavailableError("the RPC server does not answer")
        yield endpoint
    finally:
        process.kill()
        process.wait()


def connect(library: Path, endpoint: str) -> None:
    """Register the server's device with ggml, in this process, for good."""
    rpc = _load(library)
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    registration = rpc.ggml_backend_rpc_add_server(endpoint.encode())
    if not registration:
        raise RpcUnavailableError(f"no device at {endpoint}")
    # By its soname: libggml.so is another file in the wheel, and loading that gives another, unused registry.
    register = ctypes.CDLL("libggml.so.0").ggml_backend_register
    register.argtypes = [ctypes.c_void_p]
    register.restype = None
    register(registration)


def _serve(library: Path, endpoint: str) -> None:
    rpc = _load(library)
    base = ctypes.CDLL("libggml.so.0")
    base.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(base.ggml_backend_dev_by_name(b"CPU"))
    rpc.ggml_backend_rpc_start_server(
        endpoint.encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices
    )


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
