"""Shared by all tests: the repository on sys.path, and tiny models that are made once per session.

Property tests try the same examples in every run, so that a run says something about the change it is for. To
look for new ones: `SPICE_EXAMPLES=new pytest tests/policy`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("same", derandomize=True)
if os.environ.get("SPICE_EXAMPLES") != "new":
    hypothesis.settings.load_profile("same")

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
