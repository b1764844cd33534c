"""Descriptions of MoE architectures: header values and tensors as llama.cpp's loader expects them.

To add one: write a `FromHeader` in the module of its family, with the keys that llama.cpp's
src/models/<arch>.cpp reads in load_arch_hparams (of llama-cpp-python 0.3.36); the tensors follow. A `Spelled`
one lists its tensors, too: for models whose parts are tuned, as the benchmarks' are.
"""

from __future__ import annotations

from models.architectures import classic, deepseek, hybrid, latent, ordinary, windowed
from models.architectures.parts import Architecture, Dims, Tensor

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a for module in (classic, deepseek, ordinary, windowed, latent, hybrid) for a in module.ALL
}

# Architectures of the pinned llama.cpp that have to do with experts, and are not made here.
LEFT_OUT: dict[str, str] = {
    "dflash": "a draft model: it computes only beside the model whose hidden states it reads",
    "graniteswitch": "its MUL_MAT_ID chooses between adapters of a dense model; there are no expert tensors",
    "refact": "the loader takes expert tensors, but the graph does not compute them",
    "bert, lfm2, phi3": "the graph could have experts, but only nomic-bert-moe, lfm2moe and phimoe load any",
    "nemotron_h": "as nemotron_h_moe, whose name files with experts have",
}


def table() -> str:
    """All architectures, what is special about each, and those left out with the reason."""
    rows = []
    for a in sorted(ARCHITECTURES.values(), key=lambda a: a.name):
        extras = [text for text, has in (("fused gate_up", a.fuses), ("scales", a.scales)) if has]
        rows.append((a.name, a.what + (f" [{', '.join(extras)}]" if extras else "")))
    width = max(len(name) for name, _ in [*rows, *LEFT_OUT.items()])
    lines = [f"{name:{width}}  {what}" for name, what in rows]
    lines += ["", "Left out:", *(f"{name:{width}}  {why}" for name, why in LEFT_OUT.items())]
    return "\n".join(lines)


__all__ = ["ARCHITECTURES", "LEFT_OUT", "Architecture", "Dims", "Tensor", "table"]
