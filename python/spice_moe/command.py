"""What SPICE's commands have in common: exit codes, and how a failure ends one."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import startup
from .budget import parse_size
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
) -> int:
    """Do the work of the command ``name``: its exit code, or that of what it raised, told in one line.

    json_errors: print the failure as JSON on stdout, too; verbose: with its traceback on stderr.
    """
    _open_streams()
    try:
        startup.end()  # inside, so that no Ctrl-C falls between
        code = work()
        sys.stdout.flush()  # now, while a failure can be told
        return code
    except KeyboardInterrupt:
        say(name, interrupted)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left
        _drop_output()
        return OTHER
    except Exception as error:
        code = USAGE if type(error) is ValueError else exit_code(error)
        if verbose:
            traceback.print_exc()
        message = one_line(error)
        say(name, f"error: {message}")
        if json_errors:
            failure = {"type": type(error).__name__, "message": message}
            with contextlib.suppress(OSError):
                print(json.dumps({"error": failure, "exit_code": code}))
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return code


def _open_streams() -> None:
    """Give Python the standard streams that the shell closed: it has None in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (for as long as we run)


def _drop_output() -> None:
    """Let what is still to be written go nowhere: Python would try again, and complain, at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"  # without Python's [Errno 2]
    return " ".join(text.split()) or type(error).__name__


def say(name: str, text: str) -> None:
    """A line on stderr. A closed stderr must not hide the exit code."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def count(text: str) -> int:
    """A whole number from 1 on, as an argparse type."""
    return integer(1)(text)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``."""
    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, not {text!r}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number from ``low`` to ``high``."""
    bounds = f"of {low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be a number {bounds}, not {text!r}")
        return value

    return parse


def size(text: str) -> int:
    """Bytes, written as 6GiB, as an argparse type."""
    return checked(parse_size)(text)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type from a function whose ValueError says what is wrong."""

    def checked_parse(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked_parse
