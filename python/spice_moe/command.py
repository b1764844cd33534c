"""What SPICE's commands have in common: exit codes, and how a failure ends one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable

from .errors import (
    SpiceBudgetError,
    SpiceError,
    SpiceFormatError,
    SpiceIOError,
    SpiceMemoryError,
    SpiceUnsupportedError,
)

OK, OTHER, USAGE, NO_FILE, FORMAT, UNSUPPORTED, MEMORY, IO, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 7, 130


class UsageError(Exception):
    """Arguments that do not fit together, or do not fit the model."""


def run(
    name: str,
    work: Callable[[], int],
    *,
    json_errors: bool,
    verbose: bool = False,
    interrupted: str = "interrupted",
    value_error: int = USAGE,
) -> int:
    """Do the work of the command ``name``: its exit code, or that of what it raised, told in one line.

    json_errors: print the failure as JSON on stdout, too; verbose: with its traceback on stderr; value_error:
    the exit code of a plain ValueError, which is wrong usage where the work itself is Python.
    """
    try:
        return work()
    except KeyboardInterrupt:
        say(name, interrupted)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; Python must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OTHER
    except Exception as error:
        code = value_error if type(error) is ValueError else exit_code(error)
        if verbose:
            traceback.print_exc()
        message = one_line(error)
        say(name, f"error: {message}")
        if json_errors:
            failure = {"type": type(error).__name__, "message": message}
            print(json.dumps({"error": failure, "exit_code": code}))
        return code


def exit_code(error: Exception) -> int:
    """The exit code that tells scripts what kind of failure it was."""
    # FileNotFoundError before OSError, MemoryError before the rest: SPICE's classes derive from several.
    table: list[tuple[type[Exception] | tuple[type[Exception], ...], int]] = [
        (UsageError, USAGE),
        (FileNotFoundError, NO_FILE),
        (SpiceFormatError, FORMAT),
        (SpiceUnsupportedError, UNSUPPORTED),
        ((SpiceMemoryError, SpiceBudgetError, MemoryError), MEMORY),
        ((SpiceIOError, OSError), IO),
        (SpiceError, OTHER),
    ]
    return next((code for kinds, code in table if isinstance(error, kinds)), OTHER)


def one_line(error: Exception) -> str:
    """The error's message on one line; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def say(name: str, text: str) -> None:
    """A line on stderr. A closed stderr must not hide the exit code."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{name}: {text}", file=sys.stderr, flush=True)
