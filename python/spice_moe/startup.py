"""Before the slow imports of a command: Ctrl-C and a wrong installation end it without a traceback.

Does nothing in a program that merely imports the package.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_COMMANDS = ("spice-run", "spice-trace", "spice-fit", "spice-sim", "spice-plan")
_INTERRUPTED, _OTHER = 130, 1  # as in command.py, which imports too much for here


def command_name() -> str | None:
    """What this process runs: a command of SPICE, by its name or as ``python -m``; None for anything else."""
    script = os.path.basename(sys.argv[0]) if sys.argv else ""  # noqa: PTH119  (pathlib is not imported yet)
    if script in _COMMANDS:
        return script
    if script == "-m":  # what python puts there until it has found the module
        module = next((b for a, b in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if a == "-m"), "")
        if module == "spice_moe" or module.startswith("spice_moe."):
            return module
    return None


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)  # nothing is loaded that would have to be put away


def begin() -> None:
    """Let Ctrl-C end a command at once, until :func:`end`; only where it would raise KeyboardInterrupt."""
    if command_name() is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def end() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def refuse(error: ImportError) -> None:
    """End a command that cannot run with this installation, in one line; returns in any other program."""
    if (name := command_name()) is not None:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(_OTHER)
