"""The exceptions of SPICE, and their numbers in the C++ core.

Every class also derives from the built-in exception that fits, so that code written for ``llama_cpp.Llama``
(which raises ``ValueError`` for a bad path or a model that does not load) keeps working.

This module imports nothing of SPICE: the compiled core calls :func:`from_code` to build its exceptions.
"""

from __future__ import annotations


class SpiceError(Exception):
    """Base of everything SPICE raises on purpose. Raised itself only for a fault inside SPICE."""


class SpiceVersionError(SpiceError, ImportError):
    """The installed llama-cpp-python or ggml is not the one this build of SPICE is made for."""


class SpiceFormatError(SpiceError, ValueError):
    """The file is not a GGUF, ends too early, or its header lies about counts, sizes or offsets."""


class SpiceUnsupportedError(SpiceError, ValueError):
    """The model is valid, but SPICE or llama.cpp cannot run it (quantisation, architecture, version)."""


class SpiceIOError(SpiceError, OSError):
    """The disk or the operating system refused to read the model."""


class SpiceMemoryError(SpiceError, MemoryError):
    """Memory ran out."""


class SpiceBudgetError(SpiceError, ValueError):
    """The memory budget for experts cannot work; the message names the smallest that can."""


class SpiceDeviceError(SpiceError, RuntimeError):
    """An accelerator failed to compute. The next call starts with an empty pool there."""


class SpiceFileNotFoundError(SpiceError, FileNotFoundError, ValueError):
    """There is no such file. A ``ValueError`` too, because that is what ``llama_cpp.Llama`` raises."""


# The values of `enum Code` in cpp/store/status.h. 0 (ok) is no error and has no class.
_BY_CODE: dict[int, type[SpiceError]] = {
    1: SpiceFileNotFoundError,  # not_found
    2: SpiceFormatError,  # not_gguf
    3: SpiceFormatError,  # truncated
    4: SpiceFormatError,  # malformed
    5: SpiceUnsupportedError,  # unsupported
    6: SpiceIOError,  # io
    7: SpiceMemoryError,  # out_of_memory
    8: SpiceVersionError,  # version
    9: SpiceError,  # internal
    10: SpiceBudgetError,  # budget
    11: SpiceDeviceError,  # device
}


def from_code(code: int, message: str) -> SpiceError:
    """Return (not raise) the exception for a status of the C++ core; an unknown code gives ``SpiceError``."""
    return _BY_CODE.get(code, SpiceError)(message)
