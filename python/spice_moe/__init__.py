"""SPICE: Mixture-of-Experts GGUF models larger than fast memory, on a stock llama-cpp-python.

    from spice_moe import Llama

    llm = Llama("model.gguf", n_ctx=2048)
    print(llm.spice.plan)

Importing this package checks that the installed llama-cpp-python is the one SPICE was built for and raises
:class:`SpiceVersionError`, naming what to install, if it is not.
"""

from . import startup

startup.begin()  # before the imports that take time

from importlib.metadata import version  # noqa: E402

from ._versions import check_versions  # noqa: E402
from .errors import (  # noqa: E402
    SpiceBudgetError,
    SpiceDeviceError,
    SpiceError,
    SpiceFileNotFoundError,
    SpiceFormatError,
    SpiceIOError,
    SpiceMemoryError,
    SpiceUnsupportedError,
    SpiceVersionError,
)

# Before anything that needs llama_cpp or the compiled core.
try:
    check_versions()
except SpiceVersionError as error:
    startup.refuse(error)
    raise

from .device import placements  # noqa: E402
from .llama import Llama  # noqa: E402
from .options import SpiceOptions, predictors, strategies  # noqa: E402
from .plan import Plan  # noqa: E402
from .stats import COUNTERS  # noqa: E402

__version__ = version("spice-moe")

__all__ = [
    "COUNTERS",
    "Llama",
    "Plan",
    "SpiceBudgetError",
    "SpiceDeviceError",
    "SpiceError",
    "SpiceFileNotFoundError",
    "SpiceFormatError",
    "SpiceIOError",
    "SpiceMemoryError",
    "SpiceOptions",
    "SpiceUnsupportedError",
    "SpiceVersionError",
    "__version__",
    "placements",
    "predictors",
    "strategies",
]
