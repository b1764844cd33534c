"""Shared by all tests: the repository on sys.path, and tiny models that are made once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

#: Makes a tiny model and returns its path; the same arguments give the same file.
ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """``tiny_model(arch, **options)``: a random MoE model (``models.synth.make``), made at first use."""
    from models.synth import make

    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[Any, ...], Path] = {}

    def tiny(arch: str, **options: Any) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in made:
            made[key] = make(arch, folder / f"{arch}-{len(made)}.gguf", **options)
        return made[key]

    return tiny
