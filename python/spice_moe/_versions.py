"""Refuses to run on another llama-cpp-python or ggml than the compiled core was built for.

The core uses ggml's plug-in interface, which changes without notice: with other libraries it would crash.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from .errors import SpiceVersionError

_DISTRIBUTION = "spice-moe"
_HOST = "llama-cpp-python"


def check_versions() -> None:
    """Import llama_cpp and then the core, and compare versions. Raises SpiceVersionError."""
    pinned = _pinned_host()
    try:
        # First, because its import loads the libraries that the core lands on.
        host = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise SpiceVersionError(
            f"SPICE needs {_HOST} {pinned}, which does not import ({error}): {_remedy(pinned)}"
        ) from error
    if host.__version__ != pinned:
        raise SpiceVersionError(f"SPICE needs {_HOST} {pinned}, found {host.__version__}: {_remedy(pinned)}")
    try:
        core = importlib.import_module("spice_moe._core")
    except ImportError as error:
        raise SpiceVersionError(
            f"the compiled core of SPICE does not load ({error}); "
            f"reinstall both: {_remedy(pinned)} && pip install --force-reinstall --no-deps {_DISTRIBUTION}"
        ) from error
    if host.__version__ != core.LLAMA_CPP_PYTHON:
        raise SpiceVersionError(
            f"SPICE was built for {_HOST} {core.LLAMA_CPP_PYTHON}, found {host.__version__}: "
            f"{_remedy(core.LLAMA_CPP_PYTHON)}"
        )
    running = core.runtime_ggml_version()
    if running != core.GGML_VERSION:
        raise SpiceVersionError(
            f"SPICE was built for ggml {core.GGML_VERSION}, but ggml {running} is loaded "
            f"(another package's, or LLAMA_CPP_LIB_PATH): {_remedy(pinned)}"
        )


def _pinned_host() -> str:
    """The exact version of llama-cpp-python in this package's own requirements."""
    for requirement in metadata.requires(_DISTRIBUTION) or ():
        name, _, pinned = requirement.partition("==")
        if name == _HOST:
            return pinned
    raise SpiceVersionError(f"{_DISTRIBUTION} is damaged: pip install --force-reinstall {_DISTRIBUTION}")


def _remedy(pinned: str) -> str:
    return f"pip install {_HOST}=={pinned}"
