"""Descriptions of MoE architectures: header values and tensors as llama.cpp's loader expects them.

To add one: write an `Architecture` in a module of this folder (see `classic`), from the parts in `parts`, and
list it here. Source of all names and shapes: llama.cpp's src/models/<arch>.cpp and src/llama-arch.cpp of
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from models.architectures import classic, deepseek
from models.architectures.parts import Architecture, Dims, Tensor

ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (*classic.ALL, *deepseek.ALL)}

__all__ = ["ARCHITECTURES", "Architecture", "Dims", "Tensor"]
