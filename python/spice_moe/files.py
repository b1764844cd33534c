"""Paths that a user gave: names that can be opened, and outputs that would not destroy anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import _core
from .errors import SpiceFileNotFoundError, SpiceFormatError, SpiceIOError, SpiceUnsupportedError

AnyPath = str | os.PathLike[str]


def name(path: AnyPath) -> str:
    """The path as text. Raises SpiceUnsupportedError for one that llama-cpp-python cannot pass on."""
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SpiceUnsupportedError(
            f"{text!r}: the file's name is not UTF-8, and llama-cpp-python opens no such file; rename it"
        ) from None
    if "\0" in text:
        raise SpiceFileNotFoundError(f"no such file: {text!r}")
    return text


def headers(path: AnyPath) -> _core.Model:
    """The headers of a model, checked; to be closed. Blocks on disk. Raises the subclasses of SpiceError."""
    return _core.Model(name(path))


def summary(path: AnyPath) -> dict[str, Any]:
    """What the headers of a model say. Blocks on disk. Raises the subclasses of SpiceError."""
    core = headers(path)
    try:
        return core.summary()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    finally:
        core.close()


def not_utf8(path: AnyPath, error: UnicodeDecodeError) -> SpiceFormatError:
    """The exception for a header with texts that are not UTF-8."""
    return SpiceFormatError(f"{path}: texts in the header are not UTF-8 ({error}); get the file again")


def check_input(path: AnyPath, what: str) -> None:
    """Raise a SpiceError that names the path unless it is a file, `what`, that can be read."""
    if not os.path.exists(path):  # noqa: PTH110  (False where pathlib raises: loops, names too long)
        raise SpiceFileNotFoundError(f"no such file: {os.fspath(path) or repr('')}")
    if not Path(path).is_file():
        raise SpiceFormatError(f"{path}: is no regular file; give {what}")
    if not os.access(path, os.R_OK):
        raise SpiceIOError(f"{path}: no permission to read it; change that, or copy the file")


def check_output(path: AnyPath, *inputs: AnyPath | None) -> None:
    """Refuse, before the work, a file that cannot be written or is one of the inputs.

    Raises SpiceFileNotFoundError for a folder that does not exist, SpiceIOError for one that cannot be
    written to, ValueError for a path that is a folder or an input.
    """
    out = Path(path)
    if out.is_dir() or not out.name:
        raise ValueError(f"{path}: is a directory; give the name of a file in it")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise SpiceFileNotFoundError(f"no such folder: {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpiceIOError(f"{folder}: no permission to write there; choose another folder")
    for one in inputs:
        if one is not None and out.exists() and Path(one).exists() and out.samefile(one):
            raise ValueError(f"{path}: is an input, and would be overwritten; choose another name")
