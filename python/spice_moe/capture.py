"""Runs a text through a model in SPICE and hands out what each MoE layer read, chose and gave, by chunk.

Each chunk is a sequence of its own, from an empty context, evaluated with an output for every token: of
tokens without one, llama.cpp leaves out the last layer's experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import llama_cpp
import llama_cpp._internals as internals
import numpy as np
from numpy.typing import NDArray

from .errors import SpiceUnsupportedError
from .llama import Llama

Call = tuple[
    int,
    NDArray[np.float32] | None,
    NDArray[np.int32],
    NDArray[np.float32] | None,
    NDArray[np.float32] | None,
]  # as of _core.Model.take_capture: layer, hidden, ids, gates, down
_HEADROOM = 1 << 30  # bytes that one chunk's capture may take; what it takes is far less


@dataclass
class Chunk:
    """What one chunk did, by the model's layer number: hidden [tokens, width] F32, what the routed experts
    read; ids [tokens, top_k], the experts chosen; gates [tokens, top_k], the weights of their outputs; down
    [tokens, top_k, width_out], those outputs (before a bias), if asked for. A layer whose input is not shown
    has ids only."""

    tokens: int
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    gates: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    down: dict[int, NDArray[np.float32]] = field(default_factory=dict)


def tokenize(llm: Llama, text: str) -> list[int]:
    """The text's token ids, control tokens recognised, without BOS."""
    return llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)


def cut(llm: Llama, ids: Sequence[int], size: int) -> list[list[int]]:
    """Pieces of `size` tokens (the last may be shorter), each with BOS before it if the model wants one."""
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    lead = [llm.token_bos()] if llama_cpp.llama_vocab_get_add_bos(vocab) and size > 1 else []
    room = size - len(lead)
    return [lead + list(ids[i : i + room]) for i in range(0, len(ids), room)]


def run(llm: Llama, pieces: Sequence[Sequence[int]], *, outputs: bool = False) -> Iterator[Chunk]:
    """Evaluate each piece and yield what its layers did. Close it (contextlib.closing) before the model.

    Raises SpiceError subclasses as `Llama.eval` does; SpiceUnsupportedError if SPICE does not run the
    experts.
    """
    if llm.spice.plan.mode != "spice":
        raise SpiceUnsupportedError(f"there are no routed experts to watch: {llm.spice.plan.reason}")
    core = llm.spice._core
    batch = internals.LlamaBatch(n_tokens=llm.n_batch, embd=0, n_seq_max=1, verbose=False)
    core.start_capture(_HEADROOM, outputs)
    try:
        with contextlib.closing(batch):
            for piece in pieces:
                _forget(llm)
                for start in range(0, len(piece), llm.n_batch):
                    batch.set_batch(piece[start : start + llm.n_batch], n_past=start, logits_all=True)
                    with llm._failures_of_compute():
                        llm._ctx.decode(batch)
                yield _chunk(core.take_capture(), len(piece))
    finally:
        core.stop_capture()
        _forget(llm)


def _forget(llm: Llama) -> None:
    memory = llama_cpp.llama_get_memory(llm.ctx)
    if memory:  # encoders have none
        llama_cpp.llama_memory_clear(memory, True)


def _chunk(calls: list[Call], tokens: int) -> Chunk:
    """The calls of one chunk, which are several per layer if the chunk took several batches."""
    chunk = Chunk(tokens)
    by_layer: dict[int, list[Call]] = {}
    for call in calls:
        by_layer.setdefault(call[0], []).append(call)
    for layer, parts in by_layer.items():
        if sum(len(part[2]) for part in parts) != tokens:
            continue  # two banks of experts in a layer
        chunk.ids[layer] = np.concatenate([part[2] for part in parts])
        for out, place in ((chunk.hidden, 1), (chunk.gates, 3), (chunk.down, 4)):
            shown = [part[place] for part in parts if part[place] is not None]
            if len(shown) == len(parts):
                out[layer] = np.concatenate(shown)
    return chunk
