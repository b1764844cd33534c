"""The model that comes with the package: small, trained by `models/train_tiny.py`, for a first try."""

from __future__ import annotations

from pathlib import Path

from .errors import SpiceFileNotFoundError


def tiny_model() -> Path:
    """The path of ``spice-tiny.gguf``. Raises SpiceFileNotFoundError when this installation lacks it."""
    path = Path(__file__).with_name("data") / "spice-tiny.gguf"
    if not path.exists():
        raise SpiceFileNotFoundError(f"no such file: {path}; reinstall spice-moe, or name a model")
    return path
